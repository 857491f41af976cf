"""A server without tensors: simulated agreement and iteration times drive a real planner."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from sglang_vericache.core import Action, DraftState
from sglang_vericache.scheduler import Link, Planner, Work

Agreement = Callable[[int], float]
"""Agreement of the draft token at an output position."""


def machine(
    work: Work,
    fixed: float = 0.02,
    draft_row: float = 1e-3,
    verify_row: float = 1e-3,
    draft_key: float = 2e-6,
    verify_key: float = 1e-6,
    pair: float = 1e-6,
    loaded_key: float = 0.0,
) -> float:
    """Seconds of an iteration; as it stands, a CPU bound by the dot products of attention."""
    costs = (draft_row, draft_key, verify_row, verify_key, pair, loaded_key)
    return fixed + sum(n * cost for n, cost in zip(work.counts(), costs, strict=True))


@dataclass
class Request:
    rid: int
    context: int
    view: int
    agreement: Agreement
    remaining: int = 10**9
    margin: Callable[[int], float] | None = None
    """Top-1 margin of the draft token at an output position."""
    load: int = 0
    """Tokens to be copied for each verify pass."""
    found: Callable[[int], tuple[int, int, float]] | None = None
    """At an output position: tokens found by lookup, match before them, agreement of each."""
    took_found: bool = False
    drafted: int = 0
    output: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of every verify pass."""

    def state(self) -> DraftState:
        view = min(self.view + self.output + self.drafted, self.context)
        limit = self.remaining - self.output - 1
        return DraftState(
            self.rid, self.context, view, self.drafted, limit, self.margins, self.load
        )

    @property
    def margins(self) -> list[float]:
        positions = range(self.output, self.output + self.drafted)
        return [self.margin(position) for position in positions] if self.margin else []


class Simulation:
    """Runs a planner on ``machine(work, **costs)``; ``seconds`` and ``tokens`` are totals."""

    def __init__(self, planner: Planner, link: Link | None = None, **costs: float):
        self.link = link
        self.planner, self.costs, self.random = planner, costs, random.Random(0)
        self.requests: list[Request] = []
        self.seconds = 0.0
        self.tokens = 0
        self.verifying: list[int] = []
        """Requests that verified, per iteration."""

    def add(self, count: int, agreement: Agreement | float, context=6000, view=600, **more):
        rate = agreement if callable(agreement) else lambda _: agreement
        first = len(self.requests)
        self.requests += [Request(first + i, context, view, rate, **more) for i in range(count)]
        return self.requests[first:]

    def step(self) -> None:
        running = [r for r in self.requests if r.output < r.remaining]
        for request in running:
            self._look_up(request, len(running))
        states = [request.state() for request in running]
        actions = self.planner.plan(states, self.link)
        self.planner.revise(
            actions,
            sum(r.load for r, a in zip(running, actions, strict=True) if a is Action.VERIFY),
        )
        work = Work()
        for request, action in zip(running, actions, strict=True):
            if action is Action.DRAFT:
                work += Work.draft(request.state().view)
                request.drafted += 1
            else:
                work += Work.verify(request.drafted + 1, request.context, request.load)
                self._verify(request)
        seconds = machine(work, **self.costs) * self.random.uniform(0.95, 1.1)
        self.planner.observe(seconds)
        self.seconds += seconds
        self.verifying.append(actions.count(Action.VERIFY))

    def _look_up(self, request: Request, batch: int) -> None:
        if request.found is None or request.drafted:
            return
        tokens, match, _ = request.found(request.output)
        told = replace(request.state(), found=tokens, match=match)
        request.drafted = self.planner.takes(told, batch) if tokens else 0
        request.took_found = request.drafted > 0

    def run(self, iterations: int) -> "Simulation":
        for _ in range(iterations):
            self.step()
        return self

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def _verify(self, request: Request) -> None:
        accepted, rate = 0, request.agreement
        if request.found:
            tokens, match, chance = request.found(request.output)
            agreed = 0
            while agreed < tokens and self.random.random() < chance:
                agreed += 1
            self.planner.found(match, tokens, agreed)
        if request.took_found:
            accepted = min(agreed, request.drafted)
        else:
            while accepted < request.drafted and self.random.random() < rate(
                request.output + accepted
            ):
                accepted += 1
        margins = [] if request.took_found else request.margins
        took, request.took_found = request.took_found, False
        self.planner.settle(request.rid, request.drafted, accepted, margins, taken=took)
        request.rounds.append((request.drafted, accepted))
        request.context += accepted + 1
        request.output += accepted + 1
        self.tokens += accepted + 1
        request.drafted = 0


@pytest.fixture
def simulation() -> type[Simulation]:
    return Simulation

"""One server simulated iteration by iteration, with the real planner in the loop.

Tensors are replaced by counts and the clock by ``Server.seconds``; what is decided is decided by
``sglang_vericache.scheduler``. ``Simulation`` does what ``speculative/worker.py`` and
``speculative/tiers.py`` do around it: offer states, choose views, stage full KV in turn, begin
copies ahead, settle. Prefill and the first load of a prompt's KV are not simulated, nor is KV that
an offloaded request left on the device by luck.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from _hardware import Server
from sglang_vericache.core import Action, DraftState
from sglang_vericache.scheduler import Link

if TYPE_CHECKING:
    from _policies import Policy

# As in speculative/staging.py: iterations somebody waits before plain decoding on staged KV yields.
PATIENCE = 8


@dataclass
class Request:
    """One request and where its KV is; lengths in tokens.

    Attributes:
        prompt: tokens whose KV may leave the device.
        wanted: tokens to generate.
        agreement: chance that a draft token equals the target's.
        kept: of the prompt, by its draft view.
        copied: whether the view is a copy beside the full KV even on the device.
        merges: whether what its view keeps is on the device once while it is staged, not twice.
        offloaded: its full KV belongs to the host.
        staged: offloaded, and on the device for a pass.
        arrives: when the latest copy of its KV is complete.
    """

    rid: int
    prompt: int
    wanted: int
    agreement: float
    kept: int = 0
    copied: bool = False
    merges: bool = False
    has_view: bool = False
    offloaded: bool = False
    staged: bool = False
    arrives: float = 0.0
    output: int = 0
    drafted: int = 0

    @property
    def left(self) -> int:
        return self.wanted - self.output

    @property
    def context(self) -> int:
        """Keys that a row over the full KV attends to."""
        return self.prompt + self.output + 1

    @property
    def view(self) -> int:
        """Keys that its next drafting row attends to."""
        return min(self.kept, self.prompt) + self.output + self.drafted + 1

    @property
    def reload(self) -> int:
        """Tokens to be copied for a pass while it is offloaded: what its view lacks."""
        return self.prompt - self.kept

    @property
    def room(self) -> int:
        """Slots that it takes while staged, beside those of its view."""
        return self.prompt - self.kept * self.merges

    @property
    def base(self) -> int:
        """Slots it holds for its prompt, but for a staged one."""
        if self.offloaded:
            return self.kept
        return self.prompt + self.kept * self.copied

    @property
    def slots(self) -> int:
        """Device slots it holds now."""
        staged = self.room * self.staged
        return self.base + staged + self.output + self.drafted + 1


@dataclass
class Pool:
    """Device memory for KV, in tokens."""

    capacity: int
    running: list[Request] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.capacity - sum(r.slots for r in self.running)

    @property
    def unpromised(self) -> int:
        """What is free and not needed by tokens that running requests will still generate."""
        return self.free - sum(r.left - r.drafted for r in self.running)

    @property
    def offloaded(self) -> list[Request]:
        return [r for r in self.running if r.offloaded]


@dataclass
class Outcome:
    """What a run did; times in simulated seconds.

    Attributes:
        tokens: committed in all.
        seconds: until the last token.
        rate: tokens/s while requests were queueing, after the first one had ended.
        peak_slots: most device slots in use.
        batch: running requests, averaged over iterations.
        offloaded: of those, with their full KV on the host.
        drafted, accepted: in verify passes.
        passes: verify passes with drafts.
        ahead, late: copies begun ahead of their pass, and with it.
        waits: iterations that a request waited for room.
        stalled: seconds in which the device waited for a copy.
    """

    tokens: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    iterations: int = 0
    peak_slots: int = 0
    batch: float = 0.0
    offloaded: float = 0.0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    ahead: int = 0
    late: int = 0
    waits: int = 0
    stalled: float = 0.0

    @property
    def draft_length(self) -> float:
        """Drafts of a verify pass, on average."""
        return self.drafted / self.passes if self.passes else 0.0


class Simulation:
    """Runs requests through one server until all have ended.

    Args:
        server: model and device.
        policy: who drafts, how much, and whose KV leaves the device.
        requests: in order of arrival; all are there from the start.
        seed: of the draws that decide which drafts agree.
    """

    def __init__(
        self, server: Server, policy: Policy, requests: Iterable[Request], seed: int = 0
    ) -> None:
        self.server, self.policy = server, policy
        self.planner = policy.planner()
        self.pool = Pool(server.capacity)
        self.queue = deque(requests)
        self.outcome = Outcome()
        self._random = random.Random(seed)
        self._now = self._link_free = 0.0
        self._computed = 0.0
        self._waiting: list[int] = []
        self._waited = 0
        self._steady: tuple[int, float] | None = None
        self._draining: tuple[int, float] | None = None

    def run(self) -> Outcome:
        """Simulate to the end.

        Raises:
            RuntimeError: a request does not fit the device even alone.
        """
        while self.queue or self.pool.running:
            self.step()
        outcome = self.outcome
        outcome.seconds = self._now
        start, end = self._steady or (0, 0.0), self._draining
        if end is None or end[0] <= start[0]:
            start, end = (0, 0.0), (outcome.tokens, self._now)
        outcome.rate = (end[0] - start[0]) / (end[1] - start[1])
        outcome.batch /= outcome.iterations
        outcome.offloaded /= outcome.iterations
        return outcome

    def step(self) -> None:
        """One scheduler iteration."""
        self._admit()
        running = self.pool.running
        link = Link(self.server.token_seconds, self._room())
        states = [self._state(request) for request in running]
        planned = self.planner.plan(states, link)
        self.policy.recall(self.pool, self.planner)
        for request, action in zip(running, planned, strict=True):
            if action is Action.DRAFT and not request.has_view:
                self._choose_view(request)
        actions, loaded = self._arrange(planned, self.planner.copying())
        self.planner.revise(actions, loaded)
        seconds = self._forward(actions)
        self._commit(actions)
        self.planner.observe(seconds)

    def _room(self) -> int:
        return self.pool.free + sum(r.room for r in self.pool.running if r.staged)

    def _admit(self) -> None:
        while self.queue and self.policy.admits(self.pool, self.queue[0], self.planner):
            self.pool.running.append(self.queue.popleft())
        if not self.pool.running:
            raise RuntimeError(f"request {self.queue[0].rid} does not fit {self.pool.capacity}")
        if not self.queue and self._draining is None:
            self._draining = self.outcome.tokens, self._now

    def _state(self, request: Request) -> DraftState:
        return DraftState(
            request.rid,
            request.context,
            request.view,
            request.drafted,
            min(self.policy.limit, request.left - 1),
            load=request.reload if request.offloaded else 0.0,
        )

    def _choose_view(self, request: Request) -> None:
        request.has_view = True
        fits = self.pool.free >= request.kept
        if fits and not request.offloaded and self.policy.leaves(self.pool, request, self.planner):
            request.offloaded = True
            self.planner.leaves(request.rid, request.reload)
        request.staged = False

    def _arrange(
        self, planned: list[Action], copying: Collection[object]
    ) -> tuple[list[Action], int]:
        """Stage who verifies, in turn, and who will; see ``Tiers.arrange``."""
        running, actions = self.pool.running, list(planned)
        self.policy.refused = False
        due, ahead = [], []
        for i, (request, action) in enumerate(zip(running, actions, strict=True)):
            if not request.offloaded:
                continue
            if action is Action.VERIFY:
                due.append(i)
            elif request.rid in copying:
                ahead.append(request)
            elif request.arrives <= self._now:
                request.staged = False
        due.sort(key=lambda i: self._turn(running[i].rid))
        waiting = self._yielding(due)
        for i in waiting:
            running[i].staged = False
        loaded = 0
        for i in due:
            if i in waiting or running[i].staged:
                continue
            if self._stage(running[i]):
                loaded += running[i].reload
                self.outcome.late += 1
            else:
                waiting.append(i)
        late = [i for i in due if i not in waiting and self._is_late(running[i])]
        for i in (*waiting, *late):
            may_draft = running[i].drafted < min(self.policy.limit, running[i].left - 1)
            actions[i] = Action.DRAFT if may_draft else Action.WAIT
        if late and all(action is Action.WAIT for action in actions):
            actions[min(late, key=lambda i: running[i].arrives)] = Action.VERIFY
        if not waiting:
            self.outcome.ahead += sum(self._stage(r) for r in ahead if not r.staged)
        self._note_waiting([running[i].rid for i in waiting])
        return actions, loaded

    def _stage(self, request: Request) -> bool:
        """Queue the copy of its prompt, if there is room."""
        if self.pool.unpromised < request.room:
            return False
        request.staged = True
        begins = max(self._now, self._link_free)
        self._link_free = request.arrives = begins + request.reload * self.server.token_seconds
        return True

    def _is_late(self, request: Request) -> bool:
        """Whether its copy will not arrive while the pass runs, layer by layer."""
        return request.staged and request.arrives > self._now + self._computed

    def _yielding(self, due: list[int]) -> list[int]:
        if self._waited < PATIENCE:
            return []
        self._waited = 0
        return [i for i in due if self.pool.running[i].staged and not self.pool.running[i].drafted]

    def _turn(self, rid: int) -> int:
        return self._waiting.index(rid) if rid in self._waiting else len(self._waiting)

    def _note_waiting(self, rids: list[int]) -> None:
        self._waiting = [r for r in self._waiting if r in rids]
        self._waiting += [r for r in rids if r not in self._waiting]
        self._waited = self._waited + 1 if rids else 0
        self.outcome.waits += len(rids)

    def _forward(self, actions: list[Action]) -> float:
        """Seconds of the pass, including the wait for copies; the clock is set to its end."""
        rows, keys, pairs, ready = 0, 0, 0, 0.0
        for request, action in zip(self.pool.running, actions, strict=True):
            verifies = action is Action.VERIFY
            n = request.drafted + 1 if verifies else 1
            read = request.context + request.drafted if verifies else request.view
            rows, keys, pairs = rows + n, keys + read, pairs + n * read
            if verifies and request.offloaded:
                ready = max(ready, request.arrives)
        computed = self.server.seconds(rows, keys, pairs)
        seconds = max(computed, ready - self._now)
        self._computed = computed
        self._now += seconds
        outcome = self.outcome
        outcome.stalled += seconds - computed
        outcome.iterations += 1
        outcome.batch += len(actions)
        outcome.offloaded += len(self.pool.offloaded)
        return seconds

    def _commit(self, actions: list[Action]) -> None:
        for request, action in zip(self.pool.running, actions, strict=True):
            if action is Action.DRAFT:
                request.drafted += 1
            elif action is Action.VERIFY:
                self._verify(request)
        used = self.pool.capacity - self.pool.free
        assert used <= self.pool.capacity, (used, self.pool.capacity)
        self.outcome.peak_slots = max(self.outcome.peak_slots, used)
        if any(not r.left for r in self.pool.running):
            self.pool.running = [r for r in self.pool.running if r.left]
            if self._steady is None:
                self._steady = self.outcome.tokens, self._now

    def _verify(self, request: Request) -> None:
        accepted = 0
        while accepted < request.drafted and self._random.random() < request.agreement:
            accepted += 1
        outcome, drafted = self.outcome, request.drafted
        self.planner.settle(request.rid, drafted, accepted)
        outcome.passes += drafted > 0
        outcome.drafted += drafted
        outcome.accepted += accepted
        outcome.tokens += accepted + 1
        request.output += accepted + 1
        request.drafted = 0


def workload(
    count: int,
    prompt: int,
    wanted: int,
    agreement: float | Callable[[random.Random], float],
    keep: float,
    seed: int = 0,
) -> list[Request]:
    """Requests whose prompts and outputs differ by up to a quarter and a half from the given."""
    rng = random.Random(seed)
    requests = []
    for rid in range(count):
        length = rng.randint(prompt * 3 // 4, prompt * 5 // 4)
        tokens = rng.randint(max(wanted // 2, 1), wanted * 3 // 2)
        p = agreement(rng) if callable(agreement) else agreement
        requests.append(Request(rid, length, tokens, p, kept=round(keep * length)))
    return requests

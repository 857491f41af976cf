"""Decides for every running request whether it drafts one more token or verifies now."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from sglang_vericache.core import Action, DraftState
from sglang_vericache.scheduler.cost_model import CostModel, Work
from sglang_vericache.scheduler.draft_length import AdaptiveLength, DraftLength, FixedLength
from sglang_vericache.scheduler.link import Link, LinkLoad
from sglang_vericache.scheduler.phases import Copy, PhaseWheel

# Weight of the latest iteration in the mean iteration time.
TIME_RATE = 0.1


class Planner:
    """The first step of a scheduler iteration.

    Per iteration: ``plan`` once, then ``settle`` for every request that verified and ``observe``
    with the time the forward pass took. A request that is missing from one ``plan`` is forgotten.

    Args:
        length: policy for draft lengths.
        k_max: no round drafts more tokens than this.
        cost: the model that ``observe`` feeds and the policy reads.
    """

    def __init__(self, length: DraftLength, k_max: int, cost: CostModel) -> None:
        self._length = length
        self.cost = cost
        self._wheel = PhaseWheel(k_max + 1)
        self._link: Link | None = None
        self._link_load = LinkLoad()
        self._loads: dict[Hashable, float] = {}
        self._known: set[Hashable] = set()
        # Those whose round might have begun with tokens found.
        self._asked: set[Hashable] = set()
        self.iteration_seconds = 0.0
        """Mean time of an iteration; 0 before the first."""
        self._early: list[Hashable] = []
        self._planned: Sequence[DraftState] = ()
        self._actions: Sequence[Action] = ()
        self._work = Work()

    @classmethod
    def fixed(cls, k: int) -> Planner:
        """Draft ``k`` tokens a round (``--vericache-draft-len k``)."""
        return cls(FixedLength(k), k, CostModel())

    @classmethod
    def adaptive(cls, k_max: int) -> Planner:
        """Draft what pays, at most ``k_max`` tokens a round (``--vericache-draft-len auto``)."""
        cost = CostModel()
        return cls(AdaptiveLength(k_max, cost), k_max, cost)

    def plan(self, requests: Sequence[DraftState], link: Link | None = None) -> list[Action]:
        """One action per running request, in their order.

        Args:
            link: how full KV gets to the device, where some of it is on the host.
        """
        self._link = link
        self._wheel.room = link.room if link else 0
        self._loads = {request.rid: request.load for request in requests if request.load > 0}
        self._forget_all_but({request.rid for request in requests})
        starting = [r for r in requests if r.drafted == 0 and not self._wheel.is_booked(r.rid)]
        # Newcomers last: they fill the gaps between those whose phase is settled.
        for request in sorted(starting, key=lambda r: r.rid not in self._known):
            self._start_round(request, len(requests))
        actions = [self._action(request) for request in requests]
        self._early = self._wheel.copying()
        self._wheel.advance()
        self._planned, self._actions = requests, actions
        self.revise(actions)
        return list(actions)

    def revise(self, actions: Sequence[Action], loaded: float = 0) -> None:
        """Report what the requests of the last ``plan`` do instead, and the keys copied for it."""
        for request, planned, action in zip(self._planned, self._actions, actions, strict=True):
            if planned is Action.VERIFY and action is Action.DRAFT:
                self._length.overdue(request.rid)
        done = map(_work, self._planned, actions)
        self._work = sum(done, Work(loaded_keys=loaded))

    def takes(self, request: DraftState, batch: int) -> int:
        """How many tokens found for a request should be the drafts of the round that starts now.

        To be asked before ``plan``, which has a request with drafts and no booking verify.
        """
        self._asked.add(request.rid)
        return self._length.takes(request, batch)

    def probes(self, request: DraftState, batch: int) -> int:
        """How many of the tokens found for a request its draft pass should check.

        To be asked once after ``plan`` and ``revise``, for a request that drafts.
        """
        count = self._length.probes(request, batch)
        self._work += Work(draft_rows=count)
        return count

    def found(self, match: int, tokens: int, agreed: int) -> None:
        """Report how many of the tokens found after ``match`` agreeing ones came, taken or not."""
        self._length.found(match, tokens, agreed)

    def settle(
        self,
        rid: Hashable,
        drafted: int,
        accepted: int,
        margins: Sequence[float] = (),
        passes: int | None = None,
        taken: bool = False,
    ) -> None:
        """Report the verdict on a request that verified, including those without drafts.

        Args:
            margins: of the drafts, as in ``DraftState``.
            passes: that drafted them; None: one each.
            taken: whether they were not drafted but found.
        """
        self._length.settle(rid, drafted, accepted, margins, passes, taken)
        if rid in self._loads and drafted > 0 and not taken:
            self._link_load.settle(drafted if passes is None else passes)

    def observe(self, seconds: float) -> None:
        """Report how long the iteration planned last took, prefill excluded."""
        self.cost.observe(self._work, seconds)
        if self.iteration_seconds == 0.0:
            self.iteration_seconds = seconds
        self.iteration_seconds += TIME_RATE * (seconds - self.iteration_seconds)

    def copying(self) -> list[Hashable]:
        """Requests whose full KV should be on its way already in the iteration planned last."""
        return self._early

    def link_busy(self) -> float:
        """Share of the link's time that the copies of the requests planned last take."""
        if self._link is None:
            return 0.0
        total = sum(self._loads.values())
        return self._link_load.busy(self._link, total, self.iteration_seconds)

    def carries(self, tokens: float) -> bool:
        """Whether the link has time to bring ``tokens`` more once a round; True without a link."""
        if self._link is None:
            return True
        total, seconds = sum(self._loads.values()), self.iteration_seconds
        return self._link_load.carries(self._link, total, tokens, seconds)

    def leaves(self, rid: Hashable, tokens: float) -> None:
        """Report that a request leaves ``tokens`` to the host after ``plan``."""
        self._loads[rid] = tokens

    def rings(self) -> list[tuple[int, int]]:
        """Copies and device slots reserved for each of the coming iterations."""
        return [self._wheel.reserved(ahead) for ahead in range(self._wheel.horizon)]

    def phases(self) -> list[int]:
        """Verify passes booked for each of the coming iterations."""
        return [self._wheel.load(ahead) for ahead in range(self._wheel.horizon)]

    def _start_round(self, request: DraftState, batch: int) -> None:
        seconds = request.load * self._link.token_seconds if self._link else 0.0
        seconds *= min(self.link_busy(), 1.0)
        length = self._length.choose(request, batch, seconds)
        # The first round may be cut to any length, so that phases spread from the start.
        shortest = length.shortest if request.rid in self._known else 0
        copy = self._copy(request) if length.longest > 0 else None
        if copy is not None:  # a little leeway to find link and room free
            shortest = min(shortest, length.longest - length.longest // 4)
        self._wheel.book(request.rid, shortest, length.longest, copy)
        self._known.add(request.rid)

    def _copy(self, request: DraftState) -> Copy | None:
        """The copy that a request's next verify pass needs, if it can be made ahead of it."""
        if self._link is None or request.load <= 0 or self.iteration_seconds <= 0:
            return None
        windows = math.ceil(request.load * self._link.token_seconds / self.iteration_seconds)
        return Copy(request.context, max(windows, 1))

    def _action(self, request: DraftState) -> Action:
        rid, wheel = request.rid, self._wheel
        cut = request.drafted > 0 and (
            request.drafted >= request.limit or not self._length.extends(request)
        )
        # Drafts without a booking are those of a round the planner has forgotten.
        if cut or wheel.is_due(rid) or not wheel.is_booked(rid):
            wheel.leave(rid)
            return Action.VERIFY
        return Action.DRAFT

    def _forget_all_but(self, running: set[Hashable]) -> None:
        for rid in (self._known | self._asked) - running:
            self._wheel.leave(rid)
            self._length.forget(rid)
        self._known &= running
        self._asked &= running


def _work(request: DraftState, action: Action) -> Work:
    if action is Action.VERIFY:
        return Work.verify(request.drafted + 1, request.context)
    return Work.draft(request.view)

"""How many tokens to draft in a round.

With agreement p a token and relative price c of a drafted token, a round of k drafts commits
``1 + sum_{m=1..k} p^m`` tokens in the time of ``1 + k*c`` plain steps, so

    gain(k) = (1 + sum_{m=1..k} p^m) / (1 + k*c),   c = (C_draft + C_row) / C_plain

is the speed-up over plain decoding; C_draft and C_plain include the request's share of the
iteration's fixed cost, and C_row is what one more row adds to a verify pass.

Drafts are not equally uncertain: one with a close runner-up is rejected far more often. So a round
ends where one more draft would bring less than its time is worth: with s the chance that all drafts
so far hold (the product of their calibrated chances), as soon as ``s * p < gain(k) * c``. This is
the optimal stopping rule of a renewal process whose best rate is gain(k).

Tokens that lookup proposes cost no draft, only a row each: c = C_row / C_plain, and p hangs on how
much of the text agreed before them. A round takes them instead of drafting where that gains more.
Where it drafts, a draft pass may bring rows for tokens found: the j-th saves a draft of its own
with chance p^j, so it pays while p^j exceeds the price of a row over that of a whole draft.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_vericache.core import DraftState
from sglang_vericache.scheduler.agreement import Agreement, Confidence
from sglang_vericache.scheduler.cost_model import CostModel, Work

# A request starts drafting at this gain and stops below 1: no flapping around break-even.
START_GAIN = 1.05
# Most time lost to drafting, as a share of plain decoding, plus a start credit in plain steps.
# Below the promised 5 %, since the predicted costs are off by a few per cent themselves.
LOSS_SHARE = 0.02
START_CREDIT, MAX_CREDIT = 4.0, 16.0
# Drafts of a probe, and the share of all plain time spent on probing requests that do not draft.
PROBE_DRAFTS = 2
PROBE_SHARE = 0.01
REQUEST_MEMORY, FLEET_MEMORY = 24.0, 512.0
# Agreement assumed before the first verify pass of the server; of tokens found by lookup.
INITIAL_AGREEMENT, INITIAL_FOUND = 0.9, 0.5
# Ranges of what tells how sure a draft is: its margin, in logits; tokens that agreed before it.
MARGINS = (0.25, 0.5, 1.0, 2.0, 4.0)
MATCHES = (4, 6, 9, 17)


class Length(NamedTuple):
    """Draft lengths a round may have; equally good within noise, ``longest`` preferred."""

    shortest: int
    longest: int


class DraftLength(ABC):
    """Chooses the draft length of each round and learns from its outcome."""

    @abstractmethod
    def choose(self, request: DraftState, batch: int, copy_seconds: float = 0.0) -> Length:
        """Length of the round that starts now, at most ``request.limit``.

        Args:
            request: with ``drafted == 0``.
            batch: number of running requests, at least 1.
            copy_seconds: for which the link is busy when it brings the request's full KV.
        """

    def extends(self, request: DraftState) -> bool:
        """Whether the round that began should draft one more token."""
        return True

    def takes(self, request: DraftState, batch: int) -> int:
        """How many of the tokens found for a request to verify at once, instead of drafting.

        Args:
            request: with ``drafted == 0``.
            batch: number of running requests, at least 1.
        """
        return 0

    def probes(self, request: DraftState, batch: int) -> int:
        """How many of the tokens found for a request its next draft pass should check."""
        return 0

    def found(self, match: int, tokens: int, agreed: int) -> None:  # noqa: B027
        """Learn that ``agreed`` of ``tokens`` found after ``match`` agreeing ones did come."""

    def overdue(self, rid: Hashable) -> None:  # noqa: B027
        """The request drafts one more token because its verify pass has to wait; that costs none
        of its own time.
        """

    def settle(  # noqa: B027
        self,
        rid: Hashable,
        drafted: int,
        accepted: int,
        margins: Sequence[float] = (),
        passes: int | None = None,
        taken: bool = False,
    ) -> None:
        """Learn that ``accepted`` of ``drafted`` tokens agreed in the round that ends now.

        Args:
            margins: of the drafts, as in ``DraftState``.
            passes: that drafted them; None: one each.
            taken: whether they were not drafted but found.
        """

    def forget(self, rid: Hashable) -> None:  # noqa: B027
        """The request left; unknown ids are fine."""


class FixedLength(DraftLength):
    """Always ``k``, whether it pays or not; for measurements and tests."""

    def __init__(self, k: int) -> None:
        self.k = k

    def choose(self, request: DraftState, batch: int, copy_seconds: float = 0.0) -> Length:
        k = min(self.k, request.limit)
        return Length(k, k)


@dataclass
class _Request:
    """What is known of one request; times in plain steps of that request."""

    agreement: Agreement = field(default_factory=lambda: Agreement(REQUEST_MEMORY))
    drafting: bool = False
    price: float = 0.0
    row_price: float = 0.0
    probe_price: float = 0.0
    longest: int = 0
    probed: int = 0
    gain: float = 1.0
    credit: float = START_CREDIT
    probe_held: bool = False
    overdue: int = 0


class AdaptiveLength(DraftLength):
    """The k of greatest gain, or 0 where plain decoding is faster.

    In the cost model's own terms, no request ever takes longer than ``1 + LOSS_SHARE`` times plain
    decoding plus ``START_CREDIT`` plain steps: a round may start only if the request's credit
    covers its loss should every draft be rejected. A request that does not draft is probed with
    ``PROBE_DRAFTS`` drafts whenever ``PROBE_SHARE`` of the plain time of all requests has paid for
    that, and again at once after a probe that was accepted whole.

    Args:
        k_max: largest draft length.
        cost: predicts iteration times; fed by the caller.
    """

    def __init__(self, k_max: int, cost: CostModel) -> None:
        self._k_max = k_max
        self._cost = cost
        self._fleet = Agreement(FLEET_MEMORY)
        self._confidence = Confidence(FLEET_MEMORY, MARGINS)
        self._found = Confidence(FLEET_MEMORY, MATCHES)
        self._probe_savings = 0.0
        self._requests: dict[Hashable, _Request] = {}

    def choose(self, request: DraftState, batch: int, copy_seconds: float = 0.0) -> Length:
        if request.view >= request.context:
            return Length(0, 0)
        state = self._requests.setdefault(request.rid, _Request())
        state.row_price, state.price = self._prices(request, batch, copy_seconds)
        k_max = min(self._k_max, request.limit, self._affordable(state, state.price))
        p = self.agreement(request.rid)
        k, state.gain = best_length(p, state.price, k_max)
        state.drafting = k > 0 and state.gain >= (1.0 if state.drafting else START_GAIN)
        if state.drafting:
            k = min(max(k, self._longest(p, state)), k_max)
            state.longest = k
            return Length(k - k // 4, k)
        probe = min(PROBE_DRAFTS, k_max)
        if probe and self._may_probe(state, probe):
            self._probe_savings -= 0.0 if state.probe_held else probe * state.price
            return Length(probe, probe)
        return Length(0, 0)

    def extends(self, request: DraftState) -> bool:
        state = self._requests.get(request.rid)
        if state is None or not state.drafting:  # a probe tests all its drafts
            return True
        if state.probed and self._spare(state, request.drafted + 1) < 0:
            return False
        prior = self._fleet.mean(INITIAL_AGREEMENT)
        survival = math.prod(self._confidence.of(margin, prior) for margin in request.margins)
        return survival * self.agreement(request.rid) >= state.gain * state.price

    def takes(self, request: DraftState, batch: int) -> int:
        state = self._requests.setdefault(request.rid, _Request())
        state.row_price, price = self._prices(request, batch)
        most = min(self._k_max, request.found, self._affordable(state, state.row_price))
        k, gain = best_length(self._found.of(request.match, INITIAL_FOUND), state.row_price, most)
        rival = START_GAIN
        if request.view < request.context:
            longest = min(self._k_max, request.limit)
            rival = max(rival, best_length(self.agreement(request.rid), price, longest)[1])
        return k if gain >= rival else 0

    def probes(self, request: DraftState, batch: int) -> int:
        state = self._requests.get(request.rid)
        if state is None or not state.drafting:
            return 0
        whole = state.price - state.row_price
        state.probe_price = self._probe_price(request, batch)
        most = min(request.found, state.longest - request.drafted - 1)
        if state.probe_price > 0:
            price = state.probe_price + state.row_price  # should it agree, and yet be rejected
            most = min(most, int(self._spare(state, request.drafted + 1) / price))
        p, chance, count = self._found.of(request.match, INITIAL_FOUND), 1.0, 0
        while count < most and chance * p * whole > state.probe_price:
            chance, count = chance * p, count + 1
        state.probed += count
        return count

    def found(self, match: int, tokens: int, agreed: int) -> None:
        self._found.record([match] * tokens, agreed)

    def overdue(self, rid: Hashable) -> None:
        if state := self._requests.get(rid):
            state.overdue += 1

    def settle(
        self,
        rid: Hashable,
        drafted: int,
        accepted: int,
        margins: Sequence[float] = (),
        passes: int | None = None,
        taken: bool = False,
    ) -> None:
        state = self._requests.get(rid)
        if state is None:
            return
        if taken:
            self._pay(state, 1.0 + drafted * state.row_price, accepted + 1)
            return
        state.agreement.record(drafted, accepted)
        self._fleet.record(drafted, accepted)
        self._confidence.record(margins, accepted)
        own = max(drafted - state.overdue, 0)
        passes = drafted if passes is None else passes
        spent = max(passes - state.overdue, 0) * (state.price - state.row_price)
        spent += own * state.row_price + state.probed * state.probe_price
        self._pay(state, 1.0 + spent, accepted + 1)
        state.overdue = state.probed = 0
        if not state.drafting:
            state.probe_held = 0 < own <= accepted == drafted
            self._probe_savings = min(self._probe_savings + PROBE_SHARE, MAX_CREDIT)

    def forget(self, rid: Hashable) -> None:
        self._requests.pop(rid, None)

    def agreement(self, rid: Hashable) -> float:
        """Estimated chance that the request's next draft token is accepted."""
        prior = self._fleet.mean(INITIAL_AGREEMENT)
        state = self._requests.get(rid)
        return state.agreement.mean(prior) if state else prior

    def _prices(
        self, request: DraftState, batch: int, copy_seconds: float = 0.0
    ) -> tuple[float, float]:
        """Time of one more verify row, and of drafting and verifying one token, in plain steps.

        A plain step of a request whose full KV is on the host includes copying it, at the cost of
        others who need the link, so such a request drafts longer.
        """
        share = self._cost.fixed / batch
        plain = self._cost.marginal(Work.verify(1, request.context))
        row = self._cost.marginal(Work.verify(2, request.context)) - plain
        plain += copy_seconds
        draft = share + self._cost.marginal(Work.draft(request.view))
        return row / (share + plain), (draft + row) / (share + plain)

    def _probe_price(self, request: DraftState, batch: int) -> float:
        """Time of one more row of a draft pass, in plain steps."""
        plain = self._cost.fixed / batch + self._cost.marginal(Work.verify(1, request.context))
        return self._cost.marginal(Work(draft_rows=1)) / plain

    def _affordable(self, state: _Request, price: float) -> int:
        """Drafts whose loss the request's credit covers, should all be rejected."""
        if price <= 0:
            return self._k_max
        return max(int((state.credit + LOSS_SHARE) / price), 0)

    def _spare(self, state: _Request, drafts: int) -> float:
        """Credit that a round of so many drafts leaves, should they all be rejected."""
        spent = drafts * state.price + state.probed * state.probe_price
        return state.credit + LOSS_SHARE - spent

    def _pay(self, state: _Request, spent: float, tokens: int) -> None:
        state.credit = min(state.credit + (1.0 + LOSS_SHARE) * tokens - spent, MAX_CREDIT)

    def _longest(self, p: float, state: _Request) -> int:
        """Drafts after which even the most certain ones would not be extended."""
        certain = self._confidence.best(self._fleet.mean(INITIAL_AGREEMENT))
        if state.price <= 0 or certain >= 1.0:
            return self._k_max
        if certain <= 0 or p <= 0:
            return 1
        worth = min(state.gain * state.price / p, 1.0)
        return int(math.log(worth) / math.log(certain)) + 1

    def _may_probe(self, state: _Request, drafts: int) -> bool:
        """Whether full agreement would pay at all and the savings cover a rejected probe."""
        _, most = best_length(1.0, state.price, self._k_max)
        paid = state.probe_held or self._probe_savings >= drafts * state.price
        return most >= START_GAIN and paid


def best_length(p: float, price: float, k_max: int) -> tuple[int, float]:
    """The k in ``0..k_max`` of greatest gain, and that gain; ``(0, 1.0)`` if none exceeds 1."""
    best, best_gain = 0, 1.0
    tokens = survival = 1.0
    for k in range(1, k_max + 1):
        survival *= p
        tokens += survival
        gain = tokens / (1.0 + k * price)
        if gain > best_gain:
            best, best_gain = k, gain
    return best, best_gain

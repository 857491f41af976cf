"""Staggered verify phases: which iteration each request verifies in, and when its KV is copied.

Bookkeeping only. Time is the number of scheduler iterations seen; nothing here knows a request
but by its id.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

# The link is reserved in such parts of an iteration: whole numbers add up exactly.
PARTS = 16


@dataclass(frozen=True)
class Copy:
    """Full KV that must come from the host before a verify pass.

    Attributes:
        tokens: device slots it takes, from the first copied one until the pass is over.
        windows: iterations that copying takes, more than 0; a fraction leaves the rest of its
            first iteration to others.
    """

    tokens: int
    windows: float

    @property
    def begins(self) -> int:
        """Iterations before the pass in which it begins."""
        return math.ceil(self.windows)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Iterations before the pass, and the parts of the link it takes in each."""
        left = math.ceil(self.windows * PARTS)
        for before in range(1, self.begins + 1):
            yield before, min(left, PARTS)
            left -= PARTS


@dataclass(frozen=True)
class _Booking:
    due: int
    copy: Copy | None


class PhaseWheel:
    """A ring of the next ``horizon`` iterations with the verify passes booked in each.

    A request holds at most one booking, at most ``horizon - 1`` iterations ahead. It joins with
    ``book(rid, 0, k)`` after those that begin another round with ``book(rid, k, k)``: then, while
    nobody leaves, the loads of the ``k + 1`` phases differ by at most one, and no more than
    ceil(B/(k+1)) of B requests verify at once.

    Two further rings hold what the copies of offloaded requests will use: the link, one iteration's
    time in each, and device slots (the reserve rings and ADMIT of VeriCache, arXiv 2605.17613).

    Args:
        horizon: largest draft length plus one.
    """

    def __init__(self, horizon: int) -> None:
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1, not {horizon}")
        self._now = 0
        self._load = [0] * horizon
        self._link = [0] * horizon
        self._slots = [0] * horizon
        self._booked: dict[Hashable, _Booking] = {}
        self.room = 0
        """Device slots that copies may take together."""

    @property
    def horizon(self) -> int:
        return len(self._load)

    def book(self, rid: Hashable, shortest: int, longest: int, copy: Copy | None = None) -> int:
        """Book the next verify pass ``shortest..longest`` iterations from now.

        The least-loaded iteration wins; of equally loaded ones the latest. One with a copy goes
        where link and room are free; failing that to where there is room and the link is least
        overbooked, so that the pass waits for the shortest time; and without room as if it had no
        copy, which then begins when the pass is due.

        Returns:
            The chosen number of iterations, which is also the number of tokens to draft until then.

        Raises:
            ValueError: the request already holds a booking, or the range is empty or too far.
        """
        if rid in self._booked:
            raise ValueError(f"request {rid!r} already has a verify pass booked")
        if not 0 <= shortest <= longest < self.horizon:
            raise ValueError(f"draft length {shortest}..{longest} outside 0..{self.horizon - 1}")
        wanted = range(longest, shortest - 1, -1)
        if copy is not None:
            fitting = [ahead for ahead in wanted if self._has_room(copy, ahead)]
            if fitting:
                ahead = min(fitting, key=lambda at: (self._overbooked(copy, at), self.load(at)))
                self._hold(rid, _Booking(self._now + ahead, copy), 1)
                return ahead
        ahead = min(wanted, key=self.load)
        self._hold(rid, _Booking(self._now + ahead, None), 1)
        return ahead

    def leave(self, rid: Hashable) -> None:
        """Give up the request's booking, if it has one: it ended, or verifies early."""
        booking = self._booked.get(rid)
        if booking is not None:
            self._hold(rid, booking, -1)

    def is_booked(self, rid: Hashable) -> bool:
        return rid in self._booked

    def is_due(self, rid: Hashable) -> bool:
        """Whether the request's verify pass is booked for this iteration."""
        booking = self._booked.get(rid)
        return booking is not None and booking.due == self._now

    def copying(self) -> list[Hashable]:
        """Requests whose copy runs in this iteration, for a pass that is still to come."""
        return [
            rid
            for rid, booking in self._booked.items()
            if booking.copy and booking.due - booking.copy.begins <= self._now < booking.due
        ]

    def load(self, ahead: int = 0) -> int:
        """Verify passes booked ``ahead`` iterations from now, ``0 <= ahead < horizon``."""
        return self._load[(self._now + ahead) % self.horizon]

    def reserved(self, ahead: int) -> tuple[float, int]:
        """Share of the link's time and device slots reserved ``ahead`` iterations from now."""
        at = (self._now + ahead) % self.horizon
        return self._link[at] / PARTS, self._slots[at]

    def advance(self) -> None:
        """Go to the next iteration. Whoever is due now must have left or been booked again."""
        assert self.load() == 0, "a verify pass is still booked for the iteration that ends"
        self._link[self._now % self.horizon] = self._slots[self._now % self.horizon] = 0
        self._now += 1

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless all rings are those of the bookings held."""
        expected, link, slots = ([0] * self.horizon for _ in range(3))
        for booking in self._booked.values():
            assert self._now <= booking.due < self._now + self.horizon
            expected[booking.due % self.horizon] += 1
            for at, parts, tokens in self._uses(booking):
                link[at % self.horizon] += parts
                slots[at % self.horizon] += tokens
        assert (self._load, self._link, self._slots) == (expected, link, slots)

    def _has_room(self, copy: Copy, ahead: int) -> bool:
        """Whether a copy has time and device slots before a pass ``ahead`` from now."""
        if ahead < copy.begins:
            return False
        during = [(self._now + ahead - i) % self.horizon for i in range(copy.begins + 1)]
        return all(self._slots[at] + copy.tokens <= self.room for at in during)

    def _overbooked(self, copy: Copy, ahead: int) -> int:
        """Parts by which a copy before a pass ``ahead`` from now exceeds the link's time."""
        return sum(
            max(self._link[(self._now + ahead - i) % self.horizon] + parts - PARTS, 0)
            for i, parts in copy.parts()
        )

    def _uses(self, booking: _Booking) -> Iterator[tuple[int, int, int]]:
        """Iterations from now on, with the link's parts and the slots a booking takes in each."""
        if booking.copy is None:
            return
        yield booking.due, 0, booking.copy.tokens
        for before, parts in booking.copy.parts():
            if booking.due - before >= self._now:
                yield booking.due - before, parts, booking.copy.tokens

    def _hold(self, rid: Hashable, booking: _Booking, sign: int) -> None:
        self._load[booking.due % self.horizon] += sign
        for at, parts, tokens in self._uses(booking):
            self._link[at % self.horizon] += sign * parts
            self._slots[at % self.horizon] += sign * tokens
        if sign > 0:
            self._booked[rid] = booking
        else:
            del self._booked[rid]

"""Staggered verify phases: which iteration each request verifies in, and when its KV is copied.

Bookkeeping only. Time is the number of scheduler iterations seen; nothing here knows a request
but by its id.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Copy:
    """Full KV that must come from the host before a verify pass.

    Attributes:
        tokens: device slots it takes, from the first copied one until the pass is over.
        windows: iterations that copying takes; it begins that many before the pass.
    """

    tokens: int
    windows: int


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

    Two further rings hold what the copies of offloaded requests will use: the link, one copy at a
    time, and device slots (the reserve rings and ADMIT of VeriCache, arXiv 2605.17613).

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
        where link and room are free; failing that as if it had none, and its copy begins when the
        pass is due.

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
            fitting = [ahead for ahead in wanted if self._fits(copy, ahead)]
            if fitting:
                ahead = min(fitting, key=self.load)
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
            if booking.copy and booking.due - booking.copy.windows <= self._now < booking.due
        ]

    def load(self, ahead: int = 0) -> int:
        """Verify passes booked ``ahead`` iterations from now, ``0 <= ahead < horizon``."""
        return self._load[(self._now + ahead) % self.horizon]

    def reserved(self, ahead: int) -> tuple[int, int]:
        """Copies and device slots reserved ``ahead`` iterations from now."""
        at = (self._now + ahead) % self.horizon
        return self._link[at], self._slots[at]

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
            for at in self._copy_time(booking):
                link[at % self.horizon] += at < booking.due
                slots[at % self.horizon] += booking.copy.tokens if booking.copy else 0
        assert (self._load, self._link, self._slots) == (expected, link, slots)

    def _fits(self, copy: Copy, ahead: int) -> bool:
        """Whether a copy of its own has link and room before a pass ``ahead`` from now."""
        if ahead < copy.windows:
            return False
        before = [(self._now + ahead - i) % self.horizon for i in range(1, copy.windows + 1)]
        during = [*before, (self._now + ahead) % self.horizon]
        return not any(self._link[at] for at in before) and all(
            self._slots[at] + copy.tokens <= self.room for at in during
        )

    def _copy_time(self, booking: _Booking) -> range:
        """Iterations from the first of a booking's copy, or now, to its pass."""
        if booking.copy is None:
            return range(0)
        return range(max(booking.due - booking.copy.windows, self._now), booking.due + 1)

    def _hold(self, rid: Hashable, booking: _Booking, sign: int) -> None:
        self._load[booking.due % self.horizon] += sign
        for at in self._copy_time(booking):
            if at < booking.due:
                self._link[at % self.horizon] += sign
            self._slots[at % self.horizon] += sign * (booking.copy.tokens if booking.copy else 0)
        if sign > 0:
            self._booked[rid] = booking
        else:
            del self._booked[rid]

"""Staggered verify phases: which iteration each request verifies in.

Bookkeeping only. Time is the number of scheduler iterations seen; nothing here knows a request
but by its id.
"""

from __future__ import annotations

from collections.abc import Hashable


class PhaseWheel:
    """A ring of the next ``horizon`` iterations with the number of verify passes booked in each.

    A request holds at most one booking, at most ``horizon - 1`` iterations ahead. It joins with
    ``book(rid, 0, k)`` after those that begin another round with ``book(rid, k, k)``: then, while
    nobody leaves, the loads of the ``k + 1`` phases differ by at most one, and no more than
    ceil(B/(k+1)) of B requests verify at once.

    Args:
        horizon: largest draft length plus one.
    """

    def __init__(self, horizon: int) -> None:
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1, not {horizon}")
        self._now = 0
        self._load = [0] * horizon
        self._due: dict[Hashable, int] = {}

    @property
    def horizon(self) -> int:
        return len(self._load)

    def book(self, rid: Hashable, shortest: int, longest: int) -> int:
        """Book the next verify pass ``shortest..longest`` iterations from now.

        The least-loaded iteration wins; of equally loaded ones the latest.

        Returns:
            The chosen number of iterations, which is also the number of tokens to draft until then.

        Raises:
            ValueError: the request already holds a booking, or the range is empty or too far.
        """
        if rid in self._due:
            raise ValueError(f"request {rid!r} already has a verify pass booked")
        if not 0 <= shortest <= longest < self.horizon:
            raise ValueError(f"draft length {shortest}..{longest} outside 0..{self.horizon - 1}")
        ahead = min(range(longest, shortest - 1, -1), key=self.load)
        self._due[rid] = self._now + ahead
        self._load[self._due[rid] % self.horizon] += 1
        return ahead

    def leave(self, rid: Hashable) -> None:
        """Give up the request's booking, if it has one: it ended, or verifies early."""
        due = self._due.pop(rid, None)
        if due is not None:
            self._load[due % self.horizon] -= 1

    def is_booked(self, rid: Hashable) -> bool:
        return rid in self._due

    def is_due(self, rid: Hashable) -> bool:
        """Whether the request's verify pass is booked for this iteration."""
        return self._due.get(rid) == self._now

    def load(self, ahead: int = 0) -> int:
        """Verify passes booked ``ahead`` iterations from now, ``0 <= ahead < horizon``."""
        return self._load[(self._now + ahead) % self.horizon]

    def advance(self) -> None:
        """Go to the next iteration. Whoever is due now must have left or been booked again."""
        assert self.load() == 0, "a verify pass is still booked for the iteration that ends"
        self._now += 1

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the loads are those of the bookings held."""
        expected = [0] * self.horizon
        for due in self._due.values():
            assert self._now <= due < self._now + self.horizon
            expected[due % self.horizon] += 1
        assert self._load == expected, (self._load, expected)

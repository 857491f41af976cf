"""How often a draft token equals the target's."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class Agreement:
    """Exponentially decayed estimate of the per-token agreement p.

    Every verified draft token up to and including the first rejected one is a trial; those after a
    rejection say nothing. Few trials lean on a prior worth ``PRIOR_TRIALS``.

    Args:
        memory: trials after which an observation weighs 1/e.
    """

    PRIOR_TRIALS = 4.0

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._successes = 0.0
        self._trials = 0.0

    def mean(self, prior: float) -> float:
        """Estimate of p in (0, 1), given what to believe before any trial."""
        weight = self.PRIOR_TRIALS
        return (self._successes + weight * prior) / (self._trials + weight)

    def record(self, drafted: int, accepted: int) -> None:
        """Add the outcome of one verify pass, ``0 <= accepted <= drafted``."""
        for success in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._successes = self._keep * self._successes + success
            self._trials = self._keep * self._trials + 1.0


class Confidence:
    """Chance that a draft token is accepted, given a sign of how sure it is.

    A calibration learned online: one ``Agreement`` for each range of the sign.

    Args:
        memory: trials of a range after which an observation weighs 1/e.
        edges: limits of the ranges, ascending.
    """

    def __init__(self, memory: float, edges: Sequence[float]) -> None:
        self._edges = edges
        self._ranges = [Agreement(memory) for _ in range(len(edges) + 1)]

    def of(self, sign: float, prior: float) -> float:
        """Chance of a draft with this sign; ``prior`` is believed before any trial."""
        return self._range(sign).mean(prior)

    def best(self, prior: float) -> float:
        """The highest chance of any sign."""
        return max(each.mean(prior) for each in self._ranges)

    def record(self, signs: Sequence[float], accepted: int) -> None:
        """Add the outcome of one verify pass over drafts with these signs."""
        for i, sign in enumerate(signs[: accepted + 1]):
            self._range(sign).record(1, int(i < accepted))

    def _range(self, sign: float) -> Agreement:
        return self._ranges[bisect.bisect_right(self._edges, sign)]

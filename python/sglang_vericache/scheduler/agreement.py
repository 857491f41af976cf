"""How often a draft token equals the target's."""

from __future__ import annotations


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

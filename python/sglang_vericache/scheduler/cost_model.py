"""What one scheduler iteration costs, learned from the iterations that ran.

    seconds = fixed + R_d * draft_rows + K_d * draft_keys
              + R_v * verify_rows + K_v * verify_keys + P_v * verify_pairs + L * loaded_keys

with the counts of ``Work`` and positive coefficients. The coefficients minimise the squared
*relative* errors of past iterations, recent ones weighing more, plus a pull towards a prior that a
few observations outweigh. Pure Python: a solve is a 7 x 7 coordinate descent of some 0.1 ms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

# Proportions between the coefficients before anything was measured, in the order of the formula;
# their common scale follows the measured times. Roughly a 135M-parameter model on two CPU cores,
# with drafting and further verify rows priced low: too low is corrected by the first drafts, too
# high would never be.
PRIOR = (1e-2, 5e-4, 1e-6, 1e-3, 1.4e-6, 2e-7, 3e-6)
PRIOR_WEIGHT = 0.05
SCALE_RATE = 0.1
FORGETTING = 0.998
SWEEPS = 8
# Nothing is free: no coefficient falls below this share of the prior.
FLOOR = 1e-3
# An iteration off by more than this factor (a compilation, another process) counts as off by it.
OUTLIER = 3.0


@dataclass(frozen=True)
class Work:
    """What the rows of one iteration read.

    Attributes:
        draft_rows: rows of drafting requests, one each.
        draft_keys: keys those rows attend to, summed.
        verify_rows: rows of verifying requests, ``k + 1`` each.
        verify_keys: context lengths of the verifying requests, summed: KV loaded once.
        verify_pairs: rows times context length, summed over verifying requests: dot products.
        loaded_keys: keys copied from the host for them.
    """

    draft_rows: float = 0
    draft_keys: float = 0
    verify_rows: float = 0
    verify_keys: float = 0
    verify_pairs: float = 0
    loaded_keys: float = 0

    @classmethod
    def draft(cls, keys: float) -> Work:
        """One drafting row whose view and tail hold ``keys`` tokens."""
        return cls(draft_rows=1, draft_keys=keys)

    @classmethod
    def verify(cls, rows: int, context: int, loaded: float = 0) -> Work:
        """One request verifying ``rows`` rows over ``context`` tokens, ``loaded`` ones copied."""
        return cls(0, 0, rows, context, rows * context, loaded)

    def counts(self) -> tuple[float, ...]:
        """All fields, in order."""
        return (
            self.draft_rows,
            self.draft_keys,
            self.verify_rows,
            self.verify_keys,
            self.verify_pairs,
            self.loaded_keys,
        )

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.counts(), other.counts(), strict=True)))


class CostModel:
    """Predicts seconds of an iteration; tell it with ``observe`` what each one took."""

    def __init__(self) -> None:
        size = len(PRIOR)
        # Everything is kept in multiples of the prior, so that one pull strength fits all units.
        self._factors = [1.0] * size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._log_scale: float | None = None
        # The factors as seconds: several times a request in every iteration somebody asks.
        self._costs: tuple[float, ...] = PRIOR

    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit, in the order of the module's formula."""
        return self._costs

    @property
    def fixed(self) -> float:
        """Seconds of an iteration whatever it does: launch, Python, reading the weights."""
        return self._costs[0]

    def marginal(self, work: Work) -> float:
        """Predicted seconds that ``work`` adds to an iteration."""
        return sum(map(mul, work.counts(), self._costs[1:]))

    def seconds(self, work: Work) -> float:
        """Predicted seconds of an iteration that does ``work``."""
        return self.fixed + self.marginal(work)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from one iteration that took ``seconds`` > 0."""
        by_prior = [count * p for count, p in zip((1.0, *work.counts()), PRIOR, strict=True)]
        self._follow_scale(math.log(seconds / sum(by_prior)))
        expected = self.seconds(work)
        seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        row = [part / seconds for part in by_prior]
        for i, gram in enumerate(self._gram):
            for j, value in enumerate(row):
                gram[j] = FORGETTING * gram[j] + row[i] * value
            self._moment[i] = FORGETTING * self._moment[i] + row[i]
        self._solve()

    def _follow_scale(self, log_ratio: float) -> None:
        if self._log_scale is None:
            self._log_scale = log_ratio
            self._factors = [math.exp(log_ratio)] * len(PRIOR)
            self._convert()
        step = max(-1.0, min(1.0, log_ratio - self._log_scale))
        self._log_scale += SCALE_RATE * step

    def _solve(self) -> None:
        """Least squares with the pull, continued from the last solution.

        Minimises sum (1 - row . f)^2 + PRIOR_WEIGHT * sum (f_i / scale - 1)^2 over
        f >= FLOOR * scale.
        """
        assert self._log_scale is not None
        scale = math.exp(self._log_scale)
        factors = self._factors
        for _ in range(SWEEPS):
            for i, gram in enumerate(self._gram):
                others = sum(g * f for g, f in zip(gram, factors, strict=True))
                target = self._moment[i] - others + gram[i] * factors[i] + PRIOR_WEIGHT / scale
                best = target / (gram[i] + PRIOR_WEIGHT / scale**2)
                factors[i] = max(best, FLOOR * scale)
        self._convert()

    def _convert(self) -> None:
        self._costs = tuple(map(mul, self._factors, PRIOR))

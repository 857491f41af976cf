"""Layer budgets by measured error: whole tokens in proportion to weights, within limits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import floor


@lru_cache(maxsize=1024)
def apportion(weights: tuple[float, ...], total: int, least: int, most: int) -> tuple[int, ...]:
    """``n_l = clip(floor(least + x * w_l), least, most)``, x chosen such that they sum to total.

    What rounding leaves goes to the layers whose next token would come first as x grows (a divisor
    method), so a larger total never takes a token from anybody.

    Args:
        weights: w_l, not negative; layers of weight 0 get more than ``least`` last.
        total: tokens to hand out, in ``[least * L, most * L]``.
        least, most: limits of a layer.
    """
    tiny = [max(w, 1e-9) for w in weights]
    low, high = 0.0, (most - least) / min(tiny)
    for _ in range(100):
        x = (low + high) / 2
        low, high = (x, high) if sum(_counts(tiny, x, least, most)) <= total else (low, x)
    counts = _counts(tiny, low, least, most)
    while sum(counts) < total:
        _, layer = min(((n + 1 - least) / tiny[i], i) for i, n in enumerate(counts) if n < most)
        counts[layer] += 1
    return tuple(counts)


def _counts(weights: Sequence[float], x: float, least: int, most: int) -> list[int]:
    return [min(floor(least + x * w), most) for w in weights]

"""A deterministic sample of a product of factors that contains every pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Choice = dict[str, Any]
STRIDE = 211


def pairs(choice: Choice) -> set[tuple[tuple[str, Any], ...]]:
    """Every pair of (factor, value) in ``choice``."""
    return set(itertools.combinations(choice.items(), 2))


def product(factors: Mapping[str, Sequence[Any]]) -> Iterator[Choice]:
    """Every combination of values."""
    for values in itertools.product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def covering(factors: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Few choices that hold every pair of values: greedily the one with most new pairs.

    Of equally good ones the first from a starting point that moves on, so that no value dominates.
    """
    candidates = list(product(factors))
    missing = set().union(*map(pairs, candidates))
    chosen: list[Choice] = []
    while missing:
        start = len(chosen) * STRIDE % len(candidates)
        rotated = candidates[start:] + candidates[:start]
        chosen.append(max(rotated, key=lambda choice: len(pairs(choice) & missing)))
        missing -= pairs(chosen[-1])
    return chosen

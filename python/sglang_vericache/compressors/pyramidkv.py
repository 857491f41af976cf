"""PyramidKV: fewer tokens the deeper the layer."""

from __future__ import annotations

from math import floor
from typing import ClassVar

from sglang_vericache.compressors.base import Dropper, LayerContext
from sglang_vericache.core import Budget


class PyramidKV(Dropper):
    """Layer budgets that fall linearly with depth; their sum is that of equal budgets, L * B.

    With s the sinks and recent tokens that are kept anyway and b = B - s:
    B_0 = min(s + (2 - 1/20) * b, T), B_{L-1} = 2 B - B_0, linear in between; rounded down in the
    first half and up in the second, so that layers l and L-1-l have 2 B together. Cai et al. 2024,
    https://arxiv.org/abs/2406.02069, with beta = 20 as in their code. kvpress computes the same
    with s = 0, unless the last layer would get less than its window: then all layers get B.

    Cost: O(1) a layer, of the wrapped method otherwise. With full KV on the host a copy takes as
    many slots as the longest list, up to twice the budget.
    Limits: the shape is a guess about all models; ``calibrated`` measures it.
    """

    name: ClassVar[str] = "pyramidkv"
    BETA: ClassVar[int] = 20

    def longest(self, length: int, kv_heads: int, budget: Budget) -> int:
        return floor(self._first(length, budget))

    def count(self, ctx: LayerContext, budget: Budget) -> int:
        mean, mirrored = budget.tokens(ctx.length), ctx.num_layers - 1 - ctx.layer
        if ctx.layer == mirrored:
            return mean
        first, last = self._first(ctx.length, budget), ctx.num_layers - 1
        count = floor(first - 2 * (first - mean) * min(ctx.layer, mirrored) / last)
        return count if ctx.layer < mirrored else 2 * mean - count

    def _first(self, length: int, budget: Budget) -> float:
        """Tokens of the first layer."""
        mean = budget.tokens(length)
        sure = min(self.protected.sinks + self.protected.recent, mean)
        return min(sure + (2 - 1 / self.BETA) * (mean - sure), length)

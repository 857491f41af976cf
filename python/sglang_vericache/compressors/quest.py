"""Quest: keep the pages that may hold a key the last queries look for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import Dropper, LayerContext
from sglang_vericache.core import Budget


@dataclass(frozen=True)
class Quest(Dropper):
    """Keep whole pages of ``page`` tokens, per KV head, by an upper bound of their attention.

    With lo, hi the least and greatest entries of a page's keys in each channel, no key of page p
    has a larger product with q than b_p(q) = sum_d max(q_d lo_pd, q_d hi_pd). Score: the sum of
    softmax_p(b_p(q) / sqrt(D)) over the window's queries and a KV head's query heads. The pages of
    sinks and window come first; a budget that covers them is rounded down to whole pages. Tang et
    al. 2024, https://arxiv.org/abs/2406.10774 (one query, pages chosen at every step).

    Cost a layer: reads T*HKV*D keys once, copies them once; 4*w*HQ*D*T/page FLOPs.
    Limits: pages change with a refresh only; lo and hi are not kept for it.
    """

    name: ClassVar[str] = "quest"
    per_head: ClassVar[bool] = True
    refreshable: ClassVar[bool] = True

    sinks: int = 4
    window: int = 16
    page: int = 16

    @property
    def query_rows(self) -> int:
        return self.window

    def count(self, ctx: LayerContext, budget: Budget) -> int:
        tokens, (first, last) = budget.tokens(ctx.length), self._ends(ctx.length)
        fits = ctx.length - (last - first) * self.page <= tokens < ctx.length
        return tokens - (tokens - ctx.length) % self.page if fits else tokens

    def score(self, ctx: LayerContext) -> Tensor:
        """Summed bounds of the tokens' pages ``[HKV, T]``."""
        q = ctx.queries[-self.window :].float() * ctx.queries.shape[-1] ** -0.5
        q = q.unflatten(1, (ctx.num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        whole = torch.arange(ctx.length + -ctx.length % self.page, device=ctx.device)
        keys = ctx.keys()[whole.clamp(max=ctx.length - 1)].unflatten(0, (-1, self.page))
        low, high = (x.float().permute(1, 2, 0) for x in keys.aminmax(dim=1))
        scores = (q.clamp(min=0) @ high + q.clamp(max=0) @ low).softmax(dim=-1).sum(dim=1)
        first, last = self._ends(ctx.length)
        scores[:, :first] = scores[:, last:] = q.shape[1] + 1
        return scores.repeat_interleave(self.page, dim=1)[:, : ctx.length]

    def _ends(self, length: int) -> tuple[int, int]:  # in pages, of sinks and before the window
        last = max(length - self.window, 0) // self.page
        return min(-(-self.sinks // self.page), last), last

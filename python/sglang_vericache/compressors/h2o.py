"""H2O: keep the tokens that have drawn most attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import KeepsEnds, LayerContext


@dataclass(frozen=True)
class H2O(KeepsEnds):
    """Keep the heavy hitters of each KV head: keys that drew most attention on average.

    score_ht = sum_i a_iht / n_t, with a the attention probabilities of the ``observed`` latest
    queries, averaged over the query heads of a KV head, and n_t = min(observed, T - t) how many of
    those see token t. Zhang et al. 2023, https://arxiv.org/abs/2306.14048; the average instead of
    the sum is ObservedAttention of https://github.com/NVIDIA/kvpress.

    Both sum over every query of the prompt. An engine with a fused attention kernel never has
    those probabilities, so here only the ``observed`` latest queries vote: with as many as tokens
    the scores are ObservedAttention's. The paper gives half of the budget to recent tokens, here
    ``recent``.

    Cost a layer: reads T*HKV*D keys once; 2*observed*HQ*D*T FLOPs. The queries of a request take
    layers * observed * HQ * D elements on the device.
    Limits: tokens that only the early prompt attended to are not seen; wider but less current than
    ``snapkv-per-head``, without its pooling.
    """

    name: ClassVar[str] = "h2o"
    per_head: ClassVar[bool] = True
    refreshable: ClassVar[bool] = True

    observed: int = 64

    @property
    def query_rows(self) -> int:
        return self.observed

    def score(self, ctx: LayerContext) -> Tensor:
        """Average attention ``[HKV, T]``."""
        queries = ctx.queries[-self.observed :]
        attention = ctx.attention(queries).view(ctx.num_kv_heads, -1, ctx.length).mean(dim=1)
        later = torch.arange(ctx.length, 0, -1, device=ctx.device)
        return attention / later.clamp(max=len(queries))

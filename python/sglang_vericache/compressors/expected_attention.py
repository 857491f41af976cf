"""ExpectedAttention: keep what future queries should attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import KeepsEnds, LayerContext


@dataclass(frozen=True)
class ExpectedAttention(KeepsEnds):
    """Keep, per KV head, the keys to which a Gaussian of future queries attends most.

    Queries before RoPE are taken as N(mu, Sigma), estimated from the ``observed`` latest (in the
    paper from all of the prompt), and turned by R, the average RoPE of the next ``future``
    positions: score_ht = |v_ht| * mean over the query heads of h of
    softmax_t(R mu.k_t / sqrt(D) + k_t.R Sigma R^T.k_t / (2 D)), sinks left out. Devoto et al. 2025,
    https://arxiv.org/abs/2510.00636. Sigma is never formed: k.Sigma.k is the mean square of k times
    each centred query.

    Cost a layer: reads T*HKV*D keys and values once; 2*observed*HQ*D*T FLOPs; works on one KV head
    at a time, in 4*observed*HQ/HKV*T bytes.
    Limits: one Gaussian blurs a question that only few queries ask. From one query (a refresh after
    one accepted token) Sigma is 0.
    """

    name: ClassVar[str] = "expected-attention"
    per_head: ClassVar[bool] = True
    refreshable: ClassVar[bool] = True

    observed: int = 64
    future: int = 512

    @property
    def query_rows(self) -> int:
        return self.observed

    def score(self, ctx: LayerContext) -> Tensor:
        """Expected attention times value norm ``[HKV, T]``."""
        queries = ctx.unrotated_queries()[-self.observed :]
        if ctx.rotary is not None:
            ahead = torch.arange(self.future, device=ctx.device) + ctx.length
            queries = ctx.rotary.average(queries, ahead)
        grouped = queries.unflatten(1, (ctx.num_kv_heads, -1)) * queries.shape[-1] ** -0.5
        heads = zip(grouped.unbind(1), ctx.keys().unbind(1), strict=True)
        scores = [self._head(q, k.float()) for q, k in heads]
        norms = torch.linalg.vector_norm(ctx.values(), dim=-1, dtype=torch.float32)
        return torch.stack(scores) * norms.T

    def _head(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Expected attention ``[T]`` of scaled ``queries`` ``[w, G, D]`` to ``keys`` ``[T, D]``."""
        logits = queries @ keys.T
        variance, mean = torch.var_mean(logits, dim=0, correction=0)
        logits = mean + variance / 2
        logits[:, : self.sinks] = float("-inf")
        return logits.softmax(dim=-1).mean(dim=0)

"""LagKV: keep what stands out from the chunk that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import KeepsEnds, LayerContext


@dataclass(frozen=True)
class LagKV(KeepsEnds):
    """Keep, from every chunk of ``lag`` tokens, those unlike the next chunk, per KV head.

    After the sinks, chunks C_1 .. C_n. With lo, hi the least and greatest entries of C_{p+1} in
    each channel, u_t = softmax_{t in C_p}(std_d((x_td - lo_d) / (hi_d - lo_d))) for x = k and v;
    score_t = rank of (u^k_t + u^v_t) / 2 in its chunk, over lag. C_n and the rest behind it score
    above all others, later ones higher. Liang et al. 2025, https://arxiv.org/abs/2504.04704.

    A channel that is constant in C_{p+1} counts 0. Contexts of fewer than two chunks keep the most
    recent tokens.

    Cost a layer: reads T*HKV*D keys and values once, float32 copies; 12*HKV*D*T FLOPs, one sort.
    Limits: looks at no query, so neither question nor refresh changes the view. Every chunk keeps
    as many, whatever it says. C_n and the rest alone are ``lag`` to 2*lag - 1 tokens: a budget
    below that keeps the most recent tokens only. Hence 32; the paper has 128 and more.
    """

    name: ClassVar[str] = "lagkv"
    per_head: ClassVar[bool] = True

    lag: int = 32

    def score(self, ctx: LayerContext) -> Tensor:
        """Ranks in ``[0, 1)``, then ``1 + t/T`` ``[HKV, T]``."""
        scores = torch.arange(ctx.length, device=ctx.device).repeat(ctx.num_kv_heads, 1)
        scores = 1 + scores / ctx.length
        chunks = (ctx.length - self.sinks) // self.lag
        if chunks >= 2:
            end = self.sinks + chunks * self.lag
            k, v = (self._standing_out(x[self.sinks : end]) for x in (ctx.keys(), ctx.values()))
            ranks = (k + v).argsort(dim=-1).argsort(dim=-1) / self.lag
            scores[:, self.sinks : end - self.lag] = ranks.flatten(1)
        return scores

    def _standing_out(self, x: Tensor) -> Tensor:
        """u of ``x`` ``[n*lag, HKV, D]``, ``[HKV, n-1, lag]``."""
        chunks = x.float().unflatten(0, (-1, self.lag)).permute(2, 0, 1, 3)
        low, high = chunks[:, 1:].aminmax(dim=2, keepdim=True)
        place = (chunks[:, :-1] - low) / (high - low)
        place = place.masked_fill(high == low, 0)
        return place.std(dim=-1).softmax(dim=-1)

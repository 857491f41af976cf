"""Knorm: keep the keys of small norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import KeepsEnds, LayerContext


@dataclass(frozen=True)
class Knorm(KeepsEnds):
    """Keep the keys of smallest L2 norm in each KV head.

    score_ht = -|k_ht|: on average a key of small norm draws more attention. Devoto et al. 2024,
    https://arxiv.org/abs/2406.11430.

    Cost a layer: reads T*HKV*D keys once; 2*HKV*D*T FLOPs.
    Limits: looks at no query, so neither question nor refresh changes the view; in some models
    (those with a norm over keys) norms say little.
    """

    name: ClassVar[str] = "knorm"
    per_head: ClassVar[bool] = True

    def score(self, ctx: LayerContext) -> Tensor:
        """Negative norms ``[HKV, T]``."""
        return -torch.linalg.vector_norm(ctx.keys(), dim=-1, dtype=torch.float32).T

"""KeyDiff: keep the keys that are least like the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from sglang_vericache.compressors.base import KeepsEnds, LayerContext


@dataclass(frozen=True)
class KeyDiff(KeepsEnds):
    """Keep the keys of each KV head that differ most from the average direction.

    score_ht = -cos(k_ht, mean_s k_hs / |k_hs|). Park et al. 2025,
    https://arxiv.org/abs/2504.15364, which evicts block by block while the prompt is read; here, as
    in https://github.com/NVIDIA/kvpress, all keys are scored at once.

    Cost a layer: reads T*HKV*D keys once, float32 copies of them; 6*HKV*D*T FLOPs.
    Limits: looks at no query, so neither question nor refresh changes the view.
    """

    name: ClassVar[str] = "keydiff"
    per_head: ClassVar[bool] = True

    def score(self, ctx: LayerContext) -> Tensor:
        """Negative cosine similarities ``[HKV, T]``."""
        directions = F.normalize(ctx.keys().float(), dim=-1)
        anchor = F.normalize(directions.mean(dim=0), dim=-1)
        return -(directions * anchor).sum(dim=-1).T

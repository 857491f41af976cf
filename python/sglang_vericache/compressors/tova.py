"""TOVA: keep what the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_vericache.compressors.base import KeepsEnds, LayerContext


@dataclass(frozen=True)
class TOVA(KeepsEnds):
    """Keep the same positions for all heads of a layer: what the latest token attends to.

    score_t = mean over query heads of softmax(q K^T / sqrt(D))_t, q of the latest token. Oren et
    al. 2024, https://arxiv.org/abs/2401.06104, which drops one token a step while it decodes; here
    all are chosen at once, anew with each refresh. Beyond the paper, sinks and recent tokens are
    kept whatever their score.

    Cost a layer: reads T*HKV*D keys once; 2*HQ*D*T FLOPs.
    Limits: one query is a noisy witness; ``snapkv`` asks ``window`` of them.
    """

    name: ClassVar[str] = "tova"
    refreshable: ClassVar[bool] = True

    @property
    def query_rows(self) -> int:
        return 1

    def score(self, ctx: LayerContext) -> Tensor:
        """Attention of the latest token ``[1, T]``."""
        return ctx.attention(ctx.queries[-1:]).mean(dim=0, keepdim=True)

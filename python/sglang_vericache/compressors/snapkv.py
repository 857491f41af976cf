"""SnapKV: keep what the last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from sglang_vericache.compressors.base import KeepsEnds, LayerContext


def window_scores(ctx: LayerContext, window: int, kernel: int, lists: int) -> Tensor:
    """SnapKV scores ``[lists, T]``, float32, averaged over the query heads of each list.

    score_t = avgpool_kernel(sum_i softmax(q_i K^T / sqrt(D))_t) over the keys before the window.
    Pooling is linear, so the heads are averaged first.
    """
    attention = ctx.attention(ctx.queries[-window:])
    scores = attention.view(lists, -1, ctx.length).mean(dim=1)
    scores[:, max(ctx.length - window, 0) :] = 0
    return F.avg_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]


@dataclass(frozen=True)
class SnapKV(KeepsEnds):
    """Keep the same best positions for all heads of a layer.

    Window scores averaged over the query heads. Kept anyway: window, sinks and, beyond the paper, a
    share ``recent`` of the budget for the latest tokens, since the next token depends most on them
    (``recent`` 0 is the paper's rule). Li et al. 2024, https://arxiv.org/abs/2404.14469 (which
    selects per head: see ``snapkv-per-head``).

    Cost a layer: reads T*HKV*D keys once; 2*w*HQ*D*T FLOPs.
    Limits: chosen from ``window`` prompt queries, so what only a later token needs is missing until
    a refresh; with the rows of a verify pass as queries the same scores give a Quest-like refresh.
    """

    name: ClassVar[str] = "snapkv"
    refreshable: ClassVar[bool] = True

    kernel: int = 5

    @property
    def query_rows(self) -> int:
        return self.window

    def score(self, ctx: LayerContext) -> Tensor:
        """Window scores ``[1, T]``."""
        return window_scores(ctx, self.window, self.kernel, lists=1)

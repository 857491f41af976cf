"""CompressKV: SnapKV by the semantic retrieval heads alone, with calibrated layer budgets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from sglang_vericache.compressors.base import LayerContext, Protected
from sglang_vericache.compressors.calibrated import Calibrated
from sglang_vericache.compressors.snapkv import window_scores


@dataclass(frozen=True)
class CompressKV(Calibrated):
    """Keep what the retrieval heads of a layer look at, the same positions for all KV heads.

    SnapKV scores (8 queries, average pooling over 5) averaged over the few query heads that
    ``vericache calibrate`` found to look content up; heads that stare at sinks or neighbours have
    no say. Layer budgets as in ``calibrated``. Kept anyway: the last 8 tokens and, beyond the
    paper, sinks and a share ``recent`` of the budget for the latest tokens, as in ``snapkv``
    (``sinks`` 0 and ``recent`` 0 are the paper's rule). https://arxiv.org/abs/2606.24467

    Cost a layer: reads T*HKV*D keys once; 2*8*HQ*D*T FLOPs.
    Limits: chosen from 8 queries; a refresh with the queries of a verify pass, scored by the same
    heads, repairs it. Works only for models with a calibration file.
    """

    name: ClassVar[str] = "compresskv"
    refreshable: ClassVar[bool] = True
    WINDOW: ClassVar[int] = 8
    KERNEL: ClassVar[int] = 5

    sinks: int = 4
    recent: float = 0.4

    @property
    def query_rows(self) -> int:
        return self.WINDOW

    @property
    def protected(self) -> Protected:
        return Protected(self.sinks, self.WINDOW, self.recent)

    def score(self, ctx: LayerContext) -> Tensor:
        """Window scores of the retrieval heads, ``[1, T]``."""
        assert self.calibration is not None
        heads = list(self.calibration.heads[ctx.layer])
        latest = ctx.queries[-self.WINDOW :]
        theirs = replace(ctx, queries=latest, key_scores=lambda q: ctx.attention(q)[heads])
        return window_scores(theirs, self.WINDOW, self.KERNEL, lists=1)

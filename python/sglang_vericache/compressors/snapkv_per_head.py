"""SnapKV with a list of its own for every KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sglang_vericache.compressors.base import LayerContext
from sglang_vericache.compressors.snapkv import SnapKV, window_scores


@dataclass(frozen=True)
class SnapKVPerHead(SnapKV):
    """Keep the best positions of each KV head, equally many for all heads.

    Window scores averaged over the HQ/HKV query heads that share a KV head. Li et al. 2024,
    https://arxiv.org/abs/2404.14469, with GQA as in https://github.com/NVIDIA/kvpress.

    Cost a layer: as ``snapkv``; HKV lists instead of one (4 bytes a kept token and head).
    Limits: as ``snapkv``; attention gathers per head, so kept rows are shorter and less contiguous.
    """

    name: ClassVar[str] = "snapkv-per-head"
    per_head: ClassVar[bool] = True

    def score(self, ctx: LayerContext) -> Tensor:
        """Window scores ``[HKV, T]``."""
        return window_scores(ctx, self.window, self.kernel, lists=ctx.num_kv_heads)

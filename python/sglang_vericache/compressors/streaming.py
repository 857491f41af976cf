"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import Dropper, LayerContext, Protected


@dataclass(frozen=True)
class StreamingLLM(Dropper):
    """Keep the first ``sinks`` tokens and the most recent ones, in all layers and heads.

    score_t = t, with the sinks protected. Xiao et al. 2023, https://arxiv.org/abs/2309.17453.
    The paper renumbers positions inside the window; here they stay the original ones, as in every
    view of this project.

    Cost: O(T) integers; reads no keys, values or queries.
    Limits: whatever lies between sinks and window is invisible, so drafts that copy from the
    middle of the prompt are rejected. Not refreshable: it looks at no query.
    """

    name: ClassVar[str] = "streaming"

    sinks: int = 4

    @property
    def protected(self) -> Protected:
        return Protected(sinks=self.sinks)

    def score(self, ctx: LayerContext) -> Tensor:
        """Token positions as scores, ``[1, T]``."""
        return torch.arange(ctx.length, device=ctx.device, dtype=torch.float32)[None]

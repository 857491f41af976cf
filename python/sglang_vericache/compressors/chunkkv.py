"""ChunkKV: whole chunks instead of single tokens."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from sglang_vericache.compressors.base import Dropper, LayerContext


class ChunkKV(Dropper):
    """Keep chunks of 20 consecutive tokens, best mean score first.

    A token's score is the mean over its chunk (the last one may be shorter), so chunks are kept
    whole but for one, which fills the budget from its beginning, and for protected tokens, which
    are kept token by token. Liu et al. 2025, https://arxiv.org/abs/2502.00299. kvpress keeps
    int(ratio * chunks) whole chunks instead, i.e. fewer tokens, the same for all heads.

    Cost a layer: O(T), and the wrapped method's.
    Limits: a needle shorter than a chunk takes a whole one. The paper shares the chunks of a layer
    with its neighbours; here every layer chooses.
    """

    name: ClassVar[str] = "chunkkv"
    TOKENS: ClassVar[int] = 20

    def score(self, ctx: LayerContext) -> Tensor:
        """Mean scores of chunks, ``[Hs, T]``."""
        scores = super().score(ctx).float()  # type: ignore[safe-super]
        means = F.avg_pool1d(scores[None], self.TOKENS, ceil_mode=True)[0]
        return means.repeat_interleave(self.TOKENS, dim=1)[:, : ctx.length]

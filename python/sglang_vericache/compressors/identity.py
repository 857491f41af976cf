"""Keep everything: the positive control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import Dropper, LayerContext
from sglang_vericache.core import Budget


@dataclass(frozen=True)
class Identity(Dropper):
    """The view is the full context, whatever the budget.

    Drafts are then the target's own tokens, so a fixed draft length accepts all of them; a single
    rejection is a fault of the engine. ``auto`` draft length never drafts, as nothing is saved.

    Cost: none to choose; a drafting row reads as many bytes as a plain one.
    """

    name: ClassVar[str] = "identity"
    drops: ClassVar[bool] = False

    def longest(self, length: int, kv_heads: int, budget: Budget) -> int:
        return length

    def count(self, ctx: LayerContext, budget: Budget) -> int:
        return ctx.length

    def score(self, ctx: LayerContext) -> Tensor:
        """Zeros ``[1, T]``; never needed, since nothing goes."""
        return torch.zeros(1, ctx.length, device=ctx.device)

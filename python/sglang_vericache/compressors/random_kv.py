"""A useless view: the negative control."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import Dropper, LayerContext
from sglang_vericache.core import Budget


@dataclass(frozen=True)
class RandomKV(Dropper):
    """Keep a handful of random tokens, others in every layer, and neither sinks nor a window.

    A random choice of the whole budget still drafts well (agreement 0.8-0.9 at ratio 0.1), so
    this keeps ``KEPT`` tokens only: drafts read the wrong tokens' values and almost all of them
    are rejected. Output must not change.

    scores = uniform numbers from a generator seeded with (seed, layer, T): the same view each time.
    Cost: T random numbers a layer; reads no keys, values or queries.
    """

    name: ClassVar[str] = "random-kv"
    KEPT: ClassVar[int] = 2

    seed: int = 0

    def count(self, ctx: LayerContext, budget: Budget) -> int:
        return min(budget.tokens(ctx.length), self.KEPT)

    def score(self, ctx: LayerContext) -> Tensor:
        """Random scores ``[1, T]``."""
        # NOTE: torch's CPU generator uses the low 32 bits of its seed only.
        mixed = Random(f"{self.seed}/{ctx.layer}/{ctx.length}").getrandbits(32)
        generator = torch.Generator().manual_seed(mixed)
        return torch.rand(1, ctx.length, generator=generator).to(ctx.device)

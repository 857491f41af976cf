"""A useless view: the negative control."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import Dropper, LayerContext


@dataclass(frozen=True)
class RandomKV(Dropper):
    """Keep random tokens, others in every layer, and neither sinks nor a window.

    scores = uniform numbers from a generator seeded with (seed, layer, T): the same view for the
    same context. What drafting rows read is garbage, so almost every draft should be rejected, and
    the output must not change.

    Cost: T random numbers a layer; reads no keys, values or queries.
    Limits: drafting rows see every token since the compression, which is enough to repeat a
    sentence that the output has just repeated. Refreshed after every round, nothing is left to
    copy from: SmolLM2-135M at 1,500 tokens and ratio 0.1 then agrees on 0-3 % of the tokens of a
    repeating text (over 80 % without a refresh; 13-38 % on fresh text and code).
    """

    name: ClassVar[str] = "random-kv"
    refreshable: ClassVar[bool] = True

    seed: int = 0

    def score(self, ctx: LayerContext) -> Tensor:
        """Random scores ``[1, T]``."""
        # NOTE: torch's CPU generator uses the low 32 bits of its seed only.
        mixed = Random(f"{self.seed}/{ctx.layer}/{ctx.length}").getrandbits(32)
        generator = torch.Generator().manual_seed(mixed)
        return torch.rand(1, ctx.length, generator=generator).to(ctx.device)

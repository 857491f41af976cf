"""Layer budgets from the error that compression was measured to cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_vericache.compressors.base import Dropper, LayerContext
from sglang_vericache.compressors.calibration import Calibration
from sglang_vericache.compressors.layer_budgets import apportion
from sglang_vericache.core import Budget


@dataclass(frozen=True)
class Calibrated(Dropper):
    """Layer budgets in proportion to measured errors; their sum is that of equal budgets, L * B.

    B_l = clip(32 + w_l * x, 32, 3 B), x such that the sum is L * B (the paper starts from
    x = B L - 32 L and adjusts afterwards); nor is B_l more than T, or 32 where B is less. The
    weights w_l are a layer's share of the relative error after o_proj when 32 tokens are kept.
    CompressKV, https://arxiv.org/abs/2606.24467, section on layer budgets.

    Cost: O(L log T) once for a length, of the wrapped method otherwise. With full KV on the host a
    copy takes as many slots as the longest list, up to three times the budget.
    Limits: measured for one model (``vericache calibrate``), on needle prompts.
    """

    name: ClassVar[str] = "calibrated"
    LEAST: ClassVar[int] = 32
    MOST: ClassVar[int] = 3

    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.calibration is None:
            raise ValueError(
                f"{self.name!r} needs retrieval heads and layer weights of this server's model, "
                "and there is no file for it: run `vericache calibrate --model-path MODEL` and "
                "restart (one GPU only: a file counts the heads of the whole model)"
            )

    def longest(self, length: int, kv_heads: int, budget: Budget) -> int:
        return min(self.MOST * budget.tokens(length), length)

    def count(self, ctx: LayerContext, budget: Budget) -> int:
        assert self.calibration is not None
        mean = budget.tokens(ctx.length)
        total, least = mean * ctx.num_layers, min(self.LEAST, mean)
        most = self.longest(ctx.length, ctx.num_kv_heads, budget)
        return apportion(self.calibration.weights, total, least, most)[ctx.layer]

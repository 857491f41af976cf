"""Puts the row-invariant kernels under SGLang's layers after the weights are loaded.

Per instance, through the attributes that SGLang provides for it (``quant_method`` of linear layers,
``_forward_method`` of fused ops), so a model class needs no copy here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import Tensor, nn

from sgl_kernel_ext import fused_add_rmsnorm, linear, pack_weight, rmsnorm, rotary
from sgl_kernel_ext import silu_and_mul as silu_and_mul_op

logger = logging.getLogger(__name__)


class RowInvariantLinear(LinearMethodBase):
    """Linear method over a packed copy of the weight; a row's result ignores the other rows."""

    def __init__(self, weight: Tensor):
        self.packed = pack_weight(weight.data)

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("installed after loading")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.ndim == 2:
            return linear(x, self.packed, bias)
        out = linear(x.reshape(-1, x.shape[-1]), self.packed, bias)
        return out.view(*x.shape[:-1], -1)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return torch.nn.functional.embedding(input_, layer.weight)


def _norm(module: RMSNorm) -> Callable[..., Any]:
    eps = module.variance_epsilon

    def forward(
        x: Tensor,
        residual: Tensor | None = None,
        post_residual_addition: Tensor | None = None,
        quant_linear: nn.Module | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if post_residual_addition is not None:
            return module.forward_native(x, residual, post_residual_addition)
        if residual is None:
            return rmsnorm(x, module.weight, eps)
        fused_add_rmsnorm(x, residual, module.weight, eps)
        return x, residual

    return forward


def _rotary(module: RotaryEmbedding) -> Callable[..., Any]:
    def forward(
        positions: Tensor, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if any(a is not None for a in args) or any(v is not None for v in kwargs.values()):
            return module.forward_native(positions, query, key, *args, **kwargs)
        rotary(positions, query, key, module.head_size, module.cos_sin_cache, module.is_neox_style)
        return query, key

    return forward


def refresh(model: nn.Module) -> None:
    """Pack all weights again, after they were updated in place."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, RowInvariantLinear):
            weight: Any = module.weight
            method.packed.overwrite(weight.data)


def install(model: nn.Module) -> dict[str, int]:
    """Swap the layers of a loaded model in place.

    Returns:
        How many layers of each kind were swapped.

    Raises:
        ValueError: a linear layer is quantised; its kernel is not row-invariant.
    """
    swapped = {"linear": 0, "lm_head": 0, "norm": 0, "rotary": 0, "activation": 0}
    rotaries: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            if not isinstance(module.quant_method, UnquantizedLinearMethod):
                raise ValueError(
                    f"--quantization: {name} uses {type(module.quant_method).__name__}, which has "
                    "no row-invariant kernel yet; start with unquantised weights"
                )
            module.quant_method = RowInvariantLinear(module.weight)
            swapped["linear"] += 1
        elif isinstance(module, ParallelLMHead):
            module.quant_method = RowInvariantLinear(module.weight)
            swapped["lm_head"] += 1
        elif isinstance(module, RMSNorm) and module.variance_size_override is None:
            module._forward_method = _norm(module)
            swapped["norm"] += 1
        elif isinstance(module, SiluAndMul):
            module._forward_method = silu_and_mul_op
            swapped["activation"] += 1
        elif type(module) is RotaryEmbedding and id(module) not in rotaries:
            rotaries.add(id(module))
            module._forward_method = _rotary(module)
            swapped["rotary"] += 1
    head = getattr(model, "lm_head", None)
    if isinstance(head, VocabParallelEmbedding) and isinstance(
        head.quant_method, UnquantizedEmbeddingMethod
    ):  # tied to the embedding
        head.quant_method = RowInvariantLinear(head.weight)
        swapped["lm_head"] += 1
    logger.info("VeriCache kernels installed: %s", swapped)
    return swapped

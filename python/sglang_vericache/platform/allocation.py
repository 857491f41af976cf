"""KV allocation on a plain CPU where stock SGLang reaches for Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_vericache.hooks import Hook


def get_last_loc(
    original: Any, req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor
) -> Tensor:
    """``get_last_loc`` around: stock picks its implementation by attention backend, not device."""
    if req_to_token.is_cpu:
        from sglang.srt.mem_cache.allocation import get_last_loc_torch

        return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
    return original(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        "around",
        get_last_loc,
        "takes the Triton kernel on a CPU for page sizes above 1",
    ),
)

"""What SGLang's host tier (HiCache) lacks on a plain CPU: memory, copies and streams."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_kernel_ext import copy_rows
from sglang_vericache.platform import streams

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

# Left free by host pools; stock leaves 10 GiB, which small machines do not have.
MEMORY_RESERVE = 1 << 30


def install() -> None:
    """Fill the gaps; for processes that load SGLang on a CPU."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import base, common, mha

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = MEMORY_RESERVE
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    mha.transfer_kv_direct = transfer_kv_direct
    for module in (cache_controller, l2_transfer):
        module.device_module = streams


def installed() -> bool:
    """Whether ``install`` ran, or HiCache was never loaded."""
    module = sys.modules.get("sglang.srt.mem_cache.l2_transfer")
    return module is None or getattr(module, "device_module", None) is streams


def allocate(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: HostTensorAllocator,
    registration_granularity_bytes: int | None = None,
) -> Tensor:
    """Memory for a host pool; without a GPU there is nothing to pin it for."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy slots between pools on the current stream, as ``sgl_kernel`` does on a GPU.

    Args:
        src_layers, dst_layers: pairs of ``[slots, heads, head_dim]``, K and V of each layer.
        src_indices, dst_indices: int64 ``[n]``; whole pages of ``page_size`` slots.
    """

    def copy() -> None:
        for src, dst in zip(src_layers, dst_layers, strict=True):
            copy_rows(src, src_indices, dst, dst_indices)

    streams.current_stream().launch(copy)

"""How the attention kernels read the pools: the main one, and others that hold views only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.packed import codec_of
from sgl_kernel_ext.triton.packed import group_of, load_packed

# Of a codec: bits and channels of a group.
_PLAIN = (0, 0)


def pool_arguments(k: Tensor, v: Tensor) -> tuple[Tensor | int, ...]:
    """Keys, their slot and head strides, values and theirs: a pool as the kernels take it."""
    return k, *k.stride()[:2], v, *v.stride()[:2]


def pool_codecs(k: Tensor, v: Tensor, head_dim: int) -> tuple[tuple[int, int], ...]:
    """Of keys and of values, bits of a code and channels of a group; bits 0 where not packed."""
    return tuple(_codec(pool, head_dim) for pool in (k, v))


def _codec(pool: Tensor, head_dim: int) -> tuple[int, int]:
    if pool.dtype != torch.uint8:
        return _PLAIN
    codec = codec_of("view_pools", pool, head_dim)
    return codec.bits, group_of(codec, head_dim)


@triton.jit
def load_rows(
    pool, view_pools, home, kv_head, slot, d, loaded, viewed, CODECS: tl.constexpr, D: tl.constexpr
):
    """Keys and values ``[BLOCK_N, BLOCK_D]`` of one head in the pool's dtype.

    Args:
        pool: see ``pool_arguments``.
        view_pools: of these, entry ``home - 1`` has the rows that ``viewed`` is set for.
        slot: ``[BLOCK_N, 1]``.
        loaded: ``[BLOCK_N, BLOCK_D]``; other elements are 0.
    """
    keys, k_slot, k_head, values, v_slot, v_head = pool
    k_rows = keys + kv_head * k_head + slot * k_slot
    v_rows = values + kv_head * v_head + slot * v_slot
    if len(CODECS) == 0:
        k = tl.load(k_rows + d[None, :], mask=loaded, other=0.0)
        v = tl.load(v_rows + d[None, :], mask=loaded, other=0.0)
    else:
        here = loaded & ((home == 0) | (viewed == 0))
        k = tl.load(k_rows + d[None, :], mask=here, other=0.0)
        v = tl.load(v_rows + d[None, :], mask=here, other=0.0)
        for i in tl.static_range(len(CODECS)):
            if home == i + 1:
                k, v = _replace(k, v, view_pools[i], kv_head, slot, d, viewed, CODECS[i], D)
    return k, v


@triton.jit
def _replace(k, v, pool, kv_head, slot, d, viewed, CODEC: tl.constexpr, D: tl.constexpr):
    """``k`` and ``v`` with the rows ``viewed`` from this pool."""
    keys, k_slot, k_head, values, v_slot, v_head = pool
    k_rows = keys + kv_head * k_head + slot * k_slot
    v_rows = values + kv_head * v_head + slot * v_slot
    k = tl.where(viewed, _load(k_rows, d, viewed, CODEC[0], D, k.dtype), k)
    v = tl.where(viewed, _load(v_rows, d, viewed, CODEC[1], D, v.dtype), v)
    return k, v


@triton.jit
def _load(rows, d, mask, CODEC: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr):
    if CODEC[0] == 0:
        return tl.load(rows + d[None, :], mask=mask, other=0.0)
    else:
        return load_packed(rows, d, mask, CODEC[0], CODEC[1], D, dtype)

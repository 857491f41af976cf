"""How the attention kernels read the pools: the main one, and others that hold views only."""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.packed import ViewPool
from sgl_kernel_ext.triton.packed import Layout, layout_of, load_packed


def pool_arguments(k: Tensor, v: Tensor) -> tuple[Tensor | int, ...]:
    """Keys, their slot and head strides, values and theirs: a pool as the kernels take it."""
    return k, *k.stride()[:2], v, *v.stride()[:2]


def pool_layouts(pool: ViewPool, head_dim: int) -> tuple[Layout, ...]:
    """Of keys and of values."""
    return tuple(layout_of(codec, head_dim) for _, codec in pool.parts)


@triton.jit
def load_rows(
    pool, view_pools, home, kv_head, slot, d, loaded, viewed, LAYOUTS: tl.constexpr, D: tl.constexpr
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
    if len(LAYOUTS) == 0:
        k = tl.load(k_rows + d[None, :], mask=loaded, other=0.0)
        v = tl.load(v_rows + d[None, :], mask=loaded, other=0.0)
    else:
        here = loaded & ((home == 0) | (viewed == 0))
        k = tl.load(k_rows + d[None, :], mask=here, other=0.0)
        v = tl.load(v_rows + d[None, :], mask=here, other=0.0)
        for i in tl.static_range(len(LAYOUTS)):
            if home == i + 1:
                k, v = _replace(k, v, view_pools[i], kv_head, slot, d, viewed, LAYOUTS[i], D)
    return k, v


@triton.jit
def _replace(k, v, pool, kv_head, slot, d, viewed, LAYOUT: tl.constexpr, D: tl.constexpr):
    """``k`` and ``v`` with the rows ``viewed`` from this pool."""
    keys, k_slot, k_head, values, v_slot, v_head = pool
    keys += kv_head * k_head
    values += kv_head * v_head
    k = tl.where(viewed, _load(keys, k_slot, slot, d, viewed, LAYOUT[0], D, k.dtype), k)
    v = tl.where(viewed, _load(values, v_slot, slot, d, viewed, LAYOUT[1], D, v.dtype), v)
    return k, v


@triton.jit
def _load(head, stride, slot, d, mask, LAYOUT: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr):
    if LAYOUT[0] == 0:
        return tl.load(head + slot * stride + d[None, :], mask=mask, other=0.0)
    else:
        TOKENS: tl.constexpr = LAYOUT[3]
        blocks = head + slot // TOKENS * stride
        return load_packed(blocks, slot % TOKENS, d, mask, LAYOUT, D, dtype)

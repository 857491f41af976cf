"""Rotary embedding and KV-pool writes for CUDA: one program a row and head.

Arguments and semantics: :mod:`sgl_kernel_ext.fused`.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(x_ptr, half, cos_ptr, IS_NEOX: tl.constexpr, BLOCK: tl.constexpr):
    """Rotated halves, unwritten. Every product and sum is rounded, as the torch-native op does."""
    i = tl.arange(0, BLOCK)
    mask = i < half
    dtype = x_ptr.dtype.element_ty
    cos = tl.load(cos_ptr + i, mask=mask, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(cos_ptr + half + i, mask=mask, other=0.0).to(dtype).to(tl.float32)
    first_at = i if IS_NEOX else 2 * i
    second_at = half + i if IS_NEOX else 2 * i + 1
    first = tl.load(x_ptr + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + second_at, mask=mask, other=0.0).to(tl.float32)
    first_cos = (first * cos).to(dtype).to(tl.float32)
    first_sin = (first * sin).to(dtype).to(tl.float32)
    second_cos = (second * cos).to(dtype).to(tl.float32)
    second_sin = (second * sin).to(dtype).to(tl.float32)
    new_first = (first_cos - second_sin).to(dtype)
    new_second = (second_cos + first_sin).to(dtype)
    return new_first, new_second, first_at, second_at, mask


@triton.jit
def _rotary_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    cache_ptr,
    q_stride,
    k_stride,
    q_heads,
    head_size,
    half,
    IS_NEOX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos_ptr = cache_ptr + tl.load(positions_ptr + row).to(tl.int64) * 2 * half
    if head < q_heads:
        x_ptr = q_ptr + row * q_stride + head * head_size
    else:
        x_ptr = k_ptr + row * k_stride + (head - q_heads) * head_size
    first, second, first_at, second_at, mask = _rotate(x_ptr, half, cos_ptr, IS_NEOX, BLOCK)
    tl.store(x_ptr + first_at, first, mask=mask)
    tl.store(x_ptr + second_at, second, mask=mask)


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    loc_ptr,
    k_stride,
    v_stride,
    k_pool_stride,
    v_pool_stride,
    k_width,
    v_width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(loc_ptr + row).to(tl.int64)
    k = tl.load(k_ptr + row * k_stride + cols, mask=cols < k_width, other=0.0)
    tl.store(k_pool_ptr + slot * k_pool_stride + cols, k, mask=cols < k_width)
    v = tl.load(v_ptr + row * v_stride + cols, mask=cols < v_width, other=0.0)
    tl.store(v_pool_ptr + slot * v_pool_stride + cols, v, mask=cols < v_width)


def _row_width(name: str, tensor: torch.Tensor) -> int:
    if tensor.shape[0] and not tensor[0].is_contiguous():
        raise ValueError(f"{name} must be contiguous but for dim 0, strides {tensor.stride()}")
    return tensor.shape[1:].numel()


def rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    q_width, k_width = _row_width("rotary: q", q), _row_width("rotary: k", k)
    rotary_dim = cos_sin_cache.shape[1]
    if q_width % head_size or k_width % head_size or rotary_dim > head_size:
        raise ValueError(
            f"rotary: rows of {q_width} and {k_width} and rotary_dim {rotary_dim} "
            f"do not fit head_size {head_size}"
        )
    if not (len(positions) == len(q) == len(k)) or k.dtype != q.dtype:
        raise ValueError("rotary: positions, q and k differ in rows, or q and k in dtype")
    if len(q):
        _rotary_kernel[(len(q), (q_width + k_width) // head_size)](
            positions,
            q,
            k,
            cos_sin_cache,
            q.stride(0),
            k.stride(0),
            q_width // head_size,
            head_size,
            rotary_dim // 2,
            IS_NEOX=is_neox,
            BLOCK=triton.next_power_of_2(rotary_dim // 2),
        )


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    loc: torch.Tensor,
) -> None:
    k_width, v_width = _row_width("store_kv: k", k), _row_width("store_kv: v", v)
    pool_widths = _row_width("store_kv: k_pool", k_pool), _row_width("store_kv: v_pool", v_pool)
    if (k_width, v_width) != pool_widths or not (len(k) == len(v) == len(loc)):
        raise ValueError("store_kv: k, v and loc differ in rows, or do not fit the pools")
    if k.dtype != k_pool.dtype or v.dtype != v_pool.dtype:
        raise ValueError("store_kv: the rows and the pool differ in dtype")
    if len(k):
        block = 1024
        _store_kernel[(len(k), triton.cdiv(max(k_width, v_width), block))](
            k,
            v,
            k_pool,
            v_pool,
            loc,
            k.stride(0),
            v.stride(0),
            k_pool.stride(0),
            v_pool.stride(0),
            k_width,
            v_width,
            BLOCK=block,
        )


def rope_store_kv(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    loc: torch.Tensor,
) -> None:
    rotary(positions, q, k, head_size, cos_sin_cache, is_neox)
    store_kv(k, v, k_pool, v_pool, loc)

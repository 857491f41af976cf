"""Fused row-wise ops for CUDA; a program owns one row, so no row sees another.

Arguments and semantics: :mod:`sgl_kernel_ext.fused`.
"""

import torch
import triton
import triton.language as tl

from sgl_kernel_ext.triton.rope import rope_store_kv, rotary, store_kv

__all__ = [
    "argmax_rows",
    "copy_rows",
    "fused_add_rmsnorm",
    "rmsnorm",
    "rope_store_kv",
    "rotary",
    "silu_and_mul",
    "store_kv",
]

_SILU_BLOCK = 1024
_ARGMAX_BLOCK = 4096


@triton.jit
def _rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    n,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    at = group * n + cols
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = residual_ptr + row * residual_stride + at
        x += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual, x.to(residual_ptr.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / n + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = (x * scale) * weight
    tl.store(out_ptr + row * out_stride + at, y.to(out_ptr.dtype.element_ty), mask=mask)


def _launch_rmsnorm(x, residual, weight, eps, out) -> None:
    n = weight.numel()
    if x.shape[-1] != n or weight.stride(0) != 1:
        raise ValueError(f"rmsnorm: weight must be [{x.shape[-1]}], got {list(weight.shape)}")
    for name, tensor in (("x", x), ("residual", residual), ("out", out)):
        _check_rows(name, tensor, x)
    if x.numel():
        _rmsnorm_kernel[(x.shape[0], x[0].numel() // n)](
            x,
            residual,
            weight,
            out,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            n,
            eps,
            HAS_RESIDUAL=residual is not x,
            BLOCK=triton.next_power_of_2(n),
        )


def _check_rows(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(
            f"{name} must be {like.dtype} {list(like.shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
    if tensor.shape[0] and not tensor[0].is_contiguous():
        raise ValueError(f"{name} must be contiguous but for dim 0, strides {tensor.stride()}")


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_rmsnorm(x, x, weight, eps, out)
    return out


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    _launch_rmsnorm(x, residual, weight, eps, x)


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, out_stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    gate = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + n + cols, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, (silu * up).to(dtype), mask=mask)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"silu_and_mul: x must be [M, 2N], got {list(x.shape)}")
    rows, n = x.shape[0], x.shape[1] // 2
    if out is None:
        out = x.new_empty(rows, n)
    _check_rows("silu_and_mul: x", x, x)
    _check_rows("silu_and_mul: out", out, x[:, :n])
    if out.numel():
        _silu_and_mul_kernel[(rows, triton.cdiv(n, _SILU_BLOCK))](
            x, out, x.stride(0), out.stride(0), n, BLOCK=_SILU_BLOCK
        )
    return out


@triton.jit
def _argmax_kernel(x_ptr, out_ptr, x_stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    lowest = -2147483648
    best = tl.full((BLOCK,), lowest, tl.int32)
    best_at = tl.zeros((BLOCK,), tl.int32) + lanes
    for start in range(0, n, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n, other=0.0).to(tl.float32)
        # Integers in the order of the floats: -0 as 0, NaN above all.
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = tl.where(x == x, key, 0x7FFFFFFF)
        key = tl.where(cols < n, key, lowest)
        best_at = tl.where(key > best, cols, best_at)
        best = tl.maximum(best, key)
    top = tl.max(best, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(best == top, best_at, 2147483647), axis=0))


def argmax_rows(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"argmax_rows: x must be [M, V] with V > 0, got {list(x.shape)}")
    _check_rows("argmax_rows: x", x, x)
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    if x.shape[0]:
        _argmax_kernel[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=_ARGMAX_BLOCK)
    return out


def copy_rows(
    source: torch.Tensor, source_index: torch.Tensor, out: torch.Tensor, out_index: torch.Tensor
) -> None:
    out.index_copy_(0, out_index.long(), source.index_select(0, source_index))

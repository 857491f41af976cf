"""Row-wise ops with SGLang's native semantics, one call each.

Every op takes rows any distance apart (a slice of a wider tensor), contiguous otherwise, in bf16,
fp16 or fp32, and treats each row alone. Rounding happens where the torch-native op rounds.
"""

import importlib
from functools import lru_cache
from types import ModuleType

from torch import Tensor

from sgl_kernel_ext._loader import cpu_module, force_reference
from sgl_kernel_ext.reference import fused as reference

_cpu: ModuleType = cpu_module() or reference


@lru_cache(maxsize=1)
def _cuda() -> ModuleType:
    if force_reference():
        return reference
    return importlib.import_module("sgl_kernel_ext.triton.fused")


def rmsnorm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in fp32, rounded once.

    Source: SGLang ``RMSNorm.forward_native``; bit-equal to it on CPU up to 8192 elements a row
    (beyond, torch sums in another order).

    Args:
        x: ``[M, H]``, or ``[M, heads, H]`` for norms per head.
        weight: ``[H]`` in x's dtype.
        eps: added to the mean square.
        out: where to write, of x's shape; may be x.

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    return (_cuda() if x.is_cuda else _cpu).rmsnorm(x, weight, eps, out)


def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """In place: ``residual = x + residual``, then ``x = rmsnorm`` of the sum before its rounding.

    Source: SGLang ``RMSNorm.forward_native`` with a residual. Shapes as in :func:`rmsnorm`.
    """
    (_cuda() if x.is_cuda else _cpu).fused_add_rmsnorm(x, residual, weight, eps)


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(x[:, :N]) * x[:, N:]`` of ``x [M, 2N]``; silu is rounded to x's dtype first.

    Source: SGLang ``SiluAndMul.forward_native``; on CPU bit-equal to it for every bf16 and fp16
    gate (exhaustive test), within 3e-7 relative in fp32.
    """
    return (_cuda() if x.is_cuda else _cpu).silu_and_mul(x, out)


def rotary(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """Rotates q and k in place; each product and sum is rounded to q's dtype.

    Source: SGLang ``RotaryEmbedding.forward_native``; bit-equal to it.

    Args:
        positions: ``[M]`` int64 or int32 rows of the cache.
        q: ``[M, HQ * head_size]`` or ``[M, HQ, head_size]``.
        k: ``[M, HKV * head_size]`` or ``[M, HKV, head_size]``.
        head_size: elements a head.
        cos_sin_cache: ``[max_position, rotary_dim]``, cosines then sines, fp32 or q's dtype;
            elements of a head beyond ``rotary_dim`` stay as they are.
        is_neox: pairs are ``(i, i + rotary_dim / 2)``; else ``(2i, 2i + 1)``.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: on CPU, a position outside the cache; nothing has been written then.
    """
    (_cuda() if q.is_cuda else _cpu).rotary(positions, q, k, head_size, cos_sin_cache, is_neox)


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, loc: Tensor) -> None:
    """``k_pool[loc] = k`` and ``v_pool[loc] = v``.

    Args:
        k: ``[M, HKV, D]`` or ``[M, HKV * D]`` in the pool's dtype.
        v: likewise.
        k_pool: ``[slots, HKV, D]``.
        v_pool: likewise.
        loc: ``[M]`` int64 or int32 slots. With a slot given twice the row that stays is undefined.

    Raises:
        ValueError: shapes or dtypes do not fit.
        IndexError: on CPU, a slot outside the pool; nothing has been written then.
    """
    (_cuda() if k.is_cuda else _cpu).store_kv(k, v, k_pool, v_pool, loc)


def rope_store_kv(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    k_pool: Tensor,
    v_pool: Tensor,
    loc: Tensor,
) -> None:
    """:func:`rotary` on q and k in place, then :func:`store_kv` of k and v: the same bits."""
    (_cuda() if q.is_cuda else _cpu).rope_store_kv(
        positions, q, k, v, head_size, cos_sin_cache, is_neox, k_pool, v_pool, loc
    )


def copy_rows(source: Tensor, source_index: Tensor, out: Tensor, out_index: Tensor) -> None:
    """``out[out_index] = source[source_index]``, on a CPU by the calling thread alone.

    Args:
        source: ``[S, ...]``.
        source_index: ``[M]`` int64 or int32.
        out: ``[T, ...]``, rows of the same size and dtype as ``source``; written in place.
        out_index: ``[M]``. With a row given twice the one that stays is undefined.

    Raises:
        ValueError: rows do not fit.
        IndexError: on CPU, an index outside; nothing has been written then.
    """
    (_cuda() if source.is_cuda else _cpu).copy_rows(source, source_index, out, out_index)


def argmax_rows(x: Tensor) -> Tensor:
    """``[M]`` int64: the first index of each row's largest value of ``x [M, V]``.

    As ``torch.argmax(x, -1)``: a NaN counts as the largest, and V must be positive.
    """
    return (_cuda() if x.is_cuda else _cpu).argmax_rows(x)

"""The one attention op: ragged groups of rows over lists of KV slots; and scores per key.

Checks the arguments and picks the implementation: C++ for CPU tensors, Triton for CUDA tensors,
otherwise the torch reference (:mod:`sgl_kernel_ext.reference.attention`).
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from sgl_kernel_ext._loader import cpu_module, force_reference
from sgl_kernel_ext.packed import PLAIN, ViewPool, check_packed
from sgl_kernel_ext.reference import attention as reference

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INDEX_DTYPES = (torch.int32, torch.int64)
_MAX_HEAD_DIM = 1024


def ragged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    q_indptr: Tensor,
    req_row: Tensor,
    tail_start: Tensor,
    tail_end: Tensor,
    scale: float,
    *,
    view_indices: Tensor | None = None,
    view_start: Tensor | None = None,
    view_len: Tensor | None = None,
    view_pools: Sequence[ViewPool] = (),
    view_pool: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_list_len: int | None = None,
) -> Tensor:
    """Causal grouped-query attention of a ragged pass over KV slots.

    The R rows of ``q`` come in G groups, one request each: group g owns the n rows
    ``q_indptr[g]:q_indptr[g + 1]``. Its KV list is a view followed by a tail::

        view = view_indices[view_start[g, h] : view_start[g, h] + view_len[g, h]]
        tail = req_to_token[req_row[g], tail_start[g] : tail_end[g]]

    The last n entries of the tail are the rows' own slots: row j of the group sees all of the list
    but its last n - 1 - j entries. That covers plain decoding (n = 1, no view), a draft row (n = 1,
    view and recent tail), a verify (n = k + 1, no view) and prefill (n = chunk length). A view may
    lie in another pool than the tail.

    Row invariance: the bits of a row's output depend on its query and the listed keys and values in
    order, never on n, the other rows or groups, the pools they lie in, or the number of threads.
    Entries a row does not see do not affect it even where they hold NaN.

    Args:
        q: [R, HQ, D] bf16, fp16 or fp32; D contiguous, a multiple of 8, at most 1024.
        k_pool: [slots, HKV, D] in q's dtype, D contiguous; HKV divides HQ.
        v_pool: like k_pool.
        req_to_token: [requests, columns] int32 slots, columns contiguous.
        q_indptr: [G + 1] int32 or int64, rising from 0 to R.
        req_row: [G] int32 or int64 rows of ``req_to_token``.
        tail_start: [G] int32 or int64.
        tail_end: [G] int32 or int64; at least ``tail_start + n``.
        scale: factor of the dot products, usually D ** -0.5.
        view_indices: [entries] int32 slots; None means no group has a view.
        view_start: [G, 1] int64 offsets into view_indices shared by all KV heads, or [G, HKV].
        view_len: int32 like view_start; 0 where a group has no view.
        view_pools: further pools that views may lie in, keys and values each
            [slots of that pool, HKV, D] as k_pool, with strides of their own; or packed ones, as
            :func:`pack_kv` fills them, whose elements are decoded and rounded to q's dtype.
        view_pool: [G] int32, where the view of a group lies: 0 in k_pool and v_pool, i in
            ``view_pools[i - 1]``. None means 0 for all groups.
        out: [R, HQ, D] in q's dtype, D contiguous; allocated when None.
        lse: [R, HQ] fp32, filled with the natural log-sum-exp of the scaled scores when given.
        max_list_len: bound on the entries of a KV list. Sizes the grid on CUDA, where the default
            is all of view_indices and a row of req_to_token; ignored elsewhere.

    Returns:
        ``out``. Accumulation is fp32; with bf16 on CPUs that have a bf16 dot product,
        probabilities are rounded to bf16 before they meet V.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape, layout or device; on CPU
            also, rows, columns or view_pool out of range.
        IndexError: on CPU, a listed slot is outside its pool.
    """
    args = (q, k_pool, v_pool, req_to_token, q_indptr, req_row, tail_start, tail_end)
    check_rows(*args, view_indices, view_start, view_len, view_pools, view_pool)
    if out is not None:
        _check_floats("out", out, q, q.shape)
    if lse is not None:
        if lse.dtype != torch.float32:
            raise TypeError(f"lse: expected torch.float32, got {lse.dtype}")
        _check_layout("lse", lse, q, q.shape[:2])
    if q.is_cpu and (module := cpu_module()) is not None:
        views = (view_indices, view_start, view_len, view_pools, view_pool)
        return module.ragged_attention(*args, scale, *views, out, lse)
    implementation = _implementation(q)
    bound = {} if implementation is reference else {"max_len_hint": max_list_len}
    return implementation.ragged_attention(
        *args,
        scale,
        **bound,
        view_indices=view_indices,
        view_start=view_start,
        view_len=view_len,
        view_pools=view_pools,
        view_pool=view_pool,
        out=out,
        lse=lse,
    )


def key_scores(
    q: Tensor, k_pool: Tensor, slots: Tensor, scale: float, *, causal: bool = True
) -> Tensor:
    """Attention probabilities of the last rows of a request, summed over the rows.

    The observation-window score of SnapKV (https://arxiv.org/abs/2404.14469) before pooling::

        scores[h, t] = sum_j softmax_t(scale * q[j, h] . k[slots[t], h // (HQ / HKV)])

    Args:
        q: [n, HQ, D] bf16, fp16 or fp32; D contiguous, a multiple of 8, at most 1024.
        k_pool: [pool slots, HKV, D] in q's dtype, D contiguous; HKV divides HQ.
        slots: [T] int32, contiguous, T >= n.
        scale: factor of the dot products.
        causal: the rows are the last n of the T keys: row j sees the first T - (n - 1 - j).

    Returns:
        [HQ, T] fp32.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape, layout or device.
        IndexError: on CPU, a slot is outside the pool.
    """
    _check_queries(q)
    _check_pool("k_pool", k_pool, q)
    _check_indices("slots", slots, q, 1, (torch.int32,))
    if len(slots) < max(len(q), 1):
        raise ValueError(f"slots: {len(slots)} keys are fewer than the {len(q)} rows of q")
    if q.is_cpu and (module := cpu_module()) is not None:
        return module.key_scores(q, k_pool, slots, scale, causal)
    return _implementation(q).key_scores(q, k_pool, slots, scale, causal=causal)


def _implementation(q: Tensor) -> ModuleType:
    if q.is_cuda and not force_reference():
        from sgl_kernel_ext.triton import attention

        return attention
    return reference


def check_rows(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    q_indptr: Tensor,
    req_row: Tensor,
    tail_start: Tensor,
    tail_end: Tensor,
    view_indices: Tensor | None,
    view_start: Tensor | None,
    view_len: Tensor | None,
    view_pools: Sequence[ViewPool],
    view_pool: Tensor | None,
) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless :func:`ragged_attention` takes these."""
    _check_queries(q)
    _check_pool("k_pool", k_pool, q)
    _check_pool("v_pool", v_pool, q)
    if v_pool.shape != k_pool.shape:
        raise ValueError(
            f"v_pool: expected the shape of k_pool {tuple(k_pool.shape)}, got {tuple(v_pool.shape)}"
        )
    for i, pool in enumerate(view_pools):
        _check_view_pool(f"view_pools[{i}]", pool, q, k_pool.shape[1])
    _check_indices("req_to_token", req_to_token, q, 2, (torch.int32,))
    _check_indices("req_row", req_row, q, 1, _INDEX_DTYPES)
    groups = len(req_row)
    for name, tensor, length in (
        ("q_indptr", q_indptr, groups + 1),
        ("tail_start", tail_start, groups),
        ("tail_end", tail_end, groups),
    ):
        _check_indices(name, tensor, q, 1, _INDEX_DTYPES)
        if len(tensor) != length:
            raise ValueError(
                f"{name}: expected {length} entries for {groups} groups, got {len(tensor)}"
            )
    if view_indices is not None or view_start is not None or view_len is not None:
        _check_view(q, k_pool.shape[1], groups, view_indices, view_start, view_len)
    if view_pool is not None:
        _check_indices("view_pool", view_pool, q, 1, (torch.int32,))
        if len(view_pool) != groups:
            raise ValueError(f"view_pool: expected {groups} entries, got {len(view_pool)}")


def _check_view_pool(name, pool, q, kv_heads):
    head_dim = q.shape[2]
    (keys, key_codec), _ = pool.parts
    slots = len(keys) * key_codec.tokens
    for part, (tensor, codec) in zip(("keys", "values"), pool.parts, strict=True):
        if codec is PLAIN:
            _check_floats(f"{name} {part}", tensor, q, (slots, kv_heads, head_dim))
        else:
            check_packed(f"{name} {part}", tensor, codec, kv_heads, head_dim)
            shape = (slots // codec.tokens, kv_heads, codec.block_bytes(head_dim))
            _check_layout(f"{name} {part}", tensor, q, shape)


def _check_view(q, kv_heads, groups, indices, start, length):
    if indices is None or start is None or length is None:
        raise ValueError("view_indices, view_start and view_len: give all three or none")
    _check_indices("view_indices", indices, q, 1, (torch.int32,))
    for name, tensor, dtype in (
        ("view_start", start, torch.int64),
        ("view_len", length, torch.int32),
    ):
        _check_indices(name, tensor, q, 2, (dtype,))
        rows, heads = tensor.shape
        if rows != groups or heads not in (1, kv_heads) or tensor.shape != start.shape:
            raise ValueError(
                f"{name}: expected [{groups}, 1] or [{groups}, {kv_heads}], the same for "
                f"view_start and view_len, got {tuple(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous")


def _check_queries(q):
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: expected one of {_DTYPES}, got {q.dtype}")
    if q.dim() != 3:
        raise ValueError(f"q: expected [rows, heads, head_dim], got {tuple(q.shape)}")
    head_dim = q.shape[2]
    if head_dim % 8 or not 0 < head_dim <= _MAX_HEAD_DIM:
        raise ValueError(
            f"q: head_dim must be a multiple of 8 up to {_MAX_HEAD_DIM}, got {head_dim}"
        )
    _check_layout("q", q, q, q.shape)


def _check_pool(name, pool, q):
    if pool.dim() != 3 or not pool.shape[1] or q.shape[1] % pool.shape[1]:
        raise ValueError(
            f"{name}: expected [slots, kv_heads, head_dim] with kv_heads dividing the "
            f"{q.shape[1]} heads of q, got {tuple(pool.shape)}"
        )
    _check_floats(name, pool, q, (pool.shape[0], pool.shape[1], q.shape[2]))


def _check_floats(name, tensor, q, shape):
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name}: expected {q.dtype} like q, got {tensor.dtype}")
    _check_layout(name, tensor, q, shape)


def _check_indices(name, tensor, q, dim, dtypes):
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected one of {dtypes}, got {tensor.dtype}")
    if tensor.dim() != dim:
        raise ValueError(f"{name}: expected {dim} dimensions, got {tuple(tensor.shape)}")
    _check_layout(name, tensor, q, tensor.shape)


def _check_layout(name, tensor, q, shape):
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != q.device:
        raise ValueError(f"{name}: on {tensor.device}, but q is on {q.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name}: the last dimension must be contiguous, strides {tensor.stride()}"
        )

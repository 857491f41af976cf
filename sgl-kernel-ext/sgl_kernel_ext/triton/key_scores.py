"""Attention probabilities per key for CUDA, in Triton; semantics in
:mod:`sgl_kernel_ext.reference.attention`.

Two passes over the keys: the log-sum-exp of each row, then the probabilities summed over the rows
in order. No atomics: the result does not vary from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.triton.tiles import BLOCK_M, LAUNCH, LOG2_E, SPLIT, block_d, block_n


def key_scores(
    q: Tensor, k_pool: Tensor, slots: Tensor, scale: float, *, causal: bool = True
) -> Tensor:
    """See :func:`sgl_kernel_ext.key_scores`. No host synchronisation."""
    rows, heads, head_dim = q.shape
    keys, kv_heads = len(slots), k_pool.shape[1]
    scores = q.new_zeros((heads, keys), dtype=torch.float32)
    if rows == 0:
        return scores
    splits = triton.cdiv(keys, SPLIT)
    split_lse = q.new_empty((rows, heads, splits), dtype=torch.float32)
    args = (q, k_pool, slots, *q.stride()[:2], *k_pool.stride()[:2], scale * LOG2_E, rows, keys)
    sizes = {
        "CAUSAL": causal,
        "D": head_dim,
        "GQA": heads // kv_heads,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": block_n(head_dim, q.dtype),
        "BLOCK_D": block_d(head_dim),
    }
    _split_lse_kernel[(triton.cdiv(rows, BLOCK_M), heads, splits)](
        *args, split_lse, SPLIT=SPLIT, **sizes, **LAUNCH
    )
    lse = split_lse.logsumexp(-1)
    _sum_rows_kernel[(triton.cdiv(keys, sizes["BLOCK_N"]), kv_heads)](
        *args, lse, scores, **sizes, **LAUNCH
    )
    return scores


@triton.jit
def _load_keys(
    k_pool, slots, k_slot, k_head, kv_head, start, keys,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D] keys of the slots from ``start``; zeros past the end."""
    key, d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    slot = tl.load(slots + key, mask=key < keys, other=0).to(tl.int64)
    pointers = k_pool + slot[:, None] * k_slot + kv_head.to(tl.int64) * k_head + d[None, :]
    return tl.load(pointers, mask=(key < keys)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _row_scores(
    q, q_row, q_head, head, first, rows, k, start, keys, scale_log2,
    CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] base-2 scores of the rows from ``first``; -inf where a row sees no key."""
    row, d = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    pointers = q + row.to(tl.int64)[:, None] * q_row + head * q_head + d[None, :]
    queries = tl.load(pointers, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
    seen = keys - rows + 1 + row if CAUSAL else tl.full([BLOCK_M], 0, tl.int32) + keys
    key = start + tl.arange(0, BLOCK_N)
    visible = (key[None, :] < seen[:, None]) & (row < rows)[:, None]
    return tl.where(visible, scores, float("-inf"))


@triton.jit(do_not_specialize=["rows", "keys"])
def _split_lse_kernel(
    q, k_pool, slots, q_row, q_head, k_slot, k_head, scale_log2, rows, keys, split_lse,
    SPLIT: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, GQA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, query head, split): natural log-sum-exp, -inf if none is seen."""
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    split = tl.program_id(2)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, keys), BLOCK_N):
        k = _load_keys(k_pool, slots, k_slot, k_head, head // GQA, start, keys, D, BLOCK_N, BLOCK_D)
        scores = _row_scores(
            q, q_row, q_head, head, first, rows, k, start, keys, scale_log2,
            CAUSAL, D, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
        top = new_top
    row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    pointers = split_lse + (row * tl.num_programs(1) + head) * tl.num_programs(2) + split
    tl.store(pointers, (top + tl.log2(total)) * 0.6931471805599453, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "keys"])
def _sum_rows_kernel(
    q, k_pool, slots, q_row, q_head, k_slot, k_head, scale_log2, rows, keys, lse, out,
    CAUSAL: tl.constexpr, D: tl.constexpr, GQA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (block of keys, KV head): probabilities of the keys summed over the rows."""
    start = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GQA
    k = _load_keys(k_pool, slots, k_slot, k_head, kv_head, start, keys, D, BLOCK_N, BLOCK_D)
    key = start + tl.arange(0, BLOCK_N)
    for i in range(GQA):
        head = kv_head * GQA + i
        total = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, rows, BLOCK_M):
            scores = _row_scores(
                q, q_row, q_head, head, first, rows, k, start, keys, scale_log2,
                CAUSAL, D, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            row = first + tl.arange(0, BLOCK_M)
            row_lse = tl.load(lse + row * heads + head, mask=row < rows, other=0.0)
            total += tl.sum(tl.exp2(scores - row_lse[:, None] * 1.4426950408889634), 0)
        tl.store(out + head.to(tl.int64) * keys + key, total, mask=key < keys)

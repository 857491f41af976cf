"""Softmax states of the rows of a tile: (top, total, acc), base-2 maximum of the scores, sum of the
probabilities relative to it [BLOCK_M] fp32, and their sum with the values [BLOCK_M, BLOCK_D] fp32.

A state without entries, (-inf, 0, 0), and entries that a row does not see change no bit of it.
"""

import triton
import triton.language as tl

from sgl_kernel_ext.triton.pools import load_rows


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def merge_states(top, total, acc, next_top, next_total, next_acc):
    """State of the entries of the first state, then those of the next."""
    new_top = tl.maximum(top, next_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight, next_weight = tl.exp2(top - shift), tl.exp2(next_top - shift)
    acc = acc * weight[:, None] + next_acc * next_weight[:, None]
    return new_top, total * weight + next_total * next_weight, acc


@triton.jit
def attend_block(
    top, total, acc, queries, start, end, seen, view, in_view, tail,
    pool, view_pools, home, kv_head, scale_log2,
    LAYOUTS: tl.constexpr, MASKED: tl.constexpr, HAS_VIEW: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """State of each row after the BLOCK_N list entries from ``start``, those below ``end`` only.

    Entry i is at slot ``view[i]`` if i < in_view, else ``tail[i]``, of ``pool``; those of the view
    are in ``view_pools[home - 1]`` if home > 0 (pools.py). MASKED: row r sees entries below
    ``seen[r]`` only, otherwise all rows see all.
    """
    entry = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    listed = entry < end
    if HAS_VIEW:
        slot = tl.load(view + entry, mask=listed & (entry < in_view), other=0)
        slot += tl.load(tail + entry, mask=listed & (entry >= in_view), other=0)
    else:
        slot = tl.load(tail + entry, mask=listed, other=0)
    slot = slot.to(tl.int64)[:, None]
    loaded = listed[:, None] & (d < D)[None, :]
    viewed = loaded & (entry < in_view)[:, None]
    k, v = load_rows(pool, view_pools, home, kv_head, slot, d, loaded, viewed, LAYOUTS, D)

    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(entry[None, :] < seen[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    probs = tl.exp2(scores - shift[:, None])
    weight = tl.exp2(top - shift)
    total = total * weight + tl.sum(probs, 1)
    acc = acc * weight[:, None]
    probs = probs.to(v.dtype)
    new_acc = tl.dot(probs, v, acc, input_precision="ieee")
    if MASKED:
        finite = tl.abs(new_acc) < float("inf")
        if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
            # A probability of zero does not hide a NaN that only later rows see: a product a row.
            for r in range(BLOCK_M):
                this_row = tl.arange(0, BLOCK_M) == r
                visible = (entry < tl.sum(tl.where(this_row, seen, 0)))[:, None]
                row_v = tl.where(visible, v, 0.0).to(v.dtype)
                row_acc = tl.dot(probs, row_v, acc, input_precision="ieee")
                new_acc = tl.where(this_row[:, None], row_acc, new_acc)
    return new_top, total, new_acc

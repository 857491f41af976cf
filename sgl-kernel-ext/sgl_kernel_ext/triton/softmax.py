"""Softmax states of the rows of a tile: (top, total, acc), base-2 maximum of the scores, sum of the
probabilities relative to it [BLOCK_M] fp32, and their sum with the values [BLOCK_M, BLOCK_D] fp32.

A state without entries, (-inf, 0, 0), and entries that a row does not see change no bit of it.
"""

import triton
import triton.language as tl


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
def pool_of_head(pool, kv_head):
    """Keys, their slot stride, values and theirs, of one KV head.

    Args:
        pool: keys, their slot and head strides, values and theirs.
    """
    k, k_slot, k_head, v, v_slot, v_head = pool
    return k + kv_head * k_head, k_slot.to(tl.int64), v + kv_head * v_head, v_slot.to(tl.int64)


@triton.jit
def attend_block(
    top, total, acc, queries, start, end, seen, view, in_view, tail,
    pool, view_pool, scale_log2,
    MASKED: tl.constexpr, HAS_VIEW: tl.constexpr, ELSEWHERE: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """State of each row after the BLOCK_N list entries from ``start``, those below ``end`` only.

    Entry i is at slot ``view[i]`` if i < in_view, else ``tail[i]``, of ``pool`` (keys, slot stride,
    values, slot stride); ELSEWHERE: those of the view are in ``view_pool``. MASKED: row r sees
    entries below ``seen[r]`` only, otherwise all rows see all.
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
    keys, key_stride, values, value_stride = pool
    k_pointers = keys + slot * key_stride
    v_pointers = values + slot * value_stride
    if ELSEWHERE:
        keys, key_stride, values, value_stride = view_pool
        viewed = (entry < in_view)[:, None]
        k_pointers = tl.where(viewed, keys + slot * key_stride, k_pointers)
        v_pointers = tl.where(viewed, values + slot * value_stride, v_pointers)
    k = tl.load(k_pointers + d[None, :], mask=loaded, other=0.0)
    v = tl.load(v_pointers + d[None, :], mask=loaded, other=0.0)

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
                visible = loaded & (entry < tl.sum(tl.where(this_row, seen, 0)))[:, None]
                row_v = tl.load(v_pointers + d[None, :], mask=visible, other=0.0)
                row_acc = tl.dot(probs, row_v, acc, input_precision="ieee")
                new_acc = tl.where(this_row[:, None], row_acc, new_acc)
    return new_top, total, new_acc

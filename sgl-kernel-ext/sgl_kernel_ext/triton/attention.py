"""The attention op for CUDA, in Triton; semantics in :mod:`sgl_kernel_ext.reference.attention`.

The rows of a group times the query heads of a KV head are cut into tiles of ``BLOCK_M``, the KV
list into splits of ``SPLIT`` entries and those into blocks. The states of the splits (softmax.py)
are merged in order: by a second kernel, or in registers where tiles alone fill the GPU.

Row invariance: all sizes depend on head dimension and dtype only, so a row meets the same keys in
the same blocks whatever else is in the batch, and entries that it does not see change no bit.
Two assumptions about compiler and hardware remain. The tests marked ``cuda`` check both; they have
not run on a GPU yet (run so far: the interpreter, and the compiler for sm_80 and sm_90):

- a row of ``tl.dot`` depends neither on the other rows nor on its place in a tile of fixed shape;
- without contraction (``LAUNCH``), both kernels merge two states to the same bits.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.packed import ViewPool
from sgl_kernel_ext.triton.key_scores import key_scores
from sgl_kernel_ext.triton.pools import pool_arguments, pool_layouts
from sgl_kernel_ext.triton.softmax import attend_block, empty_state, merge_states
from sgl_kernel_ext.triton.tiles import (
    BLOCK_M,
    LAUNCH,
    LOG2_E,
    SPLIT,
    block_d,
    block_n,
    locate_tile,
    tile_rows,
)

__all__ = ["key_scores", "ragged_attention"]

# Merge in registers from this many tiles on, or when the states of the splits would take more.
# Not measured on a GPU; the bits are the same either way.
_IN_ORDER_TILES = 1024
_MAX_STATE_BYTES = 512 << 20
# Columns of a program of the merging kernel.
_MERGE_COLUMNS = 32


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
    max_len_hint: int | None = None,
    in_order: bool | None = None,
) -> Tensor:
    """See :func:`sgl_kernel_ext.ragged_attention`. No host synchronisation; CUDA-graph safe.

    Args:
        max_len_hint: bound on the entries of a KV list, view and tail. Sizes the grid; the default
            is what the shapes allow: columns of ``req_to_token`` plus ``view_indices``.
            Rows of a list with more entries are filled with NaN, unless merged in registers.
        in_order: merge the splits in registers (True) or by a second kernel (False); None decides
            by the number of tiles. The bits are the same.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    rows, heads, head_dim = q.shape
    groups, kv_heads = len(req_row), k_pool.shape[1]
    if rows == 0 or groups == 0:
        return out
    gqa = heads // kv_heads
    tiles = rows * gqa // BLOCK_M + groups
    if max_len_hint is None:
        max_len_hint = req_to_token.shape[1] + (0 if view_indices is None else len(view_indices))
    splits = triton.cdiv(max(max_len_hint, 1), SPLIT)
    if in_order is None:
        state_bytes = rows * heads * splits * (head_dim + 2) * 4
        in_order = tiles * kv_heads >= _IN_ORDER_TILES or state_bytes > _MAX_STATE_BYTES
    states: list[torch.Tensor | None] = [None] * 3
    if not in_order:
        shape = (rows, heads, splits)
        states = [q.new_empty(s, dtype=torch.float32) for s in (shape, shape, (*shape, head_dim))]
    pools = view_pools if view_pool is not None else ()
    view_heads = 0 if view_len is None else view_len.shape[1]
    groups_args = (q_indptr, tail_start, tail_end, view_len)
    out_args = (out, lse, *out.stride()[:2], 0 if lse is None else lse.stride(0))
    sizes = {
        "D": head_dim,
        "GQA": gqa,
        "VIEW_HEADS": view_heads,
        "SPLIT": SPLIT,
        "BLOCK_M": BLOCK_M,
    }
    _attend_kernel[(tiles, kv_heads, 1 if in_order else splits)](
        *groups_args, *states, *out_args, groups, splits,
        q, pool_arguments(k_pool, v_pool), req_to_token, req_row, view_indices, view_start,
        tuple(pool_arguments(pool.keys, pool.values) for pool in pools), view_pool,
        *q.stride()[:2], req_to_token.stride(0), scale * LOG2_E,
        LAYOUTS=tuple(pool_layouts(pool, head_dim) for pool in pools),
        IN_ORDER=in_order, BLOCK_N=block_n(head_dim, q.dtype), BLOCK_D=block_d(head_dim),
        **sizes, **LAUNCH,
    )  # fmt: skip
    if not in_order:
        columns = min(_MERGE_COLUMNS, block_d(head_dim))
        _merge_kernel[(tiles, kv_heads, triton.cdiv(head_dim, columns))](
            *groups_args, *states, *out_args, groups, splits, BLOCK_D=columns, **sizes, **LAUNCH
        )
    return out


@triton.jit
def _store_rows(
    out, lse, out_row, out_head, lse_row, mask, row, head, d, top, total, acc, D: tl.constexpr
):
    pointers = out + row[:, None] * out_row + head[:, None] * out_head + d[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(pointers, result, mask=mask[:, None] & (d < D)[None, :])
    if lse is not None:
        # ln 2: scores are in base 2.
        natural = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + row * lse_row + head, natural, mask=mask)


@triton.jit(do_not_specialize=["groups", "splits"])
def _attend_kernel(
    q_indptr, tail_start, tail_end, view_len, state_top, state_total, state_acc,
    out, lse, out_row, out_head, lse_row, groups, splits,
    q, pool, req_to_token, req_row, view_indices, view_start, view_pools, view_pool,
    q_row, q_head, table_row, scale_log2,
    LAYOUTS: tl.constexpr, IN_ORDER: tl.constexpr, D: tl.constexpr, GQA: tl.constexpr,
    VIEW_HEADS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, split): the state of the split for each row of the tile.
    IN_ORDER, program (tile, KV head): the states of all splits, merged, and the output."""
    group, first_row, rows, first, length, in_view = locate_tile(
        q_indptr, tail_start, tail_end, view_len, groups, GQA, VIEW_HEADS, BLOCK_M
    )
    mask, row, head, seen, all_see, any_sees = tile_rows(
        first_row, rows, first, length, GQA, BLOCK_M
    )
    first_split = tl.program_id(2)
    end_split = tl.cdiv(any_sees, SPLIT)
    if (first >= rows * GQA) | (first_split >= end_split):
        return
    if not IN_ORDER:
        end_split = first_split + 1

    kv_head = tl.program_id(1).to(tl.int64)
    tail = req_to_token + tl.load(req_row + group).to(tl.int64) * table_row
    tail += tl.load(tail_start + group).to(tl.int64) - in_view
    view = view_indices
    home = 0
    if len(LAYOUTS) > 0:
        home = tl.load(view_pool + group)
    if VIEW_HEADS > 0:
        view += tl.load(view_start + group * VIEW_HEADS + kv_head % VIEW_HEADS)
    d = tl.arange(0, BLOCK_D)
    in_head = mask[:, None] & (d < D)[None, :]
    q_pointers = q + row[:, None] * q_row + head[:, None] * q_head + d[None, :]
    queries = tl.load(q_pointers, mask=in_head, other=0.0)

    top, total, acc = empty_state(BLOCK_M, BLOCK_D)
    for split in range(first_split, end_split):
        start = split * SPLIT
        end = tl.minimum(start + SPLIT, any_sees)
        masked_start = start + tl.maximum(tl.minimum(end, all_see) - start, 0) // BLOCK_N * BLOCK_N
        s_top, s_total, s_acc = empty_state(BLOCK_M, BLOCK_D)
        for block in range(start, masked_start, BLOCK_N):
            s_top, s_total, s_acc = attend_block(
                s_top, s_total, s_acc, queries, block, end, seen, view, in_view, tail,
                pool, view_pools, home, kv_head, scale_log2,
                LAYOUTS, False, VIEW_HEADS > 0, D, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        for block in range(masked_start, end, BLOCK_N):
            s_top, s_total, s_acc = attend_block(
                s_top, s_total, s_acc, queries, block, end, seen, view, in_view, tail,
                pool, view_pools, home, kv_head, scale_log2,
                LAYOUTS, True, VIEW_HEADS > 0, D, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        if IN_ORDER:
            top, total, acc = merge_states(top, total, acc, s_top, s_total, s_acc)
        else:
            state = (row * (tl.num_programs(1) * GQA) + head) * splits + split
            tl.store(state_top + state, s_top, mask=mask)
            tl.store(state_total + state, s_total, mask=mask)
            tl.store(state_acc + state[:, None] * D + d[None, :], s_acc, mask=in_head)
    if IN_ORDER:
        _store_rows(out, lse, out_row, out_head, lse_row, mask, row, head, d, top, total, acc, D)


@triton.jit(do_not_specialize=["groups", "splits"])
def _merge_kernel(
    q_indptr, tail_start, tail_end, view_len, state_top, state_total, state_acc,
    out, lse, out_row, out_head, lse_row, groups, splits,
    D: tl.constexpr, GQA: tl.constexpr, VIEW_HEADS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, columns): merges the states of the splits; the output."""
    _, first_row, rows, first, length, _ = locate_tile(
        q_indptr, tail_start, tail_end, view_len, groups, GQA, VIEW_HEADS, BLOCK_M
    )
    if first >= rows * GQA:
        return
    mask, row, head, _, _, any_sees = tile_rows(first_row, rows, first, length, GQA, BLOCK_M)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    top, total, acc = empty_state(BLOCK_M, BLOCK_D)
    first_state = (row * (tl.num_programs(1) * GQA) + head) * splits
    for split in range(0, tl.minimum(tl.cdiv(any_sees, SPLIT), splits)):
        state = first_state + split
        s_top = tl.load(state_top + state, mask=mask, other=0.0)
        s_total = tl.load(state_total + state, mask=mask, other=1.0)
        in_head = mask[:, None] & (d < D)[None, :]
        s_acc = tl.load(state_acc + state[:, None] * D + d[None, :], mask=in_head, other=0.0)
        top, total, acc = merge_states(top, total, acc, s_top, s_total, s_acc)
    if any_sees > splits * SPLIT:
        total += float("nan")
    _store_rows(out, lse, out_row, out_head, lse_row, mask, row, head, d, top, total, acc, D)

"""What the attention ops compute, in plain torch: any device, float32, one row at a time.

A row is computed from its own query and list alone, so the reference is row-invariant too.
Arguments are described and checked in :mod:`sgl_kernel_ext.attention`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_kernel_ext.packed import PLAIN, Codec, ViewPool
from sgl_kernel_ext.reference.packed import unpack


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
) -> Tensor:
    """See :func:`sgl_kernel_ext.ragged_attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    kv_heads = k_pool.shape[1]
    gqa = q.shape[1] // kv_heads
    indptr = q_indptr.tolist()
    pools = [ViewPool(k_pool, v_pool), *view_pools]
    homes = [0] * len(req_row) if view_pool is None else view_pool.tolist()
    bounds = zip(req_row.tolist(), tail_start.tolist(), tail_end.tolist(), strict=True)
    for group, (table_row, start, end) in enumerate(bounds):
        tail = req_to_token[table_row, start:end].long()
        first_row, last_row = indptr[group], indptr[group + 1] - 1
        for head in range(kv_heads):
            view = tail[:0]
            if view_indices is not None:
                assert view_start is not None and view_len is not None
                column = head if view_len.shape[1] > 1 else 0
                begin = view_start[group, column]
                view = view_indices[begin : begin + view_len[group, column]].long()
            keys, values = (
                torch.cat([_rows(*elsewhere, view, head, q), pool[tail, head]]).float()
                for elsewhere, pool in zip(pools[homes[group]].parts, (k_pool, v_pool), strict=True)
            )
            heads = slice(head * gqa, (head + 1) * gqa)
            for row in range(first_row, last_row + 1):
                visible = len(keys) - (last_row - row)
                scores = q[row, heads].float() @ keys[:visible].T * scale
                out[row, heads] = (scores.softmax(-1) @ values[:visible]).to(out.dtype)
                if lse is not None:
                    lse[row, heads] = scores.logsumexp(-1)
    return out


def _rows(pool: Tensor, codec: Codec, slots: Tensor, head: int, q: Tensor) -> Tensor:
    """``[n, D]`` in q's dtype, unpacked if need be."""
    if codec is PLAIN:
        return pool[slots, head]
    blocks, place = (slots // codec.tokens).unique(return_inverse=True)
    rows = unpack(pool[blocks, head], q.shape[2], codec).to(q.dtype)
    return rows[place * codec.tokens + slots % codec.tokens]


def key_scores(
    q: Tensor, k_pool: Tensor, slots: Tensor, scale: float, *, causal: bool = True
) -> Tensor:
    """See :func:`sgl_kernel_ext.key_scores`."""
    rows, heads, _ = q.shape
    kv_heads = k_pool.shape[1]
    keys = k_pool[slots.long()].float().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("nhd,thd->hnt", q.float(), keys) * scale
    if causal:
        position = torch.arange(len(slots), device=q.device)
        last_seen = len(slots) - rows + torch.arange(rows, device=q.device)
        scores.masked_fill_(position > last_seen[:, None], float("-inf"))
    return scores.softmax(-1).sum(1)

"""Which rows a forward pass has and what each may attend to: the kernel's arguments, once a pass.

Every pass is the same to the kernel: groups of rows (one group per request), each with a list of
KV slots made of an optional draft view and a run of the request's own row of ``req_to_token``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class ViewLists:
    """Draft views of one pass, for all layers.

    Attributes:
        indices: flat int32 KV slots of all views.
        start: int64 ``[L, G, Hv]`` offsets into ``indices``.
        length: int32 ``[L, G, Hv]``; 0 for groups that read their full KV off ``req_to_token``.
        longest: bound on the lengths.
        pool: int32 ``[G]``, which pool the slots of a group are in: 0 the device's own, else the
            number that the backend's ``add_view_pool`` gave. None: all in the device's own.
    """

    indices: Tensor
    start: Tensor
    length: Tensor
    longest: int
    pool: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Arguments of ``ragged_attention`` that all layers share.

    Attributes:
        q_indptr: int32 ``[G + 1]``, rows of group g are ``q_indptr[g]:q_indptr[g + 1]``.
        req_row: int32 ``[G]``, row of ``req_to_token``.
        tail_start, tail_end: int32 ``[G]``, the run of that row that the last row of the group
            sees; each earlier row sees one token less.
        views: draft views, or None if every group reads its full KV.
        captured: rows whose queries are kept for compression, int64, or None.
        table: int32 ``[requests, columns]`` to read instead of ``req_to_token``.
        longest: bound on the lengths of the runs, from the host; None: a row of the table.
    """

    q_indptr: Tensor
    req_row: Tensor
    tail_start: Tensor
    tail_end: Tensor
    views: ViewLists | None = None
    captured: Tensor | None = None
    table: Tensor | None = None
    longest: int | None = None


def full_rows(forward_batch: ForwardBatch) -> Rows:
    """Rows of a stock decode or extend pass: every group reads its full KV."""
    tail_end = forward_batch.seq_lens.to(torch.int32)
    groups = tail_end.shape[0]
    q_indptr = torch.zeros(groups + 1, dtype=torch.int32, device=tail_end.device)
    if forward_batch.forward_mode.is_decode():
        torch.arange(groups + 1, dtype=torch.int32, out=q_indptr)
    else:
        torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=q_indptr[1:])
    lens = forward_batch.seq_lens_cpu
    return Rows(
        q_indptr=q_indptr,
        req_row=forward_batch.req_pool_indices.to(torch.int32),
        tail_start=torch.zeros_like(tail_end),
        tail_end=tail_end,
        longest=None if lens is None else int(lens.max()),
    )


def last_rows(lens: list[int], window: int) -> Tensor:
    """Indices of the last ``min(n, window)`` rows of each group of ``lens[g] = n`` rows, int64."""
    picked: list[int] = []
    end = 0
    for n in lens:
        end += n
        picked.extend(range(end - min(n, window), end))
    return torch.tensor(picked, dtype=torch.int64)

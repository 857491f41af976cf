"""One ragged pass: from what every request does to the rows of the model's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_vericache.attention.rows import Rows
from sglang_vericache.core import Action
from sglang_vericache.mem_cache.views import ViewStore
from sglang_vericache.sampling.settle import RowLayout
from sglang_vericache.speculative.ragged_input import RaggedInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_vericache.speculative.state import RequestState


@dataclass(frozen=True)
class RaggedPass:
    """Rows of one pass over a decode batch.

    A drafting request brings one row that reads its view; a verifying request brings its last
    committed token and its drafts, which read its full KV.

    Attributes:
        states, actions: the requests and what each does.
        lens: rows of each request.
        input_ids, positions: int64 ``[R]``.
        layout: what settling needs to know about the rows.
    """

    states: Sequence[RequestState]
    actions: Sequence[Action]
    lens: list[int]
    input_ids: Tensor
    positions: Tensor
    layout: RowLayout

    @classmethod
    def build(cls, states: Sequence[RequestState], actions: Sequence[Action]) -> RaggedPass:
        input_ids: list[int] = []
        positions: list[int] = []
        depth: list[int] = []
        lens: list[int] = []
        for state, action in zip(states, actions, strict=True):
            drafts, committed = state.drafts, state.req.kv.kv_committed_len
            first = 0 if action is Action.VERIFY else len(drafts)
            tokens = [state.req.output_ids[-1], *drafts]
            input_ids.extend(tokens[first:])
            depth.extend(range(first, len(tokens)))
            positions.extend(range(committed + first, committed + len(tokens)))
            lens.append(len(tokens) - first)
        repeats = torch.tensor(lens)
        where = torch.tensor(positions)
        layout = RowLayout(
            req_index=torch.repeat_interleave(torch.arange(len(lens)), repeats),
            depth=torch.tensor(depth),
            positions=where,
            drafts=[state.drafts for state in states],
            verifying=[
                action is Action.VERIFY or state.unverified
                for state, action in zip(states, actions, strict=True)
            ],
        )
        return cls(states, actions, lens, torch.tensor(input_ids), where, layout)

    def place(self, batch: ScheduleBatch, store: ViewStore, slots: int, capture: Tensor | None) -> None:
        """Turn the decode batch into this pass: the scheduler restores it afterwards.

        Args:
            batch: the scheduler's batch, in decode mode.
            store: filed draft views.
            slots: KV slots reserved per request and iteration.
            capture: rows whose queries the attention backend keeps, or None.
        """
        device = batch.device
        req_row = batch.req_pool_indices
        lens = torch.tensor(self.lens, dtype=torch.int32)
        q_indptr = torch.zeros(len(self.lens) + 1, dtype=torch.int32)
        torch.cumsum(lens, 0, dtype=torch.int32, out=q_indptr[1:])
        ends = self.positions[q_indptr[1:].long() - 1] + 1
        starts = torch.zeros(len(self.lens), dtype=torch.int32)
        drafting = torch.zeros(len(self.lens), dtype=torch.int32)
        for i, (state, action) in enumerate(zip(self.states, self.actions, strict=True)):
            if action is Action.DRAFT and state.view_length:
                starts[i] = state.view_length
                drafting[i] = 1
        rows = Rows(
            q_indptr=q_indptr.to(device),
            req_row=req_row.to(torch.int32),
            tail_start=starts.to(device),
            tail_end=ends.to(device, torch.int32),
            views=store.lists(req_row, drafting.to(device)) if bool(drafting.any()) else None,
            captured=capture,
        )
        positions = self.positions.to(device)
        table = batch.req_to_token_pool.req_to_token
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = self.input_ids.to(device)
        batch.out_cache_loc = table[req_row[self.layout.req_index], positions].long()
        batch.spec_info = RaggedInput(slots, positions, rows)

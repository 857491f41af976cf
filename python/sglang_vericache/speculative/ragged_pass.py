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

    A drafting request brings its latest token and its probes, which read its view; a verifying
    request brings its last committed token and its drafts, which read its full KV, on the device or
    in host memory.

    Attributes:
        states, actions: the requests and what each does.
        captures: whose queries are kept, one entry a request.
        layout: what settling needs to know about the rows.
        input_ids: int64 ``[R]``.
        rows: the kernel's arguments.
    """

    states: Sequence[RequestState]
    actions: Sequence[Action]
    captures: Sequence[bool]
    layout: RowLayout
    input_ids: Tensor
    rows: Rows

    @classmethod
    def build(
        cls,
        states: Sequence[RequestState],
        actions: Sequence[Action],
        captures: Sequence[bool],
        req_row: Tensor,
        store: ViewStore,
        on_host: Sequence[bool] = (),
    ) -> RaggedPass:
        """Lay out the rows.

        Args:
            req_row: int64 ``[G]``, the requests' rows of ``req_to_token``.
            captures: whose queries to keep for the next compression; of verifying requests only.
            store: filed draft views.
            on_host: whose full KV is read in host memory; empty: nobody's.
        """
        device = req_row.device
        verifies = [action is Action.VERIFY for action in actions]
        layout = RowLayout.build(
            drafts=[state.drafts for state in states],
            verifying=[v or s.unverified for v, s in zip(verifies, states, strict=True)],
            committed_lens=[state.committed for state in states],
            device=device,
            probes=[[] if v else s.probes for v, s in zip(verifies, states, strict=True)],
        )
        tokens: list[int] = []
        captured: list[int] = []
        heads, tail_start, tail_end = [0], [], []
        drafting: list[int] = []
        for state, verify in zip(states, verifies, strict=True):
            sequence = [state.req.output_ids[-1], *state.drafts]
            tokens.extend(sequence if verify else [sequence[-1], *state.probes])
            if captures[len(heads) - 1]:
                captured.extend(range(heads[-1], len(tokens)))
            heads.append(len(tokens))
            reads_view = not verify and state.view_length > 0
            reads_host = bool(on_host) and on_host[len(drafting)]
            drafting.append(int(reads_view))
            tail_start.append(
                state.view_length if reads_view else state.published if reads_host else 0
            )
            tail_end.append(state.committed + len(sequence) + (0 if verify else len(state.probes)))
        columns = [tail_start, tail_end, drafting, *([list(on_host)] if any(on_host) else [])]
        groups = torch.tensor(columns, dtype=torch.int32).to(device)
        hosts = groups[3] if any(on_host) else None
        rows = Rows(
            q_indptr=torch.tensor(heads, dtype=torch.int32).to(device),
            req_row=req_row.to(torch.int32),
            tail_start=groups[0],
            tail_end=groups[1],
            views=store.lists(req_row, groups[2], hosts)
            if any(drafting) or hosts is not None
            else None,
            captured=torch.tensor(captured).to(device) if captured else None,
            longest=max(end - start for start, end in zip(tail_start, tail_end, strict=True)),
        )
        return cls(states, actions, captures, layout, torch.tensor(tokens).to(device), rows)

    def place(self, batch: ScheduleBatch, slots: int) -> None:
        """Turn the decode batch into this pass; the scheduler restores it afterwards."""
        layout, table = self.layout, batch.req_to_token_pool.req_to_token
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = self.input_ids
        batch.out_cache_loc = table[
            batch.req_pool_indices[layout.req_index], layout.positions
        ].long()
        batch.spec_info = RaggedInput(slots, layout.positions, self.rows)

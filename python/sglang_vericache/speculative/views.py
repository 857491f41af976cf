"""Chooses draft views: calls the compressor on the KV pool and files the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sgl_kernel_ext import key_scores
from sglang_vericache.compressors import LayerContext, Rotary, before, compress, create
from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.views import ViewStore, gather_listed
from sglang_vericache.speculative.packed_views import PackedViews

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor, nn

    from sglang_vericache.speculative.state import RequestState


logger = logging.getLogger(__name__)
# As ``RequestState.chosen_at``: stale from the start.
NEVER = -(2**62)


class ViewChooser:
    """Compresses requests of one model; ``store`` holds the views it filed, ``packed`` the copies
    that those of quantizing methods read."""

    def __init__(self, model_runner: ModelRunner, config: VeriCacheConfig):
        self.pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.num_layers = self.pool.layer_num
        keys = self.pool.get_key_buffer(self.pool.start_layer)
        self.num_kv_heads, head_dim = keys.shape[1:]
        self.scale = head_dim**-0.5
        self.bytes_per_key = self.num_layers * 2 * keys[0].nbytes
        self._offloads = config.offloads
        self._rotary = _rotary_of(model_runner.model)
        settings = config.compressor_settings
        if settings.calibration is not None:
            settings.calibration.check(
                self.num_layers, model_runner.model_config.num_attention_heads
            )
        dropper = create(config.compressor, settings)
        rows, width = self.req_to_token.shape
        longest = dropper.longest(width, self.num_kv_heads, settings.budget)
        self.store = ViewStore(
            rows=rows,
            layers=self.num_layers,
            heads=1,
            capacity=longest if dropper.drops else settings.budget.tokens(width),
            device=self.req_to_token.device,
            width=width if config.offloads else 0,
        )
        tokens = config.packed_tokens or self.pool.size
        add_view_pool = model_runner.attn_backend.add_view_pool
        self.packed = PackedViews(self.pool, self.store, tokens, add_view_pool)
        if dropper.codec:
            self.packed.pool(dropper.codec)

    def choose(self, state: RequestState) -> DraftView | None:
        """Choose and file the view of a request from its committed KV.

        The view is everything where the queries that the method needs are missing, until the first
        verify pass brings some; where a packed copy finds no room, and the request is ``barred``;
        and where the method fails or finds no memory, and the request drafts no more.

        Returns:
            What was filed; None if drafts read the full KV.
        """
        self.packed.release(state)
        state.view_length, state.view_kept, state.view_share = 0, 0.0, 1.0
        length = state.req.kv.kv_committed_len
        if state.dropper.query_rows and not state.queries:
            state.has_view, state.chosen_at = True, NEVER
            return None
        slots = self.req_to_token[state.row, :length]
        state.has_view, state.chosen_at = True, length
        # A method, or the memory it takes, costs its request the drafts, not everybody the server.
        try:
            view = compress(state.dropper, self._layers(state, slots), state.settings.budget)
        except Exception:
            self._give_up(state)
            return None
        try:
            return self._file(state, view, slots)
        except torch.OutOfMemoryError:
            self._give_up(state)
            return None

    def _give_up(self, state: RequestState) -> None:
        logger.exception("%s: no view, %s decodes plainly", state.compressor, state.req.rid)
        state.limit = 0

    def _file(self, state: RequestState, view: DraftView, slots: Tensor) -> DraftView | None:
        """See ``choose``."""
        state.rounds = state.view_drafted = state.view_accepted = 0
        if state.dropper.per_head:
            self.store.widen(self.num_kv_heads)
        if codec := state.dropper.codec:
            # What is not packed has to stay on the device.
            if state.dropper.residual and not self._offloads:
                view = before(view, max(0, len(slots) - state.dropper.residual))
                if view.length == 0:
                    state.barred = 0
                    return None
            state.barred = 0 if self.packed.file(state, view, slots) else max(view.kept)
            if state.barred:
                return None
            state.view_share = self.packed.pool(codec).token_bytes / self.bytes_per_key
        elif view.is_full:
            return None
        else:
            self.store.put(state.row, view, slots)
        state.view_length, state.view_kept = view.length, view.mean_kept
        return view

    def listed(self, state: RequestState, view: DraftView) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values that a view of a request lists, on the host, as drafts read them.

        Returns:
            Per layer ``[Hv, n, W]``, rows as in ``CompressedCopy``.
        """
        slots = self.req_to_token[state.row]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer, positions in enumerate(view.layers):
            buffers: Sequence[Tensor]
            if self.packed.holds(state):
                buffers, packed = self.packed.listed(state, layer)
                lists = packed[: positions.shape[1]].long().expand(len(positions), -1)
            else:
                buffers = self.pool.get_kv_buffer(self.pool.start_layer + layer)
                lists = slots[positions.long()].long()
            for buffer, rows in zip(buffers, (keys, values), strict=True):
                listed = gather_listed(buffer, lists)
                by_list = listed.flatten(1)[None] if len(lists) == 1 else listed.transpose(0, 1)
                rows.append(by_list.cpu())
        return keys, values

    def _layers(self, state: RequestState, slots: Tensor) -> Iterator[LayerContext]:
        queries = positions = None
        if rows := min(state.dropper.query_rows, len(slots)):
            queries, positions = state.queries.last(rows)
        rope = self._rotary
        rotary = None if rope is None else Rotary(rope.cos_sin_cache, rope.is_neox_style)
        for layer in range(self.num_layers):
            keys, values = self.pool.get_kv_buffer(self.pool.start_layer + layer)
            yield LayerContext(
                layer=layer,
                num_layers=self.num_layers,
                length=slots.shape[0],
                num_kv_heads=self.num_kv_heads,
                queries=keys.new_empty(0) if queries is None else queries[layer],
                gather_keys=partial(keys.index_select, 0, slots),
                gather_values=partial(values.index_select, 0, slots),
                key_scores=partial(key_scores, k_pool=keys, slots=slots, scale=self.scale),
                query_positions=positions,
                rotary=rotary,
            )


def _rotary_of(model: nn.Module) -> Any:
    """The model's rotary embedding, or None; its table may grow and is so read when needed."""
    found = (m for m in model.modules() if hasattr(m, "cos_sin_cache"))
    return next(found, None)

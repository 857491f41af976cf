"""SGLang attention backend ``vericache``: hands every pass to the one ragged attention op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool
from torch import Tensor

from sgl_kernel_ext import DecoderRows, ViewPool, ragged_attention, store_kv
from sglang_vericache.attention.rows import Rows, full_rows, last_rows

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "vericache"


class VeriCacheAttentionBackend(AttentionBackend):
    """Serves decode, extend and ragged draft/verify passes; results do not depend on the batch.

    A ragged pass brings its ``Rows`` in ``forward_batch.spec_info.rows``. When ``query_window`` is
    set, the queries of the last rows of each prompt are kept per layer until ``take_queries``.
    """

    def __init__(self, model_runner: ModelRunner):
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.pool = supported_pool(model_runner)
        self.query_window = 0
        # By layer, pools that views may lie in besides the KV pool.
        self.view_pools: list[list[ViewPool]] = [[] for _ in range(self.pool.layer_num)]
        self.rows: Rows | None = None
        self._queries: list[Tensor] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        self._queries = []
        if mode.is_idle():
            return
        if mode.is_target_verify():
            self.rows = forward_batch.spec_info.rows
            return
        rows = full_rows(forward_batch)
        if self.query_window and mode.is_extend():
            captured = last_rows(forward_batch.extend_seq_lens_cpu, self.query_window)
            rows = replace(rows, captured=captured.to(rows.tail_end.device))
        self.rows = rows

    def add_view_pool(self, layers: Sequence[ViewPool]) -> int:
        """Let views lie in another pool, of which each layer has a part.

        Returns:
            Its number in ``ViewLists.pool``.
        """
        for pools, layer in zip(self.view_pools, layers, strict=True):
            pools.append(layer)
        return len(self.view_pools[0])

    def decoder_rows(self) -> DecoderRows:
        """The rows of this pass for ``sgl_kernel_ext.Decoder``."""
        rows = self.rows
        assert rows is not None
        views = rows.views
        return DecoderRows(
            req_to_token=self.req_to_token if rows.table is None else rows.table,
            q_indptr=rows.q_indptr,
            req_row=rows.req_row,
            tail_start=rows.tail_start,
            tail_end=rows.tail_end,
            view_indices=None if views is None else views.indices,
            view_start=None if views is None else views.start,
            view_len=None if views is None else views.length,
            view_pools=() if views is None or views.pool is None else self.view_pools,
            view_pool=None if views is None else views.pool,
            captured=rows.captured,
        )

    def wait_for_kv(self) -> None:
        """Wait until all layers' KV that this pass loads from the host is there.

        For a pass that does not ask the pool for the buffers of one layer after the other.
        """
        counter = self.pool.layer_transfer_counter
        if counter is not None:
            counter.wait_until(counter.num_layers - 1)

    def keep_queries(self, queries: list[Tensor]) -> None:
        """Keep captured queries, ``[n, HQ, D]`` for each layer, for ``take_queries``."""
        self._queries = queries

    def take_queries(self) -> Tensor | None:
        """Captured queries of the last pass, ``[L, rows, HQ, D]``, or None; forgets them."""
        queries, self._queries = self._queries, []
        return torch.stack(queries) if queries else None

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of one layer; ``q`` is ``[R, HQ * D]``, as is the result."""
        check_supported(layer)
        k_pool, v_pool = self.pool.get_kv_buffer(layer.layer_id)
        if save_kv_cache and k is not None and v is not None:
            store_kv(k, v, k_pool, v_pool, forward_batch.out_cache_loc)
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = self.attend(q, k_pool, v_pool, layer.layer_id, layer.scaling)
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    forward_decode = forward_extend

    def attend(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, layer_id: int, scale: float
    ) -> Tensor:
        """Run the op on ``q`` ``[R, HQ, D]`` with the rows of this pass."""
        rows = self.rows
        assert rows is not None
        if rows.captured is not None:
            self._queries.append(q.index_select(0, rows.captured))
        views = rows.views
        table = self.req_to_token if rows.table is None else rows.table
        longest = table.shape[1] if rows.longest is None else rows.longest
        indices = start = length = pool = None
        pools: list[ViewPool] = []
        if views is not None:
            indices, start, length = views.indices, views.start[layer_id], views.length[layer_id]
            longest += views.longest
            if (pool := views.pool) is not None:
                pools = self.view_pools[layer_id]
        return ragged_attention(
            q,
            k_pool,
            v_pool,
            table,
            rows.q_indptr,
            rows.req_row,
            rows.tail_start,
            rows.tail_end,
            scale,
            view_indices=indices,
            view_start=start,
            view_len=length,
            view_pools=pools,
            view_pool=pool,
            max_list_len=longest,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return self.req_to_token.is_cuda


def supported_pool(model_runner: ModelRunner) -> KVCache:
    """The runner's KV pool.

    Raises:
        ValueError: it is not one of keys and values per head in the model's dtype.
    """
    pool = model_runner.token_to_kv_pool
    if type(pool) is not MHATokenToKVPool:
        raise ValueError(
            f"VeriCache does not support this model yet, whose KV is in a {type(pool).__name__} "
            "(MLA, sliding window and state-space layers are not supported)"
        )
    if pool.dtype != model_runner.dtype or pool.is_quantized_kv_cache:
        raise ValueError(
            f"--kv-cache-dtype: VeriCache reads KV in the model's dtype, {model_runner.dtype}, "
            f"not {pool.dtype}"
        )
    return pool


def check_supported(layer: RadixAttention) -> None:
    """Raise ``ValueError`` for attention that the op does not compute."""
    if (
        layer.is_cross_attention
        or layer.attn_type != AttentionType.DECODER
        or (layer.sliding_window_size or -1) > -1
        or layer.logit_cap
        or layer.qk_head_dim != layer.v_head_dim
    ):
        raise ValueError(
            "--attention-backend vericache supports causal attention with equal key and value "
            "sizes only: no cross attention, sliding window, logit cap or MLA"
        )


def register_backend() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        # Its results do not depend on the batch, nor on what the radix tree held.
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(VeriCacheAttentionBackend)

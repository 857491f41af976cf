"""One compact forward pass for Llama models on a CPU.

SGLang's layer stack serves every parallelism and quantisation; on a CPU its Python costs more time
per decode step than the kernels. This pass runs the same kernels in the same order, all layers in
one call of ``sgl_kernel_ext.Decoder``, so its results equal those of the swapped layers bit for bit
(tested).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel
from torch import Tensor

from sgl_kernel_ext import Decoder, DecoderLayer, DecoderShape, PackedWeight

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_vericache.attention.backend import VeriCacheAttentionBackend


def supports(model: Any) -> bool:
    """Whether ``model`` is a plain Llama on one CPU rank."""
    from sglang.srt.runtime_context import get_parallel

    return (
        type(model) is LlamaForCausalLM
        and type(model.model) is LlamaModel
        and get_parallel().tp_size == 1
        and type(model.model.layers[0].self_attn.rotary_emb) is RotaryEmbedding
    )


def install(model: Any, backend: Callable[[], VeriCacheAttentionBackend]) -> None:
    """Replace the decoder's forward of this instance.

    Args:
        model: loaded, with its linear layers already swapped (``layers.install``).
        backend: returns the attention backend, which exists only after loading.
    """
    stack = model.model
    first = stack.layers[0].self_attn
    rope = first.rotary_emb
    shape = DecoderShape(
        heads=first.num_heads,
        kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        scale=first.attn.scaling,
        eps=stack.norm.variance_epsilon,
        is_neox=rope.is_neox_style,
    )
    stock = stack.forward

    @functools.cache
    def decoder() -> Decoder:
        pool = backend().pool
        layers = [_layer(layer, pool) for layer in stack.layers]
        return Decoder(shape, layers, stack.norm.weight.data, rope.cos_sin_cache)

    def forward(
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Tensor:
        if forward_batch.forward_mode.is_idle() or stack.layers_to_capture:
            return stock(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        hidden = stack.embed_tokens(input_ids) if input_embeds is None else input_embeds.clone()
        attention = backend()
        attention.wait_for_kv()
        hidden, queries = decoder().forward(
            hidden, positions, forward_batch.out_cache_loc, attention.decoder_rows()
        )
        attention.keep_queries(queries)
        return hidden

    stack.forward = forward


def _layer(layer: Any, pool: KVCache) -> DecoderLayer:
    k_pool, v_pool = pool.get_kv_buffer(layer.self_attn.attn.layer_id)
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight.data,
        post_norm=layer.post_attention_layernorm.weight.data,
        qkv=_packed(layer.self_attn.qkv_proj),
        out=_packed(layer.self_attn.o_proj),
        gate_up=_packed(layer.mlp.gate_up_proj),
        down=_packed(layer.mlp.down_proj),
        k_pool=k_pool,
        v_pool=v_pool,
    )


def _packed(layer: Any) -> PackedWeight:
    return replace(layer.quant_method.packed, bias=layer.bias)

"""One compact forward pass for Llama models on a CPU.

SGLang's layer stack serves every parallelism and quantisation; on a CPU its Python costs more time
per decode step than the kernels. This pass calls the same kernels in the same order on plain
tensors, so its results equal those of the swapped layers bit for bit (tested).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel
from torch import Tensor

from sgl_kernel_ext import fused_add_rmsnorm, linear, rmsnorm, rope_store_kv, silu_and_mul

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_vericache.attention.backend import VeriCacheAttentionBackend
    from sglang_vericache.platform.layers import RowInvariantLinear


@dataclass(frozen=True)
class _Layer:
    """One decoder layer's weights; linear methods may re-pack theirs after an update."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    attention: Any


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
    decoder = model.model
    layers = [
        _Layer(
            input_norm=layer.input_layernorm.weight,
            post_norm=layer.post_attention_layernorm.weight,
            qkv=layer.self_attn.qkv_proj,
            out=layer.self_attn.o_proj,
            gate_up=layer.mlp.gate_up_proj,
            down=layer.mlp.down_proj,
            attention=layer.self_attn.attn,
        )
        for layer in decoder.layers
    ]
    attention = decoder.layers[0].self_attn
    q_size, kv_size = attention.q_size, attention.kv_size
    num_heads, num_kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    rope = attention.rotary_emb
    eps = decoder.norm.variance_epsilon
    stock = decoder.forward

    def forward(
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Tensor:
        if forward_batch.forward_mode.is_idle() or decoder.layers_to_capture:
            return stock(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        hidden = decoder.embed_tokens(input_ids) if input_embeds is None else input_embeds.clone()
        attend = backend()
        slots = forward_batch.out_cache_loc
        residual = hidden
        normed = rmsnorm(hidden, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            if index:
                fused_add_rmsnorm(hidden, residual, layer.input_norm, eps)
                normed = hidden
            qkv = apply(layer.qkv, normed)
            q = qkv[:, :q_size]
            k, v = qkv[:, q_size : q_size + kv_size], qkv[:, q_size + kv_size :]
            k_pool, v_pool = attend.pool.get_kv_buffer(layer.attention.layer_id)
            rope_store_kv(
                positions,
                q,
                k,
                v.view(-1, num_kv_heads, dim),
                dim,
                rope.cos_sin_cache,
                rope.is_neox_style,
                k_pool,
                v_pool,
                slots,
            )
            out = attend.attend(
                q.view(-1, num_heads, dim),
                k_pool,
                v_pool,
                layer.attention.layer_id,
                layer.attention.scaling,
            )
            hidden = apply(layer.out, out.view(-1, q_size))
            fused_add_rmsnorm(hidden, residual, layer.post_norm, eps)
            hidden = apply(layer.down, silu_and_mul(apply(layer.gate_up, hidden)))
        fused_add_rmsnorm(hidden, residual, decoder.norm.weight, eps)
        return hidden

    decoder.forward = forward


def apply(layer: Any, x: Tensor) -> Tensor:
    """``x @ W^T + b`` of a swapped linear layer."""
    method: RowInvariantLinear = layer.quant_method
    if layer.weight._version != method.version:
        return method.apply(layer, x, layer.bias)
    return linear(x, method.packed, layer.bias)

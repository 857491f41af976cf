"""Row-invariant attention, linear and fused ops for SGLang.

A row's bits depend on that row alone: not on how many rows share a call, nor on threads. CPU
tensors run C++ (the best instruction set built and supported), CUDA tensors Triton, and torch
references define what each op means.
"""

from sgl_kernel_ext._loader import active
from sgl_kernel_ext.attention import key_scores, ragged_attention
from sgl_kernel_ext.decoder import Decoder, DecoderLayer, DecoderRows, DecoderShape
from sgl_kernel_ext.fused import (
    argmax_rows,
    copy_rows,
    fused_add_rmsnorm,
    rmsnorm,
    rope_store_kv,
    rotary,
    silu_and_mul,
    store_kv,
)
from sgl_kernel_ext.linear import PackedWeight, linear, pack_weight
from sgl_kernel_ext.packed import CODECS, KvCodec, ViewPool, pack_kv, packed_pool

__all__ = [
    "CODECS",
    "Decoder",
    "DecoderLayer",
    "DecoderRows",
    "DecoderShape",
    "KvCodec",
    "PackedWeight",
    "ViewPool",
    "active",
    "argmax_rows",
    "copy_rows",
    "fused_add_rmsnorm",
    "key_scores",
    "linear",
    "pack_kv",
    "pack_weight",
    "packed_pool",
    "ragged_attention",
    "rmsnorm",
    "rope_store_kv",
    "rotary",
    "silu_and_mul",
    "store_kv",
]

"""Packed K and V: codes of few bits in the slots of a pool, with what decodes them beside.

A packed pool is ``[slots, HKV, row bytes]`` uint8. A row holds one token of one KV head and can be
decoded alone, so any allocator of slots will do: D codes (the first of a byte in its low bits),
then scale and zero, fp16, of each group of channels. Element d of group g is::

    x[d] = code[d] * scale[g] + zero[g]         # fp32; the product is exact

``ragged_attention`` reads views in such pools.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from sgl_kernel_ext._loader import cpu_module, force_reference


@dataclass(frozen=True)
class Codec:
    """Uniform codes per token and KV head, over the range of each group of channels.

    Attributes:
        name: how users select it.
        bits: of a code, 4 or 8.
        group: channels that share scale and zero; the last group of a head may be smaller.
    """

    name: str
    bits: int
    group: int

    def code_bytes(self, head_dim: int) -> int:
        return head_dim * self.bits // 8

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one token and KV head, of K or of V; no two codecs have the same."""
        return self.code_bytes(head_dim) + 4 * -(-head_dim // self.group)


# As kCodecs in csrc/packed.h. Groups of 1024: the whole head.
CODECS = {codec.name: codec for codec in (Codec("int8", 8, 1024), Codec("int4", 4, 32))}


def codec_of(name: str, pool: Tensor, head_dim: int) -> Codec:
    """The codec of a packed pool, which the width of its rows tells.

    Args:
        name: of the argument, for the error.
        pool: ``[slots, HKV, row bytes]`` uint8.

    Raises:
        ValueError: no codec makes such rows.
    """
    widths = {codec.row_bytes(head_dim): codec for codec in CODECS.values()}
    if pool.dim() != 3 or pool.shape[2] not in widths:
        known = ", ".join(f"{width} ({codec.name})" for width, codec in widths.items())
        raise ValueError(
            f"{name}: expected [slots, kv_heads, row bytes] with rows of {known} bytes for "
            f"head_dim {head_dim}, got {tuple(pool.shape)}"
        )
    return widths[pool.shape[2]]


def pack_kv(k: Tensor, v: Tensor, k_packed: Tensor, v_packed: Tensor, slots: Tensor) -> None:
    """Encode keys and values into slots of a packed pool.

    Each group of channels gets zero = its least element, scale = range / (2 ** bits - 1), both
    rounded to fp16, and the nearest codes (ties to even).

    Args:
        k: [n, HKV, D] bf16, fp16 or fp32; D contiguous, a multiple of 8.
        v: like k.
        k_packed: [slots, HKV, row bytes] uint8, row bytes contiguous; written in place.
        v_packed: like k_packed, perhaps of another codec.
        slots: [n] int32, contiguous; with a slot given twice the row that stays is undefined.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape, layout or device.
        IndexError: on CPU, a slot is outside the pool; nothing has been written then.
    """
    _check(k, v, k_packed, v_packed, slots)
    if k.is_cpu and (module := cpu_module()) is not None:
        module.pack_kv(k, v, k_packed, v_packed, slots)
        return
    _implementation(k).pack_kv(k, v, k_packed, v_packed, slots)


def _implementation(k: Tensor) -> ModuleType:
    if k.is_cuda and not force_reference():
        from sgl_kernel_ext.triton import packed

        return packed
    from sgl_kernel_ext.reference import packed as reference

    return reference


def _check(k: Tensor, v: Tensor, k_packed: Tensor, v_packed: Tensor, slots: Tensor) -> None:
    if k.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"k: expected bfloat16, float16 or float32, got {k.dtype}")
    if k.dim() != 3 or k.shape[2] % 8 or not 0 < k.shape[2] <= 1024:
        raise ValueError(
            f"k: expected [tokens, kv_heads, head_dim] with head_dim a multiple of 8 up to 1024, "
            f"got {tuple(k.shape)}"
        )
    if v.dtype != k.dtype or v.shape != k.shape:
        raise ValueError(
            f"v: expected {tuple(k.shape)} {k.dtype} like k, got {tuple(v.shape)} {v.dtype}"
        )
    if slots.dtype != torch.int32:
        raise TypeError(f"slots: expected torch.int32, got {slots.dtype}")
    if slots.shape != k.shape[:1] or not slots.is_contiguous():
        raise ValueError(
            f"slots: expected {len(k)} contiguous entries like k, got {tuple(slots.shape)}"
        )
    for name, pool in (("k_packed", k_packed), ("v_packed", v_packed)):
        if pool.dtype != torch.uint8:
            raise TypeError(f"{name}: expected torch.uint8, got {pool.dtype}")
        codec_of(name, pool, k.shape[2])
        if pool.shape[1] != k.shape[1]:
            raise ValueError(f"{name}: expected {k.shape[1]} KV heads like k, got {pool.shape[1]}")
    tensors = {"k": k, "v": v, "k_packed": k_packed, "v_packed": v_packed, "slots": slots}
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name}: the last dimension must be contiguous")
        if tensor.device != k.device:
            raise ValueError(f"{name}: on {tensor.device}, but k is on {k.device}")

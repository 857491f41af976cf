"""Packed K and V: codes of few bits in the slots of a pool, with what decodes them beside.

A packed pool is ``[slots / tokens, HKV, block bytes]`` uint8: blocks of the tokens of one KV head
that share what decodes them, and that can be decoded without any other. Blocks of one token are
rows, so that any allocator of slots will do; otherwise slot s is token ``s % tokens`` of block
``s // tokens``. A block holds the codes of its tokens, D each (the first of a byte in its
low bits), then parameters in fp16. How element d of a token comes from its code, in fp32:

``UNIFORM``: scale and zero of each group of channels, side by side::

    x[d] = code[d] * scale[g] + zero[g]         # the product is exact

``CHANNEL`` (KIVI, https://arxiv.org/abs/2402.02750): scale and zero of each channel over the tokens
of a block, all scales before all zeros::

    x[d] = code[d] * scale[d] + zero[d]

``ROTATED`` (TurboQuant, https://arxiv.org/abs/2504.19874): the head, turned by signs and Hadamard
matrices H of B x B, is close to Gaussian whatever its outliers, so one scale and the levels of the
best quantizer of a Gaussian will do. B is the largest power of two that divides D::

    x[d] = sign[d] * scale / sqrt(B) * (H level[code])[d]

``ragged_attention`` reads views in such pools.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_kernel_ext._loader import cpu_module, force_reference

_WHOLE_HEAD = 1024


class Scheme(IntEnum):
    """How elements come from codes; ``PLAIN`` has none."""

    PLAIN = 0
    UNIFORM = 1
    ROTATED = 2
    CHANNEL = 3


@dataclass(frozen=True)
class Codec:
    """How keys, or values, are encoded.

    Attributes:
        number: names it to the kernels.
        scheme: see the module.
        bits: of a code.
        group: channels that share scale and zero; the last group of a head may be smaller.
        tokens: of a block.
    """

    number: int
    scheme: Scheme
    bits: int
    group: int = _WHOLE_HEAD
    tokens: int = 1

    def __str__(self) -> str:
        return f"{self.scheme.name.lower()}{self.bits}"

    def code_bytes(self, head_dim: int) -> int:
        """Codes of one token and KV head."""
        return head_dim * self.bits // 8

    def block_bytes(self, head_dim: int) -> int:
        """One block of one KV head."""
        groups = -(-head_dim // self.group)
        params = {Scheme.UNIFORM: 2 * groups, Scheme.ROTATED: 1, Scheme.CHANNEL: 2 * head_dim}
        return self.tokens * self.code_bytes(head_dim) + 2 * params[self.scheme]

    def row_bytes(self, head_dim: int) -> int:
        """A token's part of a block."""
        return self.block_bytes(head_dim) // self.tokens


# As kCodecs in csrc/packed.h.
_TABLE = PLAIN, UNIFORM8, UNIFORM4, ROTATED4, ROTATED2, UNIFORM2, CHANNEL4, CHANNEL2 = (
    Codec(0, Scheme.PLAIN, 0),
    Codec(1, Scheme.UNIFORM, 8),
    Codec(2, Scheme.UNIFORM, 4, group=32),
    Codec(3, Scheme.ROTATED, 4),
    Codec(4, Scheme.ROTATED, 2),
    Codec(5, Scheme.UNIFORM, 2, group=32),
    Codec(6, Scheme.CHANNEL, 4, tokens=32),
    Codec(7, Scheme.CHANNEL, 2, tokens=32),
)


@dataclass(frozen=True)
class KvCodec:
    """How a pool is encoded: ``name``, as users select it, and a codec each for keys and values."""

    name: str
    keys: Codec
    values: Codec

    @property
    def tokens(self) -> int:
        """Of the larger block: what shares one has to be written at once, to slots of its own."""
        return max(self.keys.tokens, self.values.tokens)

    def row_bytes(self, head_dim: int) -> int:
        """Of one token and KV head, K and V."""
        return self.keys.row_bytes(head_dim) + self.values.row_bytes(head_dim)


CODECS = {
    codec.name: codec
    for codec in (
        KvCodec("int8", UNIFORM8, UNIFORM8),
        KvCodec("int4", UNIFORM4, UNIFORM4),
        KvCodec("turbo4", ROTATED4, ROTATED4),
        KvCodec("turbo2", ROTATED2, ROTATED2),
        KvCodec("turbo4v2", ROTATED4, ROTATED2),
        KvCodec("kivi4", CHANNEL4, UNIFORM4),
        KvCodec("kivi2", CHANNEL2, UNIFORM2),
    )
}


class ViewPool(NamedTuple):
    """Keys and values of one layer in a pool that views may lie in, and how they are encoded.

    Attributes:
        keys, values: ``[slots, HKV, D]``; packed, ``[slots / tokens, HKV, block bytes]`` uint8.
        key_codec, value_codec: number of a ``Codec``; 0 where they are not packed.
    """

    keys: Tensor
    values: Tensor
    key_codec: int = 0
    value_codec: int = 0

    @property
    def parts(self) -> tuple[tuple[Tensor, Codec], tuple[Tensor, Codec]]:
        """Keys and values, each with its codec."""
        return (self.keys, codec_of(self.key_codec)), (self.values, codec_of(self.value_codec))


def packed_pool(
    codec: KvCodec, slots: int, kv_heads: int, head_dim: int, device: torch.device | str = "cpu"
) -> ViewPool:
    """An uninitialised pool of at least ``slots`` slots, whole blocks."""
    blocks = -(-slots // codec.tokens)
    keys, values = (
        torch.empty(
            (blocks * codec.tokens // part.tokens, kv_heads, part.block_bytes(head_dim)),
            dtype=torch.uint8,
            device=device,
        )
        for part in (codec.keys, codec.values)
    )
    return ViewPool(keys, values, codec.keys.number, codec.values.number)


def codec_of(number: int) -> Codec:
    """The codec of a number.

    Raises:
        ValueError: there is none.
    """
    if not 0 <= number < len(_TABLE):
        raise ValueError(f"unknown codec {number}; there are {len(_TABLE)}")
    return _TABLE[number]


def pack_kv(k: Tensor, v: Tensor, pool: ViewPool, slots: Tensor) -> None:
    """Encode keys and values into slots of a packed pool.

    ``UNIFORM``: each group of channels gets zero = its least element and scale = range /
    (2 ** bits - 1), both rounded to fp16, and the nearest codes (ties to even).

    ``CHANNEL``: so does each channel of as many rows as a block has, in order; the last row fills
    up the last block.

    ``ROTATED``: codes are those of the levels nearest to the turned head in units of its root mean
    square (ties to the lower one); scale is then that of the least squared error, rounded to fp16.

    Args:
        k: [n, HKV, D] bf16, fp16 or fp32; D contiguous, a multiple of 8.
        v: like k.
        pool: bytes of a block contiguous; written in place.
        slots: [n] int32, contiguous; with a slot given twice the row that stays is undefined. Where
            blocks have several tokens, each run of so many rows has to have the slots of a block,
            in order.

    Raises:
        TypeError, ValueError: an argument has the wrong dtype, shape, layout or device; on CPU also
            where slots do not make blocks.
        IndexError: on CPU, a slot is outside the pool; nothing has been written then.
    """
    _check(k, v, pool, slots)
    if k.is_cpu and (module := cpu_module()) is not None:
        module.pack_kv(k, v, pool, slots)
        return
    _implementation(k).pack_kv(k, v, pool, slots)


def _implementation(k: Tensor) -> ModuleType:
    if k.is_cuda and not force_reference():
        from sgl_kernel_ext.triton import packed

        return packed
    from sgl_kernel_ext.reference import packed as reference

    return reference


def check_packed(name: str, pool: Tensor, codec: Codec, kv_heads: int, head_dim: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``pool`` is one of that codec."""
    if pool.dtype != torch.uint8:
        raise TypeError(f"{name}: expected torch.uint8, got {pool.dtype}")
    width = codec.block_bytes(head_dim)
    if pool.dim() != 3 or pool.shape[1:] != (kv_heads, width):
        raise ValueError(
            f"{name}: expected [blocks, {kv_heads} KV heads, {width} bytes] of {codec} for "
            f"head_dim {head_dim}, got {tuple(pool.shape)}"
        )


def _check(k: Tensor, v: Tensor, pool: ViewPool, slots: Tensor) -> None:
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
    tensors = {"k": k, "v": v, "pool.keys": pool.keys, "pool.values": pool.values, "slots": slots}
    for name, (part, codec) in zip(("pool.keys", "pool.values"), pool.parts, strict=True):
        if codec is PLAIN:
            raise ValueError(f"{name}: is not packed")
        check_packed(name, part, codec, *k.shape[1:])
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name}: the last dimension must be contiguous")
        if tensor.device != k.device:
            raise ValueError(f"{name}: on {tensor.device}, but k is on {k.device}")


# Of the quantizer of a standard normal variable with the least squared error (S. Lloyd, Least
# squares quantization in PCM, 1982; J. Max, Quantizing for minimum distortion, 1960): the positive
# levels and the borders between them. As kLevels and kBorders in csrc/packed.h.
_LEVELS = {
    2: (0.4527800, 1.5104176),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}


@cache
def levels(bits: int) -> tuple[float, ...]:
    """What the codes of a ``ROTATED`` codec stand for, ascending; of a standard normal variable."""
    positive = _LEVELS[bits]
    return (*(-x for x in reversed(positive)), *positive)

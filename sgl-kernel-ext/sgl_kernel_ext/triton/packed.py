"""Packing of K and V rows, and how attention reads them; :mod:`sgl_kernel_ext.packed` has the
formats."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.packed import Codec, Scheme, ViewPool, levels
from sgl_kernel_ext.reference.packed import borders, hadamard_block
from sgl_kernel_ext.triton.tiles import LAUNCH, block_d

_UNIFORM = tl.constexpr(int(Scheme.UNIFORM))
_CHANNEL = tl.constexpr(int(Scheme.CHANNEL))


class Layout(NamedTuple):
    """A codec as the kernels take it, for heads of a given size.

    Attributes:
        scheme, bits, tokens: as in ``Codec``.
        group: channels that share scale and zero, or that a rotation mixes: a power of two, at most
            ``block_d``.
        levels, borders: what codes stand for, the positive half, and what lies between; empty if
            they just count.
    """

    scheme: int
    bits: int
    group: int
    tokens: int
    levels: tuple[float, ...] = ()
    borders: tuple[float, ...] = ()


def layout_of(codec: Codec, head_dim: int) -> Layout:
    if codec.scheme is Scheme.ROTATED:
        positive = levels(codec.bits)[2 ** (codec.bits - 1) :]
        between = tuple(borders(codec.bits))
        mixed = hadamard_block(head_dim)
        return Layout(codec.scheme, codec.bits, mixed, codec.tokens, positive, between)
    return Layout(codec.scheme, codec.bits, min(codec.group, block_d(head_dim)), codec.tokens)


@triton.jit
def load_packed(blocks, token, d, mask, LAYOUT: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr):
    """Elements ``[N, BLOCK_D]``; arbitrary outside ``mask``.

    Args:
        blocks: pointers ``[N, 1]``.
        token: ``[N, 1]``, which of a block.
    """
    BITS: tl.constexpr = LAYOUT[1]
    GROUP: tl.constexpr = LAYOUT[2]
    TOKENS: tl.constexpr = LAYOUT[3]
    per_byte: tl.constexpr = 8 // BITS
    byte = token * (D // per_byte) + (d // per_byte)[None, :]
    code = tl.load(blocks + byte, mask=mask, other=0).to(tl.int32)
    code = (code >> (d % per_byte * BITS)[None, :]) & ((1 << BITS) - 1)
    params = (blocks + TOKENS * (D // per_byte)).to(tl.pointer_type(tl.float16))
    if LAYOUT[0] == _UNIFORM:
        params += (d // GROUP * 2)[None, :]
        scale = tl.load(params, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(params + 1, mask=mask, other=0.0).to(tl.float32)
        values = code.to(tl.float32) * scale + zero
    elif LAYOUT[0] == _CHANNEL:
        params += d[None, :]
        scale = tl.load(params, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(params + D, mask=mask, other=0.0).to(tl.float32)
        values = code.to(tl.float32) * scale + zero
    else:
        scale = tl.load(params + (d * 0)[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = scale * (1 / GROUP**0.5) * signs(d)[None, :]
        values = hadamard(level_of(code, BITS, LAYOUT[4]), GROUP) * weight
    return values.to(dtype)


@triton.jit
def level_of(code, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """What the codes of a rotated row stand for."""
    half: tl.constexpr = 1 << (BITS - 1)
    rank = tl.where(code < half, half - 1 - code, code - half)
    value = tl.full(code.shape, LEVELS[0], tl.float32)
    for i in tl.static_range(1, half):
        value = tl.where(rank == i, LEVELS[i], value)
    return tl.where(code < half, -value, value)


@triton.jit
def signs(d):
    """As in the reference."""
    x = (d.to(tl.int64) * 2654435761) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 739982445) & 0xFFFFFFFF
    return 1.0 - 2.0 * (x >> 31).to(tl.float32)


@triton.jit
def hadamard(x, BLOCK: tl.constexpr):
    """``[N, BLOCK_D]``: as in the reference."""
    for i in tl.static_range(0, _log2(BLOCK)):
        x = _butterflies(x, 1 << i)
    return x


@triton.jit
def _butterflies(x, STEP: tl.constexpr):
    pairs = tl.reshape(x, (x.shape[0], x.shape[1] // (2 * STEP), 2, STEP))
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), x.shape)


@triton.constexpr_function
def _log2(size: int) -> int:
    return size.bit_length() - 1


def pack_kv(k: Tensor, v: Tensor, pool: ViewPool, slots: Tensor) -> None:
    """See :func:`sgl_kernel_ext.pack_kv`."""
    count, heads, head_dim = k.shape
    if count == 0:
        return
    for x, (blocks, codec) in zip((k, v), pool.parts, strict=True):
        _PACK[codec.scheme][(triton.cdiv(count, codec.tokens), heads)](
            x, blocks, slots, count, *x.stride()[:2], *blocks.stride()[:2],
            LAYOUT=layout_of(codec, head_dim), D=head_dim, BLOCK_D=block_d(head_dim), **LAUNCH,
        )  # fmt: skip


@triton.jit
def _range(low, high, BITS: tl.constexpr):
    """Scale and zero, fp16, of uniform codes."""
    largest: tl.constexpr = 65504.0
    zero = tl.minimum(tl.maximum(low, -largest), largest) + 0.0  # + 0: one zero
    zero = zero.to(tl.float16)
    step = high - zero.to(tl.float32)
    step = tl.div_rn(step, tl.full(step.shape, (1 << BITS) - 1, tl.float32))
    return tl.minimum(tl.maximum(step, 5.960464477539063e-08), largest).to(
        tl.float16
    ), zero  # 2^-24


@triton.jit
def _nearest(x, scale, zero, BITS: tl.constexpr):
    codes = tl.div_rn(x - zero.to(tl.float32), scale.to(tl.float32))
    codes = tl.minimum(tl.maximum(codes, 0.0), (1 << BITS) - 1)
    return ((codes + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: rounds to even


@triton.jit
def _store_codes(
    rows, codes, N: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Codes of N rows of ``BLOCK_D``, one behind the other."""
    per_byte: tl.constexpr = 8 // BITS
    codes = tl.reshape(codes, (N, BLOCK_D // per_byte, per_byte))
    packed = tl.sum(codes << (tl.arange(0, per_byte) * BITS)[None, None, :], 2)
    byte = tl.arange(0, BLOCK_D // per_byte)[None, :]
    row = tl.arange(0, N)[:, None] * (D // per_byte)
    tl.store(rows + row + byte, packed.to(tl.uint8), mask=(byte < D // per_byte) & (row >= 0))


@triton.jit(do_not_specialize=["count"])
def _pack_uniform(
    x, pool, slots, count, x_row, x_head, pool_slot, pool_head,
    LAYOUT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head)."""
    BITS: tl.constexpr = LAYOUT[1]
    GROUP: tl.constexpr = LAYOUT[2]
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = pool + tl.load(slots + token).to(tl.int64) * pool_slot + head * pool_head
    d = tl.arange(0, BLOCK_D)
    # The last value again up to a whole group: that changes no range.
    values = tl.load(x + token * x_row + head * x_head + tl.minimum(d, D - 1)).to(tl.float32)
    groups = tl.reshape(values, (BLOCK_D // GROUP, GROUP))
    scale, zero = _range(tl.min(groups, 1), tl.max(groups, 1), BITS)
    codes = _nearest(groups, scale[:, None], zero[:, None], BITS)
    _store_codes(row, codes, 1, BITS, D, BLOCK_D)
    group = tl.arange(0, BLOCK_D // GROUP)
    params = (row + D * BITS // 8 + group * 4).to(tl.pointer_type(tl.float16))
    tl.store(params, scale, mask=group * GROUP < D)
    tl.store(params + 1, zero, mask=group * GROUP < D)


@triton.jit(do_not_specialize=["count"])
def _pack_rotated(
    x, pool, slots, count, x_row, x_head, pool_slot, pool_head,
    LAYOUT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head)."""
    BITS: tl.constexpr = LAYOUT[1]
    GROUP: tl.constexpr = LAYOUT[2]
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = pool + tl.load(slots + token).to(tl.int64) * pool_slot + head * pool_head
    d = tl.arange(0, BLOCK_D)
    values = tl.load(x + token * x_row + head * x_head + d, mask=d < D, other=0.0).to(tl.float32)
    turned = hadamard((values * signs(d))[None, :], GROUP)
    unit = tl.sqrt_rn(_tree_sum(turned * turned) * (1 / D))[:, None]
    codes = tl.zeros([1, BLOCK_D], tl.int32)
    for i in tl.static_range((1 << BITS) - 1):
        codes += (turned > unit * LAYOUT[5][i]).to(tl.int32)
    stands = tl.where((d < D)[None, :], level_of(codes, BITS, LAYOUT[4]), 0.0)
    ratio = tl.div_rn(_tree_sum(turned * stands), _tree_sum(stands * stands))
    largest: tl.constexpr = 65504.0
    scale = tl.minimum(tl.maximum(ratio * (1 / GROUP**0.5), -largest), largest) + 0.0
    _store_codes(row, codes, 1, BITS, D, BLOCK_D)
    params = (row + D * BITS // 8 + tl.arange(0, 1)).to(tl.pointer_type(tl.float16))
    tl.store(params, scale.to(tl.float16))


@triton.jit
def _tree_sum(x):
    """Of ``[1, BLOCK_D]``, as in the reference: ``[1]``."""
    SIZE: tl.constexpr = x.shape[1]
    for i in tl.static_range(0, _log2(SIZE)):
        halves = tl.reshape(x, (2, SIZE >> (i + 1)))
        first, second = tl.split(tl.permute(halves, (1, 0)))
        x = first + second
    return tl.reshape(x, (1,))


@triton.jit(do_not_specialize=["count"])
def _pack_channels(
    x, pool, slots, count, x_row, x_head, pool_slot, pool_head,
    LAYOUT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (block, KV head)."""
    BITS: tl.constexpr = LAYOUT[1]
    TOKENS: tl.constexpr = LAYOUT[3]
    first, head = tl.program_id(0).to(tl.int64) * TOKENS, tl.program_id(1).to(tl.int64)
    block = pool + (tl.load(slots + first) // TOKENS).to(tl.int64) * pool_slot + head * pool_head
    d = tl.arange(0, BLOCK_D)
    token = tl.minimum(first + tl.arange(0, TOKENS), count - 1)
    rows = x + token[:, None] * x_row + head * x_head
    values = tl.load(rows + tl.minimum(d, D - 1)[None, :]).to(tl.float32)
    scale, zero = _range(tl.min(values, 0), tl.max(values, 0), BITS)
    codes = _nearest(values, scale[None, :], zero[None, :], BITS)
    _store_codes(block, codes, TOKENS, BITS, D, BLOCK_D)
    params = (block + TOKENS * (D * BITS // 8)).to(tl.pointer_type(tl.float16)) + d
    tl.store(params, scale, mask=d < D)
    tl.store(params + D, zero, mask=d < D)


_PACK = {
    Scheme.UNIFORM: _pack_uniform,
    Scheme.ROTATED: _pack_rotated,
    Scheme.CHANNEL: _pack_channels,
}

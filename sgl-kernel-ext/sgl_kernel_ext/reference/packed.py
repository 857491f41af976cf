"""What packing and unpacking compute, in torch; formats are in :mod:`sgl_kernel_ext.packed`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_kernel_ext.packed import Codec, Scheme, ViewPool, levels

_HALF = torch.finfo(torch.float16)


def pack_kv(k: Tensor, v: Tensor, pool: ViewPool, slots: Tensor) -> None:
    """See :func:`sgl_kernel_ext.pack_kv`."""
    for x, (blocks, codec) in zip((k, v), pool.parts, strict=True):
        blocks[slots[:: codec.tokens].long() // codec.tokens] = pack(x, codec)


def pack(x: Tensor, codec: Codec) -> Tensor:
    """Rows ``[n, ..., D]`` -> blocks ``[ceil(n / tokens), ..., block bytes]`` uint8.

    The last row fills up the last block.
    """
    rows = torch.cat([x, x[-1:].expand(-len(x) % codec.tokens, *x.shape[1:])])
    by_block = rows.unflatten(0, (-1, codec.tokens)).movedim(1, -2)
    codes, params = _ENCODE[codec.scheme](by_block.float(), codec)
    if codec.bits < 8:
        parts = codes.unflatten(-1, (-1, 8 // codec.bits)).unbind(-1)
        codes = torch.zeros_like(parts[0])
        for i, part in enumerate(parts):
            codes |= part << (i * codec.bits)
    return torch.cat([codes.flatten(-2), params.flatten(-2).view(torch.uint8)], -1)


def unpack(blocks: Tensor, head_dim: int, codec: Codec) -> Tensor:
    """Packed blocks ``[b, ..., block bytes]`` -> fp32 ``[b * tokens, ..., D]``."""
    size = codec.tokens * codec.code_bytes(head_dim)
    params = blocks[..., size:].contiguous().view(torch.float16).float()[..., None, :]
    shifts = torch.arange(0, 8, codec.bits, dtype=torch.uint8, device=blocks.device)
    codes = (blocks[..., :size, None] >> shifts & 2**codec.bits - 1).flatten(-2)
    by_block = _DECODE[codec.scheme](codes.unflatten(-1, (codec.tokens, -1)), params, codec)
    return by_block.movedim(-2, 1).flatten(0, 1)


def _encode_uniform(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    head_dim = x.shape[-1]
    group = min(codec.group, head_dim)
    # The last value again up to a whole group: that changes no range.
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], -head_dim % group)], -1)
    groups = padded.unflatten(-1, (-1, group))
    codes, scale, zero = _nearest(groups, groups.amin(-1), groups.amax(-1), -1, codec.bits)
    return codes.flatten(-2)[..., :head_dim], torch.stack([scale, zero], -1).flatten(-2)


def _nearest(
    x: Tensor, low: Tensor, high: Tensor, dim: int, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Uniform codes of ``x``, whose range along ``dim`` is ``low`` to ``high``; scale, zero."""
    zero = (low.clamp(_HALF.min, _HALF.max) + 0.0).half()  # + 0: one zero
    most = 2**bits - 1
    scale = ((high - zero.float()) / most).clamp(2**-24, _HALF.max).half()
    codes = (x - zero.float().unsqueeze(dim)) / scale.float().unsqueeze(dim)
    return codes.nan_to_num(0.0).clamp(0, most).round().to(torch.uint8), scale, zero


def _decode_uniform(codes: Tensor, params: Tensor, codec: Codec) -> Tensor:
    head_dim = codes.shape[-1]
    group = min(codec.group, head_dim)
    scale, zero = params.unflatten(-1, (-1, 2)).split(1, -1)
    padded = F.pad(codes.float(), (0, -head_dim % group)).unflatten(-1, (-1, group))
    return (padded * scale + zero).flatten(-2)[..., :head_dim]


def _encode_channel(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    codes, scale, zero = _nearest(x, x.amin(-2), x.amax(-2), -2, codec.bits)
    return codes, torch.stack([scale, zero], -2)


def _decode_channel(codes: Tensor, params: Tensor, codec: Codec) -> Tensor:
    scale, zero = params.chunk(2, -1)
    return codes * scale + zero


def _encode_rotated(x: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    head_dim = x.shape[-1]
    block = hadamard_block(head_dim)
    turned = hadamard(x * signs(head_dim).to(x.device), block)
    unit = (_tree_sum(turned * turned) * (1 / head_dim)).sqrt()[..., None]
    codes = torch.zeros_like(turned, dtype=torch.uint8)
    for border in borders(codec.bits):
        codes += turned > unit * border
    values = _values(codes, codec)
    ratio = _tree_sum(turned * values) / _tree_sum(values * values)
    scale = (ratio * (1 / math.sqrt(block))).clamp(_HALF.min, _HALF.max) + 0.0  # + 0: one zero
    return codes, scale.half()[..., None]


def _decode_rotated(codes: Tensor, params: Tensor, codec: Codec) -> Tensor:
    head_dim = codes.shape[-1]
    block = hadamard_block(head_dim)
    weight = params * (1 / math.sqrt(block)) * signs(head_dim).to(codes.device)
    return hadamard(_values(codes, codec), block) * weight


def _values(codes: Tensor, codec: Codec) -> Tensor:
    return torch.tensor(levels(codec.bits), device=codes.device)[codes.long()]


def borders(bits: int) -> list[float]:
    """Between neighbouring levels; fp32."""
    found = torch.tensor(levels(bits)).double()
    return ((found[1:] + found[:-1]) / 2).float().tolist()


def hadamard_block(head_dim: int) -> int:
    """Channels that a rotation mixes: the largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


def hadamard(x: Tensor, block: int) -> Tensor:
    """``[..., D]``, every ``block`` channels times the Hadamard matrix (entries 1 and -1).

    Sums grow from neighbours outwards: kernels do the same, for the same bits.
    """
    shape = x.shape
    step = 1
    while step < block:
        pairs = x.reshape(*shape[:-1], -1, 2, step)
        first, second = pairs.unbind(-2)
        x = torch.stack([first + second, first - second], -2)
        step *= 2
    return x.reshape(shape)


def signs(head_dim: int) -> Tensor:
    """1 and -1, at random but always the same; fp32 ``[D]``."""
    x = torch.arange(head_dim, dtype=torch.int64)
    x = (x * 2654435761) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 739982445) & 0xFFFFFFFF
    return 1.0 - 2.0 * (x >> 31)


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, halves added to each other: kernels do the same."""
    x = F.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


_ENCODE = {
    Scheme.UNIFORM: _encode_uniform,
    Scheme.ROTATED: _encode_rotated,
    Scheme.CHANNEL: _encode_channel,
}
_DECODE = {
    Scheme.UNIFORM: _decode_uniform,
    Scheme.ROTATED: _decode_rotated,
    Scheme.CHANNEL: _decode_channel,
}

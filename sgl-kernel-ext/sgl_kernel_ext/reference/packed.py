"""What packing and unpacking compute, in torch; see :mod:`sgl_kernel_ext.packed` for the format."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_kernel_ext.packed import Codec, codec_of

_HALF = torch.finfo(torch.float16)


def pack_kv(k: Tensor, v: Tensor, k_packed: Tensor, v_packed: Tensor, slots: Tensor) -> None:
    """See :func:`sgl_kernel_ext.pack_kv`."""
    for x, pool in ((k, k_packed), (v, v_packed)):
        pool[slots.long()] = pack(x, codec_of("pool", pool, x.shape[-1]))


def pack(x: Tensor, codec: Codec) -> Tensor:
    """Rows ``[..., D]`` -> ``[..., row bytes]`` uint8."""
    head_dim = x.shape[-1]
    group = min(codec.group, head_dim)
    # The last value again up to a whole group: that changes no range.
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], -head_dim % group)], -1).float()
    groups = padded.unflatten(-1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    zero = (low.clamp(_HALF.min, _HALF.max) + 0.0).half()  # + 0: one zero
    levels = 2**codec.bits - 1
    scale = ((high - zero.float()) / levels).clamp(2**-24, _HALF.max).half()
    codes = (groups - zero.float()[..., None]) / scale.float()[..., None]
    codes = codes.nan_to_num(0.0).clamp(0, levels).round().to(torch.uint8)
    codes = codes.flatten(-2)[..., :head_dim]
    if codec.bits < 8:
        parts = codes.unflatten(-1, (-1, 8 // codec.bits)).unbind(-1)
        codes = torch.zeros_like(parts[0])
        for i, part in enumerate(parts):
            codes |= part << (i * codec.bits)
    params = torch.stack([scale, zero], -1).flatten(-2).view(torch.uint8)
    return torch.cat([codes, params], -1)


def unpack(rows: Tensor, head_dim: int) -> Tensor:
    """Packed rows ``[n, row bytes]`` or ``[n, HKV, row bytes]`` -> fp32 ``[..., D]``."""
    codec = codec_of("rows", rows if rows.dim() == 3 else rows[:, None], head_dim)
    size = codec.code_bytes(head_dim)
    params = rows[..., size:].contiguous().view(torch.float16).float().unflatten(-1, (-1, 2))
    shifts = torch.arange(0, 8, codec.bits, dtype=torch.uint8, device=rows.device)
    codes = (rows[..., :size, None] >> shifts & 2**codec.bits - 1).flatten(-2).float()
    group = min(codec.group, head_dim)
    padded = F.pad(codes, (0, -head_dim % group)).unflatten(-1, (-1, group))
    values = padded * params[..., :1] + params[..., 1:]
    return values.flatten(-2)[..., :head_dim]

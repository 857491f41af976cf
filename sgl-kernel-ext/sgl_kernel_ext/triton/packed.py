"""Packing of K and V rows, and how attention reads them; :mod:`sgl_kernel_ext.packed` has the
format."""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.packed import Codec, codec_of
from sgl_kernel_ext.triton.tiles import LAUNCH, block_d


def group_of(codec: Codec, head_dim: int) -> int:
    """Channels of a group, at most ``block_d``: a power of two like it."""
    return min(codec.group, block_d(head_dim))


@triton.jit
def load_packed(
    rows, d, mask, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr
):
    """Elements ``[N, BLOCK_D]`` of packed rows, pointers ``[N, 1]``; 0 where not in ``mask``."""
    per_byte: tl.constexpr = 8 // BITS
    code = tl.load(rows + (d // per_byte)[None, :], mask=mask, other=0).to(tl.int32)
    code = (code >> (d % per_byte * BITS)[None, :]) & ((1 << BITS) - 1)
    params = (rows + D // per_byte + (d // GROUP * 4)[None, :]).to(tl.pointer_type(tl.float16))
    scale = tl.load(params, mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(params + 1, mask=mask, other=0.0).to(tl.float32)
    return (code.to(tl.float32) * scale + zero).to(dtype)


def pack_kv(k: Tensor, v: Tensor, k_packed: Tensor, v_packed: Tensor, slots: Tensor) -> None:
    """See :func:`sgl_kernel_ext.pack_kv`."""
    count, heads, head_dim = k.shape
    if count == 0:
        return
    for x, pool in ((k, k_packed), (v, v_packed)):
        codec = codec_of("pool", pool, head_dim)
        _pack_kernel[(count, heads)](
            x, pool, slots, *x.stride()[:2], *pool.stride()[:2],
            BITS=codec.bits, GROUP=group_of(codec, head_dim), D=head_dim,
            BLOCK_D=block_d(head_dim), **LAUNCH,
        )  # fmt: skip


@triton.jit
def _pack_kernel(
    x, pool, slots, x_row, x_head, pool_slot, pool_head,
    BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = pool + tl.load(slots + token).to(tl.int64) * pool_slot + head * pool_head
    d = tl.arange(0, BLOCK_D)
    # The last value again up to a whole group: that changes no range.
    values = tl.load(x + token * x_row + head * x_head + tl.minimum(d, D - 1)).to(tl.float32)
    groups = tl.reshape(values, (BLOCK_D // GROUP, GROUP))
    largest: tl.constexpr = 65504.0
    zero = tl.minimum(tl.maximum(tl.min(groups, 1), -largest), largest) + 0.0  # + 0: one zero
    zero = zero.to(tl.float16)
    low = zero.to(tl.float32)
    step = tl.div_rn(tl.max(groups, 1) - low, tl.full([1], (1 << BITS) - 1, tl.float32))
    scale = tl.minimum(tl.maximum(step, 5.960464477539063e-08), largest).to(tl.float16)  # 2^-24
    codes = tl.div_rn(groups - low[:, None], scale.to(tl.float32)[:, None])
    codes = tl.minimum(tl.maximum(codes, 0.0), (1 << BITS) - 1)
    codes = ((codes + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: rounds to even
    per_byte: tl.constexpr = 8 // BITS
    codes = tl.reshape(codes, (BLOCK_D // per_byte, per_byte))
    packed = tl.sum(codes << (tl.arange(0, per_byte) * BITS)[None, :], 1)
    byte = tl.arange(0, BLOCK_D // per_byte)
    tl.store(row + byte, packed.to(tl.uint8), mask=byte < D // per_byte)
    group = tl.arange(0, BLOCK_D // GROUP)
    params = (row + D // per_byte + group * 4).to(tl.pointer_type(tl.float16))
    tl.store(params, scale, mask=group * GROUP < D)
    tl.store(params + 1, zero, mask=group * GROUP < D)

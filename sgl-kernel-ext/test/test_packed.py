"""Packed pools: pack_kv, and attention over what it packed (case Z5)."""

from typing import Any

import pytest
import torch
from batches import BUILT, DTYPES, Batch, Group, build, randn, same_bits
from moving import move_views, pack_views, view_prefixes
from torch import Tensor

from sgl_kernel_ext import (
    CODECS,
    KvCodec,
    ViewPool,
    _loader,
    attention,
    pack_kv,
    packed,
    packed_pool,
)
from sgl_kernel_ext.packed import (
    CHANNEL2,
    CHANNEL4,
    PLAIN,
    ROTATED2,
    ROTATED4,
    UNIFORM2,
    UNIFORM4,
    UNIFORM8,
    codec_of,
    levels,
)
from sgl_kernel_ext.reference import attention as reference
from sgl_kernel_ext.reference.packed import hadamard, pack, signs, unpack

DIMS = [64, 80, 8, 72, 128, 256]


@pytest.fixture(params=[*BUILT, "reference"])
def op(request, monkeypatch):
    if request.param == "reference":
        return reference.ragged_attention
    module = _loader.load_isa(request.param)
    monkeypatch.setattr(attention, "cpu_module", lambda: module)
    return attention.ragged_attention


@pytest.fixture(params=BUILT)
def pack_op(request, monkeypatch):
    module = _loader.load_isa(request.param)
    monkeypatch.setattr(packed, "cpu_module", lambda: module)
    return pack_kv


def heads_of(dim: int, dtype: torch.dtype) -> Tensor:
    """``[70, 3, dim]``: usual rows, outliers, offsets, constants, zeros, tiny and large values."""
    x = randn(70, 3, dim, dtype=torch.float32)
    x[10:20] += 30 * randn(10, 3, 1)
    x[20:30, :, 3] *= 100
    x[30], x[31], x[32] = 0.0, 2.5, -7.0
    x[33:35] *= 1e-7
    x[35:37] *= 6e4 if dtype == torch.float16 else 1e6
    x[37, :, 1:] = 0.0
    return x.clamp(-65000, 65000).to(dtype) if dtype == torch.float16 else x.to(dtype)


def empty(codec: KvCodec, dim: int, slots: int = 90) -> ViewPool:
    pool = packed_pool(codec, slots, 3, dim)
    pool.keys.fill_(7), pool.values.fill_(7)
    return pool


def test_bytes_of_a_token():
    expected = {"int8": 68 * 2, "int4": 40 * 2, "turbo4": 34 * 2, "turbo2": 18 * 2, "turbo4v2": 52}
    expected |= {"kivi4": 40 * 2, "kivi2": 24 * 2}
    assert {name: codec.row_bytes(64) for name, codec in CODECS.items()} == expected


def test_numbers_name_codecs():
    for codec in CODECS.values():
        assert codec_of(codec.keys.number) is codec.keys and codec.values is not PLAIN
    with pytest.raises(ValueError, match="codec 99"):
        codec_of(99)


@pytest.mark.parametrize("codec", [UNIFORM8, UNIFORM4, UNIFORM2], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_elements_are_within_half_a_step(codec, dim):
    x = heads_of(dim, torch.float32)[:30]
    found = unpack(pack(x, codec), dim, codec)
    for group in range(0, dim, codec.group):
        part = slice(group, group + codec.group)
        low, high = x[..., part].amin(-1), x[..., part].amax(-1)
        step = (high - low) / (2**codec.bits - 1)
        # Scale and zero are off by their rounding to fp16, 2^-11.
        allowed = 0.5 * step + 2**-11 * (low.abs() + (high - low).abs()) + 1e-6
        assert ((found - x)[..., part].abs() <= allowed[..., None]).all()


@pytest.mark.parametrize("codec", [CHANNEL4, CHANNEL2], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_channels_are_within_half_a_step_of_their_block(codec, dim):
    heads = heads_of(dim, torch.float32)
    x = torch.cat([heads[:30], heads[38:], heads[:8]])
    x[..., 5] += 40
    blocks = pack(x, codec)
    assert blocks.shape == (3, 3, codec.block_bytes(dim))
    found = unpack(blocks, dim, codec)
    assert torch.equal(found[70:], found[69:70].expand(26, -1, -1)), "the last row fills it up"
    for first in (0, 32, 64):
        part = slice(first, min(first + 32, 70))
        low, high = x[part].amin(0), x[part].amax(0)
        step = (high - low) / (2**codec.bits - 1)
        allowed = 0.5 * step + 2**-11 * (low.abs() + (high - low).abs()) + 1e-6
        assert ((found[part] - x[part]).abs() <= allowed).all()


def test_an_offset_of_a_channel_costs_nothing_there():
    """What KIVI is for: keys have channels that are large in every token."""
    x = randn(320, 64, dtype=torch.float32)
    plain = [relative_errors(x, codec).mean() for codec in (CHANNEL2, UNIFORM2)]
    x[:, 7] += 50
    offset = [(unpack(pack(x, c), 64, c) - x).square().mean() for c in (CHANNEL2, UNIFORM2)]
    assert plain[0] < 2 * plain[1] and offset[0] < 1.2 * plain[0] * x[:, :7].square().mean()
    assert offset[1] > 10 * offset[0]


# Squared error of the best quantizer of a standard normal variable (J. Max, Quantizing for minimum
# distortion, 1960, table I).
LEAST_ERRORS = {ROTATED2: 0.1175, ROTATED4: 0.009497}


def relative_errors(x: Tensor, codec: packed.Codec) -> Tensor:
    """``[...]``, squared, of each head."""
    found = unpack(pack(x, codec), x.shape[-1], codec)
    return (found - x).square().sum(-1) / x.square().sum(-1)


@pytest.mark.parametrize("codec", LEAST_ERRORS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 80])
def test_a_rotation_reaches_the_error_of_gaussian_elements(codec, dim):
    x = randn(4000, dim, dtype=torch.float32)
    bound = LEAST_ERRORS[codec]
    assert 0.9 * bound < relative_errors(x, codec).mean() < bound
    if dim == 80:
        return  # 16 channels are mixed: an outlier stays one
    x[:, 5] *= 30
    spread = relative_errors(x, codec).mean()
    assert spread < 1.25 * bound, "whatever the outliers"
    assert spread < relative_errors(x, UNIFORM4).mean() or codec is ROTATED2


def test_rotations_are_orthogonal_and_mix():
    matrix = hadamard(torch.eye(64) * signs(64), 64) / 8
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(64))
    assert (matrix.abs() == 0.125).all()
    assert 16 < (signs(64) < 0).sum() < 48 and not torch.equal(signs(128)[:64], signs(128)[64:])
    blocks = hadamard(torch.eye(80), 16)
    assert (blocks != 0).sum() == 80 * 16


@pytest.mark.parametrize("codec", LEAST_ERRORS, ids=str)
def test_levels_are_means_of_what_is_nearest_to_them(codec):
    found = torch.tensor(levels(codec.bits), dtype=torch.float64)
    assert len(found) == 2**codec.bits and torch.equal(found, -found.flip(0))
    normal = torch.distributions.Normal(torch.zeros((), dtype=found.dtype), 1.0)
    edges = torch.cat([found[:1] - 99, (found[1:] + found[:-1]) / 2, found[-1:] + 99])
    chance, density = normal.cdf(edges).diff(), normal.log_prob(edges).exp()
    torch.testing.assert_close(-density.diff() / chance, found, atol=1e-6, rtol=0)
    error = 1 - (found.square() * chance).sum()
    assert abs(error / LEAST_ERRORS[codec] - 1) < 1e-3


PAIRS = [(UNIFORM8, UNIFORM4), (ROTATED4, ROTATED2), (UNIFORM2, UNIFORM2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("codecs", PAIRS, ids=str)
def test_pack_kv_is_the_reference(pack_op, codecs, dim, dtype):
    k, v = heads_of(dim, dtype), heads_of(dim, dtype).flip(0)
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(1))[:70].int()
    stacked = torch.stack([k, v], 2)
    pool = empty(KvCodec("mixed", *codecs), dim)
    pack_op(stacked[:, :, 0], stacked[:, :, 1], pool, slots)
    for x, (found, codec) in zip((k, v), pool.parts, strict=True):
        expected = torch.full_like(found, 7)
        expected[slots.long()] = pack(x, codec)
        assert torch.equal(found, expected)
        assert (expected == 7).all((1, 2)).sum() == 20, "others stay"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("codecs", [(CHANNEL4, UNIFORM4), (CHANNEL2, CHANNEL2)], ids=str)
def test_blocks_are_packed_as_in_the_reference(pack_op, codecs, dim, dtype):
    """Whole blocks in any order, the last one not full."""
    k, v = heads_of(dim, dtype), heads_of(dim, dtype).flip(0)
    slots = (torch.tensor([3, 0, 2])[:, None] * 32 + torch.arange(32)).flatten()[:70].int()
    stacked = torch.stack([k, v], 2)
    pool = empty(KvCodec("mixed", *codecs), dim, 5 * 32)
    pack_op(stacked[:, :, 0], stacked[:, :, 1], pool, slots)
    for x, (found, codec) in zip((k, v), pool.parts, strict=True):
        expected = torch.full_like(found, 7)
        expected[(slots[:: codec.tokens] // codec.tokens).long()] = pack(x, codec)
        assert torch.equal(found, expected)
        assert (expected == 7).all((1, 2)).sum() == (2 if codec.tokens == 32 else 90)


@pytest.mark.parametrize("bad", [(0, 1), (33, 34), (5, 37), (31, 63)])
def test_slots_that_make_no_block_are_refused(pack_op, bad):
    k, v = randn(2, 40, 3, 64, dtype=torch.bfloat16)
    pool = empty(CODECS["kivi4"], 64, 96)
    slots = torch.arange(40, dtype=torch.int32)
    pack_op(k, v, pool, slots)
    pool.keys.fill_(7)
    slots[bad[0]] = bad[1]
    with pytest.raises(ValueError, match=r"slots: entry .* block of 32"):
        pack_op(k, v, pool, slots)
    assert (pool.keys == 7).all(), "nothing has been written"


MIXES = (
    ((UNIFORM4, UNIFORM4), (UNIFORM8, UNIFORM4)),
    ((ROTATED4, ROTATED4), (ROTATED4, ROTATED2)),
    ((CHANNEL4, UNIFORM2), (CHANNEL2, CHANNEL4)),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((8, 1), 72), ((4, 4), 128)], ids=str)
@pytest.mark.parametrize("pairs", MIXES, ids=str)
def test_attention_is_that_over_the_decoded_pools(op, pairs, dtype, heads, dim):
    """Draft and verify rows, plain and packed pools in one pass, keys packed unlike values."""
    groups = (Group(1, 300), Group(9, 620), Group(1, 64), Group(3, 530), Group(1, 90))
    viewed = view_prefixes(build(groups, heads, dim, dtype).args, [20, 9, 1, 274, 26])
    moved = move_views(viewed, [1, 2, 3, 1, 0])
    coded, decoded = pack_views(moved, [*pairs, (PLAIN, PLAIN)])
    found, expected = (Batch(args).attend(op) for args in (coded, decoded))
    assert expected.isfinite().all()
    assert same_bits(found, expected)
    exact = Batch(viewed).attend(op)
    assert same_bits(found[10:11], exact[10:11]), "the third group is not packed"
    assert not same_bits(found[:1], exact[:1]), "control: packing changes something"
    # One step of 4 bits is a fifteenth of the range of some 32 normal numbers; with 2 bits an
    # element is off by a third.
    assert (found - exact).abs().max() < (0.5 if pairs is MIXES[0] else 1)


def test_views_per_kv_head(op):
    groups = (Group(rows=1, tail=7, view=(0, 300, 41)), Group(rows=2, tail=30, view=(70, 64, 65)))
    moved = move_views(build(groups).args, [1, 2])
    coded, decoded = pack_views(moved, [(UNIFORM8, UNIFORM8), (ROTATED2, ROTATED4)])
    assert same_bits(Batch(coded).attend(op), Batch(decoded).attend(op))


@pytest.mark.parametrize(
    ("codec", "bytes_"), [(UNIFORM4, (0, 31, 33, 35, 37, 39)), (ROTATED4, (0, 31, 33))]
)
def test_codes_and_parameters_count(op, codec, bytes_):
    """Negative control: each byte of a row changes what its groups see, and only that."""
    viewed = view_prefixes(build((Group(2, 90), Group(1, 40)), dtype=torch.float32).args, [2, 40])
    args, _ = pack_views(move_views(viewed, [1, 0]), [(codec, codec)])
    expected = Batch(args).attend(op)
    pool = args["view_pools"][0]
    for byte in bytes_:
        changed = pool.values.clone()
        changed[args["view_indices"][5], 0, byte] ^= 0x11
        found = Batch(args | {"view_pools": [pool._replace(values=changed)]}).attend(op)
        assert not same_bits(found[:2, :3], expected[:2, :3])
        assert same_bits(found[:, 3:], expected[:, 3:])
        assert same_bits(found[2:], expected[2:])


def pack_arguments() -> dict[str, Any]:
    k, v = randn(2, 5, 3, 64, dtype=torch.bfloat16)
    slots = torch.arange(5, dtype=torch.int32)
    return {"k": k, "v": v, "pool": empty(CODECS["int4"], 64), "slots": slots}


BAD_ARGUMENTS = [
    ("k", lambda a: a["k"].double(), TypeError),
    ("k", lambda a: a["k"][..., :60], ValueError),
    ("v", lambda a: a["v"][:4], ValueError),
    ("v", lambda a: a["v"].float(), ValueError),
    ("slots", lambda a: a["slots"].long(), TypeError),
    ("slots", lambda a: a["slots"][:3], ValueError),
    ("slots", lambda a: a["slots"] - 1, IndexError),
    ("slots", lambda a: a["slots"] + 86, IndexError),
    ("pool", lambda a: a["pool"]._replace(keys=a["pool"].keys.short()), TypeError),
    ("pool", lambda a: a["pool"]._replace(keys=a["pool"].keys[..., :39]), ValueError),
    ("pool", lambda a: a["pool"]._replace(values=a["pool"].values[:, :2]), ValueError),
    ("pool", lambda a: a["pool"]._replace(value_codec=0), ValueError),
    ("pool", lambda a: a["pool"]._replace(value_codec=ROTATED4.number), ValueError),
]


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    BAD_ARGUMENTS,
    ids=[f"{n}-{i}" for i, (n, *_) in enumerate(BAD_ARGUMENTS)],
)
def test_bad_arguments_are_named(pack_op, name, bad, error):
    given = pack_arguments()
    with pytest.raises(error, match=name):
        pack_op(**given | {name: bad(given)})
    assert all((part == 7).all() for part, _ in given["pool"].parts), "nothing has been written"


def test_attention_names_a_pool_that_its_codec_did_not_make():
    args = move_views(view_prefixes(build((Group(1, 90),)).args, [2]), [1])
    odd = [torch.zeros(len(pool), 3, 41, dtype=torch.uint8) for pool in args["view_pools"][0][:2]]
    pool = ViewPool(*odd, UNIFORM4.number, UNIFORM4.number)
    with pytest.raises(ValueError, match=r"view_pools\[0\] keys.*40 bytes"):
        attention.ragged_attention(**args | {"view_pools": [pool]})

"""Packed pools: pack_kv, and attention over what it packed."""

import pytest
import torch
from batches import BUILT, DTYPES, Batch, Group, build, randn, same_bits
from moving import move_views, pack_views, view_prefixes
from torch import Tensor

from sgl_kernel_ext import CODECS, _loader, attention, pack_kv, packed
from sgl_kernel_ext.reference import attention as reference
from sgl_kernel_ext.reference.packed import pack, unpack

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


def empty(codec: str, dim: int, slots: int = 90) -> Tensor:
    return torch.full((slots, 3, CODECS[codec].row_bytes(dim)), 7, dtype=torch.uint8)


def test_row_widths_tell_codecs_apart():
    for dim in range(8, 1025, 8):
        assert len({codec.row_bytes(dim) for codec in CODECS.values()}) == len(CODECS)
    assert [CODECS[name].row_bytes(64) for name in ("int8", "int4")] == [68, 40]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", DIMS)
def test_elements_are_within_half_a_step(codec, dim):
    x = heads_of(dim, torch.float32)[:30]
    found = unpack(pack(x, CODECS[codec]), dim)
    for group in range(0, dim, CODECS[codec].group):
        part = slice(group, group + CODECS[codec].group)
        low, high = x[..., part].amin(-1), x[..., part].amax(-1)
        step = (high - low) / (2 ** CODECS[codec].bits - 1)
        # Scale and zero are off by their rounding to fp16, 2^-11.
        allowed = 0.5 * step + 2**-11 * (low.abs() + (high - low).abs()) + 1e-6
        assert ((found - x)[..., part].abs() <= allowed[..., None]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_pack_kv_is_the_reference(pack_op, dim, dtype):
    k, v = heads_of(dim, dtype), heads_of(dim, dtype).flip(0)
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(1))[:70].int()
    stacked = torch.stack([k, v], 2)
    k_packed, v_packed = empty("int8", dim), empty("int4", dim)
    pack_op(stacked[:, :, 0], stacked[:, :, 1], k_packed, v_packed, slots)
    for x, pool, name in ((k, k_packed, "int8"), (v, v_packed, "int4")):
        expected = empty(name, dim)
        expected[slots.long()] = pack(x, CODECS[name])
        assert torch.equal(pool, expected)
        assert (expected == 7).all((1, 2)).sum() == 20, "others stay"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((8, 1), 72), ((4, 4), 128)], ids=str)
def test_attention_is_that_over_the_decoded_pools(op, dtype, heads, dim):
    """Draft and verify rows, plain and packed pools in one pass, keys packed unlike values."""
    groups = (Group(1, 300), Group(9, 620), Group(1, 64), Group(3, 530), Group(1, 90))
    viewed = view_prefixes(build(groups, heads, dim, dtype).args, [20, 9, 1, 274, 26])
    moved = move_views(viewed, [1, 2, 3, 1, 0])
    coded, decoded = pack_views(moved, [("int4", "int4"), ("int8", "int4"), None])
    found, expected = (Batch(args).attend(op) for args in (coded, decoded))
    assert expected.isfinite().all()
    assert same_bits(found, expected)
    exact = Batch(viewed).attend(op)
    assert same_bits(found[10:11], exact[10:11]), "the third group is not packed"
    assert not same_bits(found[:1], exact[:1]), "control: packing changes something"
    # One step of 4 bits is a fifteenth of the range of some 32 normal numbers.
    assert (found - exact).abs().max() < 0.5


def test_views_per_kv_head(op):
    groups = (Group(rows=1, tail=7, view=(0, 300, 41)), Group(rows=2, tail=30, view=(70, 64, 65)))
    moved = move_views(build(groups).args, [1, 2])
    coded, decoded = pack_views(moved, [("int8", "int8"), ("int4", "int4")])
    assert same_bits(Batch(coded).attend(op), Batch(decoded).attend(op))


def test_codes_scales_and_zeros_count(op):
    """Negative control: each byte of a row changes what its groups see, and only that."""
    viewed = view_prefixes(build((Group(2, 90), Group(1, 40)), dtype=torch.float32).args, [2, 40])
    args, _ = pack_views(move_views(viewed, [1, 0]), [("int4", "int4")])
    expected = Batch(args).attend(op)
    k, v = args["view_pools"][0]
    for byte in (0, 31, 33, 35, 37, 39):
        changed = v.clone()
        changed[args["view_indices"][5], 0, byte] ^= 0x11
        found = Batch(args | {"view_pools": [(k, changed)]}).attend(op)
        assert not same_bits(found[:2, :3], expected[:2, :3])
        assert same_bits(found[:, 3:], expected[:, 3:])
        assert same_bits(found[2:], expected[2:])


def pack_arguments() -> dict[str, Tensor]:
    k, v = randn(2, 5, 3, 64, dtype=torch.bfloat16)
    slots = torch.arange(5, dtype=torch.int32)
    pools = {"k_packed": empty("int4", 64), "v_packed": empty("int4", 64)}
    return {"k": k, "v": v, "slots": slots} | pools


BAD_ARGUMENTS = [
    ("k", lambda a: a["k"].double(), TypeError),
    ("k", lambda a: a["k"][..., :60], ValueError),
    ("v", lambda a: a["v"][:4], ValueError),
    ("v", lambda a: a["v"].float(), ValueError),
    ("slots", lambda a: a["slots"].long(), TypeError),
    ("slots", lambda a: a["slots"][:3], ValueError),
    ("slots", lambda a: a["slots"] - 1, IndexError),
    ("slots", lambda a: a["slots"] + 86, IndexError),
    ("k_packed", lambda a: a["k_packed"].short(), TypeError),
    ("k_packed", lambda a: a["k_packed"][..., :39], ValueError),
    ("v_packed", lambda a: a["v_packed"][:, :2], ValueError),
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
    assert (given["k_packed"] == 7).all(), "nothing has been written"


def test_attention_names_a_pool_that_no_codec_made():
    args = move_views(view_prefixes(build((Group(1, 90),)).args, [2]), [1])
    odd = [torch.zeros(len(pool), 3, 41, dtype=torch.uint8) for pool in args["view_pools"][0]]
    with pytest.raises(ValueError, match=r"view_pools\[0\] keys.*68 \(int8\), 40 \(int4\)"):
        attention.ragged_attention(**args | {"view_pools": [tuple(odd)]})

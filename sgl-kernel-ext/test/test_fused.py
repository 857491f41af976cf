"""The fused ops against their torch references, row by row, for every module this CPU runs."""

import random

import pytest
import torch
import torch.nn.functional as F

import sgl_kernel_ext
from sgl_kernel_ext import _loader
from sgl_kernel_ext.reference import fused as reference

BUILT = [isa for isa in _loader.supported_isas() if _loader._is_built(isa)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INTEGERS = [torch.int64, torch.int32]
EPS = 1e-5


@pytest.fixture(params=BUILT)
def ops(request):
    return _loader.load_isa(request.param)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def all_16_bit_values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def test_something_is_built():
    assert BUILT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 16, 33, 100, 576, 1536, 4096, 8192])
def test_rmsnorm_has_the_bits_of_torch(ops, dtype, hidden):
    weight = randn(hidden, dtype=dtype, seed=1)
    for rows in (1, 3, 17):
        x, residual = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype, seed=2)
        assert torch.equal(ops.rmsnorm(x, weight, EPS, None), reference.rmsnorm(x, weight, EPS))
        expected = x.clone(), residual.clone()
        reference.fused_add_rmsnorm(*expected, weight, EPS)
        ops.fused_add_rmsnorm(x, residual, weight, EPS)
        assert torch.equal(x, expected[0])
        assert torch.equal(residual, expected[1])


def test_rmsnorm_of_heads_in_a_slice_and_in_place(ops):
    qkv = randn(5, 6 * 64, dtype=torch.bfloat16)
    weight = randn(64, dtype=torch.bfloat16, seed=1)
    untouched = qkv[:, 4 * 64 :].clone()
    heads = qkv[:, : 4 * 64].view(5, 4, 64)
    expected = reference.rmsnorm(heads, weight, EPS)
    assert ops.rmsnorm(heads, weight, EPS, heads).data_ptr() == qkv.data_ptr()
    assert torch.equal(heads, expected)
    assert torch.equal(qkv[:, 4 * 64 :], untouched)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_silu_and_mul_has_the_bits_of_torch_for_every_16_bit_gate(ops, dtype):
    gate = all_16_bit_values(dtype)[None]
    for up in (torch.ones_like(gate), randn(1, 2**16, dtype=dtype)):
        x = torch.cat([gate, up], dim=1)
        got, expected = ops.silu_and_mul(x, None), reference.silu_and_mul(x)
        nan = expected.isnan()
        assert torch.equal(got.isnan(), nan)
        assert torch.equal(got[~nan], expected[~nan])


def test_silu_and_mul_in_fp32(ops):
    gate, up = randn(64, 500) * 8, randn(64, 500, seed=1)
    got = ops.silu_and_mul(torch.cat([gate, up], dim=1), None)
    exact = F.silu(gate.double()) * up.double()
    torch.testing.assert_close(got.double(), exact, rtol=3e-7, atol=1e-37)


@pytest.mark.parametrize("index_dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 64), (24, 20)])
def test_rotary_and_store_have_the_bits_of_torch(
    ops, dtype, is_neox, index_dtype, head_size, rotary_dim
):
    rows, q_heads, kv_heads, slots = 7, 3, 2, 40
    widths = [q_heads * head_size, kv_heads * head_size, kv_heads * head_size]
    positions = torch.tensor([0, 5, 49, 3, 3, 20, 11], dtype=index_dtype)
    loc = torch.tensor([39, 0, 7, 8, 21, 2, 30], dtype=index_dtype)
    for cache_dtype in {dtype, torch.float32}:
        cache = randn(50, rotary_dim, dtype=cache_dtype, seed=1)
        results = []
        for implementation in (reference, ops):
            qkv = randn(rows, sum(widths), dtype=dtype)
            q, k, v = qkv.split(widths, dim=1)
            pools = [torch.zeros(slots, kv_heads, head_size, dtype=dtype) for _ in range(4)]
            implementation.rope_store_kv(
                positions, q, k, v, head_size, cache, is_neox, *pools[:2], loc
            )
            implementation.store_kv(k, v.unflatten(1, (-1, head_size)), *pools[2:], loc)
            results.append((qkv, *pools))
            assert torch.equal(pools[0], pools[2])
            assert pools[0][loc.long()].any()
        for expected, got in zip(*results, strict=True):
            assert torch.equal(expected, got)
        separate = randn(rows, sum(widths), dtype=dtype)
        q, k, _ = separate.split(widths, dim=1)
        ops.rotary(positions, q, k.unflatten(1, (-1, head_size)), head_size, cache, is_neox)
        assert torch.equal(separate, results[0][0])
        assert not torch.equal(separate, randn(rows, sum(widths), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 31, 33, 1000, 16384, 16401, 49152])
def test_argmax_is_the_first_of_the_largest(ops, dtype, vocab):
    ties = torch.randint(-3, 4, (4, vocab), generator=torch.Generator().manual_seed(vocab))
    special = randn(6, vocab, dtype=dtype)
    special[0] = -torch.inf
    special[1, vocab // 2 :] = torch.nan
    special[2, [vocab // 3, vocab // 2]] = torch.inf
    special[3] = torch.nan
    special[4] = -0.0
    special[4, -1] = 0.0
    special[5, -1] = 100
    for x in (ties.to(dtype), special):
        is_best = torch.where(x.isnan().any(1, keepdim=True), x.isnan(), x == x.amax(1, True))
        first = torch.tensor([row.nonzero()[0].item() for row in is_best])
        assert torch.equal(ops.argmax_rows(x), first)
        assert torch.equal(reference.argmax_rows(x), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_rows(ops, dtype):
    source = randn(9, 2, 5, dtype=dtype)[:, :1]
    out = torch.zeros(11, 1, 5, dtype=dtype)
    index, at = torch.tensor([8, 0, 0, 3], dtype=torch.int32), torch.tensor([10, 2, 7, 5])
    ops.copy_rows(source, index, out, at)
    assert torch.equal(out[at], source[index.long()])
    assert int((out != 0).any(2).sum()) == 4
    with pytest.raises(ValueError, match="copy_rows"):
        ops.copy_rows(source, index, out[:, :, :4], at)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_their_company(ops, dtype):
    """Enough rows that the ops go parallel, compared with one row at a time."""
    rows, hidden = 300, 1024
    x, residual = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype, seed=1)
    weight = randn(hidden, dtype=dtype, seed=2)
    whole, parts = (x.clone(), residual.clone()), (x.clone(), residual.clone())
    ops.fused_add_rmsnorm(*whole, weight, EPS)
    norm, silu, best = ops.rmsnorm(x, weight, EPS, None), ops.silu_and_mul(x, None), None
    best = ops.argmax_rows(x)
    dice = random.Random(0)
    begin = 0
    while begin < rows:
        part = slice(begin, begin + dice.randint(1, 40))
        ops.fused_add_rmsnorm(parts[0][part], parts[1][part], weight, EPS)
        assert torch.equal(ops.rmsnorm(x[part], weight, EPS, None), norm[part])
        assert torch.equal(ops.silu_and_mul(x[part], None), silu[part])
        assert torch.equal(ops.argmax_rows(x[part]), best[part])
        begin = part.stop
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
    other = x.clone()
    other[5, 100] += 1
    assert not torch.equal(ops.rmsnorm(other, weight, EPS, None), norm)


def test_bad_index_writes_nothing(ops):
    q, k = randn(2, 64), randn(2, 64)
    before = q.clone(), k.clone()
    pool = torch.zeros(10, 1, 64)
    cache = randn(20, 64)
    good, bad = torch.tensor([3, 4]), torch.tensor([3, 20])
    with pytest.raises(IndexError, match=r"positions\[1\] = 20 is outside \[0, 20\)"):
        ops.rotary(bad, q, k, 64, cache, True)
    with pytest.raises(IndexError, match=r"loc\[1\] = 20 is outside \[0, 10\)"):
        ops.rope_store_kv(good, q, k, k, 64, cache, True, pool, pool, bad)
    with pytest.raises(IndexError, match=r"loc\[0\] = -1"):
        ops.store_kv(k, k, pool, pool, torch.tensor([-1, 4]))
    with pytest.raises(IndexError, match="index"):
        ops.copy_rows(q, torch.tensor([0, 2]), k, torch.tensor([0, 1]))
    with pytest.raises(IndexError, match="index"):
        ops.copy_rows(q, torch.tensor([0, 1]), k, torch.tensor([0, 2]))
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert not pool.any()


def test_misfits_are_refused(ops):
    x, weight = randn(2, 64), randn(64)
    with pytest.raises(ValueError, match="weight"):
        ops.rmsnorm(x, randn(63), EPS, None)
    with pytest.raises(ValueError, match="weight"):
        ops.rmsnorm(x, weight.half(), EPS, None)
    with pytest.raises(ValueError, match="contiguous"):
        ops.rmsnorm(randn(64, 2).T, weight, EPS, None)
    with pytest.raises(ValueError, match="residual"):
        ops.fused_add_rmsnorm(x, x.half(), weight, EPS)
    with pytest.raises(ValueError, match="2N"):
        ops.silu_and_mul(randn(2, 63), None)
    with pytest.raises(ValueError, match="head_size 48"):
        ops.rotary(torch.tensor([0, 1]), x, x, 48, randn(9, 32), True)
    with pytest.raises(ValueError, match="pool"):
        ops.store_kv(x, x, torch.zeros(4, 32), torch.zeros(4, 32), torch.tensor([0, 1]))


def test_empty_batch(ops):
    x, none = torch.empty(0, 64), torch.empty(0, dtype=torch.int64)
    assert ops.rmsnorm(x, torch.ones(64), EPS, None).shape == (0, 64)
    assert ops.silu_and_mul(x, None).shape == (0, 32)
    assert ops.argmax_rows(x).shape == (0,)
    ops.rotary(none, x, x, 64, torch.ones(4, 64), True)
    ops.store_kv(x, x, torch.ones(4, 1, 64), torch.ones(4, 1, 64), none)


def test_public_functions_run_the_active_module():
    x, weight = randn(3, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16, seed=1)
    module = _loader.cpu_module()
    assert module is not None, "precondition: C++ is active"
    assert torch.equal(sgl_kernel_ext.rmsnorm(x, weight, EPS), module.rmsnorm(x, weight, EPS, None))
    assert torch.equal(sgl_kernel_ext.silu_and_mul(x), module.silu_and_mul(x, None))
    assert torch.equal(sgl_kernel_ext.argmax_rows(x), module.argmax_rows(x))
    out = torch.zeros(2, 64, dtype=torch.bfloat16)
    sgl_kernel_ext.copy_rows(x, torch.tensor([2]), out, torch.tensor([1]))
    assert torch.equal(out[1], x[2])

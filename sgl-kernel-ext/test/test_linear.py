"""Row invariance, accuracy and edges of the linear, for every module this CPU runs."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sgl_kernel_ext
from sgl_kernel_ext import _loader
from sgl_kernel_ext.reference import linear as reference

BUILT = [isa for isa in _loader.supported_isas() if _loader._is_built(isa)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Odd K, K below one step, N below, at and beyond blocks of 32, and the default model's shapes.
SHAPES = [(1, 1), (2, 31), (77, 45), (64, 32), (33, 160), (576, 100), (1536, 96)]
MAX_ROWS = 130


@pytest.fixture(params=BUILT)
def ops(request):
    return _loader.load_isa(request.param)


@pytest.fixture(autouse=True)
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def problem(k: int, n: int, dtype: torch.dtype, rows: int = MAX_ROWS, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x, w, bias = (torch.randn(s, generator=generator) for s in ((rows, k), (n, k), (n,)))
    return x.to(dtype), w.to(dtype), bias.to(dtype)


def test_something_is_built():
    assert BUILT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_rows_do_not_depend_on_their_company(ops, dtype, k, n):
    """Every M at one thread; a sample of them and a shuffled batch at two."""
    x, w, bias = problem(k, n, dtype)
    packed = ops.pack_weight(w)
    torch.set_num_threads(1)
    alone = torch.cat([ops.linear(row[None], packed, n, bias, None) for row in x])
    dice = random.Random(k * n)
    every = range(1, MAX_ROWS + 1)
    for threads, counts in ((1, every), (2, dice.sample(every, 12))):
        torch.set_num_threads(threads)
        for m in counts:
            start = dice.randrange(MAX_ROWS - m + 1)
            got = ops.linear(x[start : start + m], packed, n, bias, None)
            assert torch.equal(got, alone[start : start + m]), f"{m} rows from {start}"
    order = torch.tensor(dice.sample(range(MAX_ROWS), MAX_ROWS))
    assert torch.equal(ops.linear(x[order], packed, n, bias, None), alone[order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_in_chunks_at_one_and_two_threads(ops, dtype):
    x, w, _ = problem(192, 400, dtype, rows=700)
    packed = ops.pack_weight(w)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(ops.linear(x, packed, 400, None, None))
    assert torch.equal(*results)
    for row in (0, 127, 128, 699):
        alone = ops.linear(x[row : row + 1], packed, 400, None, None)
        assert torch.equal(results[0][row : row + 1], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_close_to_float64_and_to_the_reference(ops, dtype, k, n):
    x, w, bias = problem(k, n, dtype, rows=17)
    got = ops.linear(x, ops.pack_weight(w), n, bias, None)
    exact = x.double() @ w.double().T + bias.double()
    # fp32 sums of k terms, then one rounding: half an ulp of the dtype.
    magnitude = x.double().abs() @ w.double().abs().T + bias.double().abs()
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + k * 2.0**-23 * magnitude
    assert ((got.double() - exact).abs() <= bound + torch.finfo(dtype).smallest_normal).all()
    ref = reference.linear(x, w, bias)
    assert ((ref.double() - exact).abs() <= bound + torch.finfo(dtype).smallest_normal).all()


@pytest.mark.parametrize("isa", BUILT)
def test_sum_is_the_documented_chain(isa):
    """bf16 products are exact in fp32, so numpy can follow the chain bit by bit."""
    ops = _loader.load_isa(isa)
    x, w, _ = problem(77, 45, torch.bfloat16, rows=3)
    order = list(range(77))
    if isa == "avx512_bf16":  # vdpbf16ps adds the odd product of a pair first
        order = [k for p in range(0, 77, 2) for k in (p + 1, p) if k < 77]
    acc = np.zeros((3, 45), np.float32)
    for k in order:
        acc += x[:, k].float().numpy()[:, None] * w[:, k].float().numpy()[None, :]
    got = ops.linear(x, ops.pack_weight(w), 45, None, None)
    assert torch.equal(got, torch.from_numpy(acc).bfloat16())


def test_comparison_notices_one_changed_weight_and_another_order(ops):
    """Negative controls: torch.equal on this data does tell one bit and one order from another."""
    x, w, _ = problem(576, 100, torch.float32)
    before = ops.linear(x, ops.pack_weight(w), 100, None, None)
    backwards = ops.linear(x.flip(1).contiguous(), ops.pack_weight(w.flip(1)), 100, None, None)
    assert not torch.equal(before, backwards)
    w[37, 5] *= 1 + 2**-10
    changed = ops.linear(x, ops.pack_weight(w), 100, None, None) != before
    assert changed[:, 37].any()
    assert changed.sum() == changed[:, 37].sum()


def test_record_whether_torch_is_row_invariant(record_property):
    """Why this op exists. Not a requirement on torch: the answer goes to the report."""
    differs = {}
    for dtype in (torch.bfloat16, torch.float32):
        for k in (576, 1536, 4096):
            x, w, _ = problem(k, 576, dtype, rows=33)
            alone = torch.cat([F.linear(row[None], w) for row in x])
            bad = [m for m in range(2, 34) if not torch.equal(F.linear(x[:m], w), alone[:m])]
            if bad:
                differs[f"{dtype} K={k}"] = bad
    record_property("torch_linear_differs_from_one_row", str(differs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows_out_and_bias(ops, dtype):
    wide, w, bias = problem(96, 40, dtype, rows=9)
    x = wide[:, 8:72]
    packed = ops.pack_weight(w[:, :64])
    plain = ops.linear(x.contiguous(), packed, 40, bias, None)
    assert torch.equal(ops.linear(x, packed, 40, bias, None), plain)
    frame = torch.full((9, 50), 7.0, dtype=dtype)
    assert ops.linear(x, packed, 40, bias, frame[:, 5:45]).data_ptr() == frame[:, 5:].data_ptr()
    assert torch.equal(frame[:, 5:45], plain)
    assert (frame[:, :5] == 7).all()
    assert (frame[:, 45:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_beyond_a_row_is_not_read(ops, dtype):
    frame = torch.full((4, 10), float("nan"), dtype=dtype)
    frame[:, :7] = 1
    got = ops.linear(frame[:, :7], ops.pack_weight(torch.ones(33, 7, dtype=dtype)), 33, None, None)
    assert torch.equal(got, torch.full((4, 33), 7.0, dtype=dtype))


def test_empty_batch(ops):
    got = ops.linear(torch.empty(0, 64), ops.pack_weight(torch.ones(48, 64)), 48, None, None)
    assert got.shape == (0, 48)


def test_packed_weight_round_trip():
    for dtype in DTYPES:
        _, w, bias = problem(77, 45, dtype)
        packed = sgl_kernel_ext.pack_weight(w, bias)
        assert packed.shape == (45, 77)
        assert packed.dtype == dtype
        assert packed.nbytes >= w.nbytes + bias.nbytes
        assert torch.equal(packed.unpack(), w)
        x = problem(77, 45, dtype, rows=3)[0]
        with_bias = sgl_kernel_ext.linear(x, packed)
        assert torch.equal(with_bias, sgl_kernel_ext.linear(x, sgl_kernel_ext.pack_weight(w), bias))
        assert not torch.equal(with_bias, sgl_kernel_ext.linear(x, packed, torch.zeros_like(bias)))


@pytest.mark.parametrize(
    ("x", "bias", "out", "message"),
    [
        (torch.ones(2, 63), None, None, "packed weight"),
        (torch.ones(2, 64).half(), None, None, "packed weight"),
        (torch.ones(2, 64).double(), None, None, "expected bfloat16"),
        (torch.ones(64, 2).T, None, None, "contiguous"),
        (torch.ones(2, 64), torch.ones(47), None, "bias"),
        (torch.ones(2, 64), None, torch.ones(2, 47), "out must be"),
    ],
)
def test_misfits_are_refused(ops, x, bias, out, message):
    with pytest.raises(ValueError, match=message):
        ops.linear(x, ops.pack_weight(torch.ones(48, 64)), 48, bias, out)


def test_reference_is_row_invariant():
    x, w, bias = problem(77, 45, torch.bfloat16, rows=9)
    whole = reference.linear(x, w, bias)
    for start in range(9):
        assert torch.equal(reference.linear(x[start:], w, bias), whole[start:])

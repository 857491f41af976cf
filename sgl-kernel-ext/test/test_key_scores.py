"""key_scores against its reference, for every module this CPU runs."""

import pytest
import torch

from sgl_kernel_ext import _loader, attention
from sgl_kernel_ext.reference import attention as reference

BUILT = [isa for isa in _loader.supported_isas() if _loader._is_built(isa)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=BUILT)
def op(request, monkeypatch):
    module = _loader.load_isa(request.param)
    monkeypatch.setattr(attention, "cpu_module", lambda: module)
    return attention.key_scores


def inputs(rows=9, keys=600, heads=(9, 3), dim=64, dtype=torch.float32):
    """Queries, a pool that is NaN but at the listed slots, and the slots."""
    slots = torch.randperm(1500, generator=torch.Generator().manual_seed(0))[:keys].int()
    pool = torch.full((1500, heads[1], dim), float("nan"), dtype=dtype)
    pool[slots.long()] = randn(keys, heads[1], dim, dtype=dtype)
    return randn(rows, heads[0], dim, dtype=dtype, seed=1), pool, slots


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (8, 8), (8, 1), (32, 8)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_matches_reference(op, dtype, heads, causal):
    for rows, keys, dim in [(1, 1, 64), (9, 9, 80), (5, 256, 128), (16, 257, 72), (33, 1100, 64)]:
        q, pool, slots = inputs(rows, keys, heads, dim, dtype)
        got = op(q, pool, slots, dim**-0.5, causal=causal)
        expected = reference.key_scores(q, pool, slots, dim**-0.5, causal=causal)
        assert got.shape == (heads[0], keys) and got.dtype == torch.float32
        # Inputs are exact in fp32 and so is every product: only sums and exp round.
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-7)
        torch.testing.assert_close(got.sum(1), torch.full((heads[0],), float(rows)))


def test_keys_a_row_does_not_see(op):
    q, pool, slots = inputs(rows=2)
    pool[slots[-1].long()] = float("nan")
    assert op(q, pool, slots, 0.125).isnan().all(), "the last row sees the last key"
    first = op(q[:1], pool, slots[:-1], 0.125)
    assert first.isfinite().all()
    assert not torch.equal(first, op(q[:1], pool, slots[:-2], 0.125)[:, : len(slots) - 1])


def test_threads_do_not_matter(op):
    q, pool, slots = inputs(rows=16, keys=1300)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(op(q, pool, slots, 0.125))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_bad_arguments_are_named(op):
    q, pool, slots = inputs()
    with pytest.raises(TypeError, match="slots"):
        op(q, pool, slots.long(), 0.125)
    with pytest.raises(ValueError, match="slots"):
        op(q, pool, slots[:8], 0.125)
    with pytest.raises(TypeError, match="k_pool"):
        op(q, pool.half(), slots, 0.125)
    with pytest.raises(IndexError, match="slots"):
        op(q, pool, torch.where(slots == slots[5], 1500, slots), 0.125)

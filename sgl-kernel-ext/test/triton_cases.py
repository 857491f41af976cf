"""Triton kernels against the torch references; run by test_triton.py in a process of its own.

On CUDA as compiled; elsewhere through Triton's interpreter, which must be chosen before triton is
first imported. The interpreter computes with the bit patterns of bf16 and truncates to it, so it
can only check fp32 and fp16.
"""

import pytest
import torch
from interpreted import dot_row_by_row

from sgl_kernel_ext.reference import fused as fused_reference
from sgl_kernel_ext.reference import linear as linear_reference
from sgl_kernel_ext.triton import fused
from sgl_kernel_ext.triton.linear import linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
EPS = 1e-5

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=DEVICE == "cpu")
def interpreted(monkeypatch):
    dot_row_by_row(monkeypatch)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    eps = max(torch.finfo(expected.dtype).eps, 1e-5)
    torch.testing.assert_close(got, expected, rtol=eps, atol=eps)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (77, 45), (192, 70)])
def test_linear_and_its_row_invariance(dtype, k, n):
    x, w, bias = (randn(*s, dtype=dtype) for s in ((40, k), (n, k), (n,)))
    whole = linear(x, w, bias)
    assert_close(whole, linear_reference.linear(x, w, bias))
    for start, stop in ((0, 1), (39, 40), (5, 38)):
        assert torch.equal(linear(x[start:stop], w, bias), whole[start:stop])
    w[0, 0] += 1
    assert not torch.equal(linear(x, w, bias), whole)


def test_linear_of_strided_rows_into_out(dtype):
    wide, w = randn(5, 96, dtype=dtype), randn(40, 64, dtype=dtype)
    frame = torch.zeros(5, 50, dtype=dtype, device=DEVICE)
    linear(wide[:, 8:72], w, out=frame[:, 5:45])
    assert torch.equal(frame[:, 5:45], linear(wide[:, 8:72].contiguous(), w))
    assert not frame[:, 45:].any()
    assert linear(wide[:0, :64], w).shape == (0, 40)
    with pytest.raises(ValueError, match="weight must be"):
        linear(wide, w)


@pytest.mark.parametrize("hidden", [33, 576])
def test_rmsnorm(dtype, hidden):
    x, residual = randn(3, hidden, dtype=dtype), randn(3, hidden, dtype=dtype, seed=1)
    weight = randn(hidden, dtype=dtype, seed=2)
    whole = fused.rmsnorm(x, weight, EPS)
    assert_close(whole, fused_reference.rmsnorm(x, weight, EPS))
    assert torch.equal(fused.rmsnorm(x[2:], weight, EPS), whole[2:])
    expected = x.clone(), residual.clone()
    fused_reference.fused_add_rmsnorm(*expected, weight, EPS)
    fused.fused_add_rmsnorm(x, residual, weight, EPS)
    assert_close(x, expected[0])
    assert torch.equal(residual, expected[1])


def test_rmsnorm_of_heads_in_a_slice(dtype):
    qkv, weight = randn(3, 96, dtype=dtype), randn(16, dtype=dtype)
    heads = qkv[:, :64].view(3, 4, 16)
    expected = fused_reference.rmsnorm(heads, weight, EPS)
    fused.rmsnorm(heads, weight, EPS, heads)
    assert_close(heads, expected)


def test_silu_and_mul(dtype):
    x = randn(3, 2 * 1100, dtype=dtype) * 4
    assert_close(fused.silu_and_mul(x), fused_reference.silu_and_mul(x))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(32, 32), (24, 20)])
def test_rotary_and_store(dtype, is_neox, head_size, rotary_dim):
    positions = torch.tensor([0, 5, 49], device=DEVICE)
    loc = torch.tensor([7, 0, 3], dtype=torch.int32, device=DEVICE)
    cache = randn(50, rotary_dim, dtype=dtype, seed=1)
    results = []
    for implementation in (fused_reference, fused):
        qkv = randn(3, 7 * head_size, dtype=dtype)
        q, k, v = qkv.split([3 * head_size, 2 * head_size, 2 * head_size], dim=1)
        pools = [torch.zeros(9, 2, head_size, dtype=dtype, device=DEVICE) for _ in range(2)]
        implementation.rope_store_kv(positions, q, k, v, head_size, cache, is_neox, *pools, loc)
        results.append((qkv, *pools))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)
    assert not torch.equal(results[0][0], randn(3, 7 * head_size, dtype=dtype))


def test_argmax_is_the_first_of_the_largest(dtype):
    x = randn(5, 9000, dtype=dtype)
    x[0, [7000, 100]] = 50
    x[1, 4096:] = torch.nan
    x[2] = -torch.inf
    x[3] = -0.0
    x[3, 8000] = 0.0
    x[4, [5, 4101]] = torch.inf
    assert fused.argmax_rows(x).tolist() == [100, 4096, 0, 0, 5]


def test_copy_rows(dtype):
    source, index = randn(5, 3, dtype=dtype), torch.tensor([4, 0, 4], device=DEVICE)
    out, at = torch.zeros(7, 3, dtype=dtype, device=DEVICE), torch.tensor([6, 2, 0], device=DEVICE)
    fused.copy_rows(source, index, out, at)
    assert torch.equal(out[at], source[index])
    assert int((out != 0).any(1).sum()) == 3

"""Row-invariant linear for CUDA: one tile shape for every M and no split of K.

Each output is a sum over K in blocks of ``_BLOCK_K`` in ascending order. The shape of the tile, and
with it the instruction that computes a row, never depends on M: unlike cuBLAS, which picks both by
the problem. Rows of a tile beyond M are zeros.
"""

import torch
import triton
import triton.language as tl

_BLOCK_M, _BLOCK_N, _BLOCK_K = 32, 64, 64


@triton.jit
def _linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    w_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + depth
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + ks[None, :],
            mask=(rows[:, None] < M) & (ks[None, :] < K),
            other=0.0,
        )
        w = tl.load(
            w_ptr + cols[None, :] * w_stride + ks[:, None],
            mask=(cols[None, :] < N) & (ks[:, None] < K),
            other=0.0,
        )
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows[:, None] * out_stride + cols[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < M) & (cols[None, :] < N),
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [M, K] @ weight [N, K].T + bias [N]``: fp32 sums, rounded once to x's dtype."""
    (m, k), n = x.shape, weight.shape[0]
    if out is None:
        out = x.new_empty(m, n)
    for name, tensor, shape in (("x", x, (m, k)), ("weight", weight, (n, k)), ("out", out, (m, n))):
        if tensor.shape != shape or tensor.stride(1) != 1 or tensor.dtype != x.dtype:
            raise ValueError(
                f"linear: {name} must be {x.dtype} {list(shape)} with contiguous rows, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
    if m and n:
        _linear_kernel[(triton.cdiv(m, _BLOCK_M), triton.cdiv(n, _BLOCK_N))](
            x,
            weight,
            x if bias is None else bias,
            out,
            m,
            n,
            k,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK_M=_BLOCK_M,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K,
        )
    return out

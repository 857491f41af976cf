"""Torch reference of the row-invariant linear."""

import torch


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [M, K] @ weight [N, K].T + bias [N]``: fp32 sums, rounded once to x's dtype.

    Row-invariant by construction: one row at a time, each from a fresh (equally aligned) copy.
    """
    weight = weight.float()
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    for row, result in zip(x, out, strict=True):
        total = torch.mv(weight, row.to(torch.float32, copy=True))
        result.copy_(total if bias is None else total + bias.float())
    return out

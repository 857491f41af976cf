"""Small checks of the kernels that exactness rests on; a few seconds, no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_kernel_ext import key_scores, linear, pack_weight, ragged_attention
from sgl_kernel_ext.reference import attention as reference

DTYPES = (torch.bfloat16, torch.float32)
CONTEXTS = (10, 500, 2000)
ROWS = 5  # of each group: a verify pass of four drafts
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
# Outputs are below 4 in magnitude: one step of bf16 there, and rounding of fp32 sums.
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float32: 1e-5}
SCORE_TOLERANCE = 1e-3


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Pass:
    """Arguments of one attention pass; see ``sgl_kernel_ext.ragged_attention``."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    req_to_token: Tensor
    q_indptr: Tensor
    req_row: Tensor
    tail_start: Tensor
    tail_end: Tensor

    @classmethod
    def random(cls, dtype: torch.dtype) -> Pass:
        """Groups of ``ROWS`` rows over ``CONTEXTS`` keys at scattered slots."""
        generator = torch.Generator().manual_seed(0)
        slots, groups = sum(CONTEXTS), len(CONTEXTS)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device(), dtype)

        scattered = torch.randperm(slots, generator=generator).int().split(CONTEXTS)
        table = torch.nn.utils.rnn.pad_sequence(list(scattered), batch_first=True)
        return cls(
            q=normal(groups * ROWS, HEADS, HEAD_DIM),
            k_pool=normal(slots, KV_HEADS, HEAD_DIM),
            v_pool=normal(slots, KV_HEADS, HEAD_DIM),
            req_to_token=table.to(device()),
            q_indptr=ints(range(0, groups * ROWS + 1, ROWS)),
            req_row=ints(range(groups)),
            tail_start=ints([0] * groups),
            tail_end=ints(CONTEXTS),
        )

    def row(self, group: int, row: int) -> Pass:
        """The pass that holds nothing but one row of one group."""
        index = group * ROWS + row
        return replace(
            self,
            q=self.q[index : index + 1].contiguous(),
            q_indptr=ints([0, 1]),
            req_row=ints([group]),
            tail_start=ints([0]),
            tail_end=ints([CONTEXTS[group] - (ROWS - 1 - row)]),
        )

    def run(self, op: Callable[..., Tensor] = ragged_attention) -> Tensor:
        return op(*vars(self).values(), HEAD_DIM**-0.5)


def ints(values: range | list[int] | tuple[int, ...]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device())


def linear_rows() -> str:
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((70, 576), generator=generator).to(device(), dtype)
        packed = pack_weight(torch.randn((200, 576), generator=generator).to(device(), dtype))
        alone = torch.cat([linear(row, packed) for row in x.split(1)])
        for rows in (2, 7, 16, 33, 70):
            together = linear(x[:rows].contiguous(), packed)
            if not torch.equal(together, alone[:rows]):
                raise RuntimeError(f"{dtype}: a row changes with {rows} rows in the batch")
    return "a row alone = in batches of 2, 7, 16, 33, 70, bit for bit (bf16, fp32)"


def attention_rows() -> str:
    for dtype in DTYPES:
        whole = Pass.random(dtype)
        together = whole.run()
        for group, context in enumerate(CONTEXTS):
            for row in range(ROWS):
                alone = whole.row(group, row).run()
                if not torch.equal(alone[0], together[group * ROWS + row]):
                    raise RuntimeError(f"{dtype}: row {row} of {context} keys changes alone")
    return f"a row alone = in {len(CONTEXTS)} groups of {ROWS}, bit for bit (bf16, fp32)"


def attention_reference() -> str:
    worst = []
    for dtype in DTYPES:
        whole = Pass.random(dtype)
        error = (whole.run() - whole.run(reference.ragged_attention)).abs().max().item()
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"{dtype}: off by {error:.1e}, allowed is {TOLERANCE[dtype]:.0e}")
        worst.append(f"{error:.1e}")
    return f"largest difference {worst[0]} (bf16), {worst[1]} (fp32)"


def scores_reference() -> str:
    """The scores that choose draft views; a wrong one costs acceptance, not exactness."""
    worst = 0.0
    for dtype in DTYPES:
        whole = Pass.random(dtype)
        slots = whole.req_to_token[1, : CONTEXTS[1]].contiguous()
        queries, scale = whole.q[:ROWS], HEAD_DIM**-0.5
        found = key_scores(queries, whole.k_pool, slots, scale)
        expected = reference.key_scores(queries, whole.k_pool, slots, scale)
        if found.shape != expected.shape:
            raise RuntimeError(f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        error = (found - expected).abs().max().item()
        if not error <= SCORE_TOLERANCE:
            raise RuntimeError(f"{dtype}: off by {error:.1e}, allowed is {SCORE_TOLERANCE:.0e}")
        worst = max(worst, error)
    return f"largest difference {worst:.1e} (bf16, fp32)"


def negative_control() -> str:
    """One changed key must show in every row that sees it, and in no other."""
    whole = Pass.random(torch.float32)
    before = whole.run()
    keys = whole.k_pool.clone()
    keys[int(whole.req_to_token[1, 3])] += 1.0
    changed = (replace(whole, k_pool=keys).run() != before).flatten(1).any(1)
    expected = torch.zeros_like(changed)
    expected[ROWS : 2 * ROWS] = True
    if not torch.equal(changed, expected):
        raise RuntimeError(f"a changed key shows in rows {changed.nonzero().flatten().tolist()}")
    return "one changed key is seen, by the rows of its request alone"

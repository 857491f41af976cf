"""Batches of the attention op over a pool in which unlisted slots hold NaN."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from sgl_kernel_ext import _loader
from sgl_kernel_ext.reference import attention as reference

BUILT = [isa for isa in _loader.supported_isas() if _loader._is_built(isa)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAGE = 64
OUT_OF_RANGE = 2**30


@dataclass(frozen=True)
class Group:
    """n rows over a view (length shared by all KV heads or one per head) and a tail."""

    rows: int
    tail: int
    view: int | tuple[int, ...] = 0


@dataclass(frozen=True)
class Batch:
    """Arguments of ``ragged_attention`` by name."""

    args: dict[str, Tensor | float | None]

    def attend(self, op: Callable[..., Tensor], **kwargs: Tensor) -> Tensor:
        return op(**self.args | kwargs)

    def with_args(self, **changes: Tensor | float | None) -> "Batch":
        return replace(self, args=self.args | changes)

    def select(self, groups: Sequence[int]) -> "Batch":
        """The batch of some of the groups, in the given order."""
        a, indptr, index = self.args, self.args["q_indptr"].tolist(), list(groups)
        rows = [torch.arange(indptr[g], indptr[g + 1]) for g in index]
        per_group = ["req_row", "tail_start", "tail_end"]
        if a["view_len"] is not None:
            per_group += ["view_start", "view_len"]
        return self.with_args(
            q=a["q"][torch.cat(rows)],
            q_indptr=torch.tensor([0, *itertools.accumulate(map(len, rows))], dtype=torch.int32),
            **{name: a[name][index] for name in per_group},
        )

    def chunk(self, group: int, first: int, last: int) -> "Batch":
        """Rows ``first:last`` of one group, as a pass of their own."""
        alone = self.select([group])
        unseen = alone.args["q"].shape[0] - last
        return alone.with_args(
            q=alone.args["q"][first:last],
            q_indptr=torch.tensor([0, last - first], dtype=torch.int32),
            tail_end=alone.args["tail_end"] - unseen,
        )

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output and lse of the same numbers in fp32, and the output had V been |V|."""
        names = ("q", "k_pool", "v_pool")
        exact = self.with_args(**{name: self.args[name].float() for name in names})
        lse = torch.empty(exact.args["q"].shape[:2])
        out = exact.attend(reference.ragged_attention, lse=lse)
        absolute = exact.with_args(v_pool=exact.args["v_pool"].abs())
        return out, lse, absolute.attend(reference.ragged_attention)

    def own_slot(self, group: int, row: int) -> int:
        """Slot of a row's own key."""
        a, indptr = self.args, self.args["q_indptr"].tolist()
        column = int(a["tail_end"][group]) - (indptr[group + 1] - indptr[group] - row)
        return int(a["req_to_token"][a["req_row"][group], column])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@lru_cache
def build(
    groups: tuple[Group, ...],
    heads: tuple[int, int] = (9, 3),
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Batch:
    """A batch over shuffled pages of 64 slots; unlisted slots hold NaN, unused entries no slot."""
    generator = torch.Generator().manual_seed(seed)
    views = [g.view if isinstance(g.view, tuple) else (g.view,) for g in groups]
    listed = sum(g.tail + max(view) for g, view in zip(groups, views, strict=True))
    pages = torch.randperm(listed // PAGE + 2, generator=generator)
    free = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten().int()
    taken = 0
    columns = max((g.tail for g in groups), default=0) + 8
    table = torch.full((len(groups) + 2, columns), OUT_OF_RANGE, dtype=torch.int32)
    rows = torch.randperm(len(groups) + 2, generator=generator)[: len(groups)]
    tail_start = torch.randint(0, 8, (len(groups),), generator=generator)
    view_heads = max(map(len, views), default=1)
    view_len = torch.zeros(len(groups), view_heads, dtype=torch.int32)
    view_start = torch.zeros(len(groups), view_heads, dtype=torch.int64)
    view_indices = [torch.full((3,), OUT_OF_RANGE, dtype=torch.int32)]

    def take(count: int) -> Tensor:
        nonlocal taken
        taken += count
        return free[taken - count : taken]

    for i, group in enumerate(groups):
        table[rows[i], tail_start[i] : tail_start[i] + group.tail] = take(group.tail)
        candidates = take(max(views[i]))
        for h in range(view_heads):
            length = views[i][h % len(views[i])]
            view_start[i, h] = sum(map(len, view_indices))
            view_len[i, h] = length
            kept = torch.randperm(len(candidates), generator=generator)[:length].sort().values
            view_indices += [candidates[kept], torch.full((2,), OUT_OF_RANGE, dtype=torch.int32)]

    slots = free[:taken].long()
    pools = []
    for pool_seed in (seed + 1, seed + 2):
        pool = torch.full((len(free), heads[1], dim), float("nan"), dtype=dtype)
        pool[slots] = randn(len(slots), heads[1], dim, dtype=dtype, seed=pool_seed)
        pools.append(pool)
    has_views = any(g.view for g in groups)
    return Batch(
        dict(
            q=randn(sum(g.rows for g in groups), heads[0], dim, dtype=dtype, seed=seed + 3),
            k_pool=pools[0],
            v_pool=pools[1],
            req_to_token=table,
            q_indptr=torch.tensor(
                [0, *itertools.accumulate(g.rows for g in groups)], dtype=torch.int32
            ),
            req_row=rows,
            tail_start=tail_start,
            tail_end=tail_start + torch.tensor([g.tail for g in groups], dtype=torch.int64),
            scale=dim**-0.5,
            view_indices=torch.cat(view_indices) if has_views else None,
            view_start=view_start if has_views else None,
            view_len=view_len if has_views else None,
        )
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

"""The Triton kernels against the torch reference, on CPU tensors through Triton's interpreter.

One matrix of tests, run twice: natively where there is a CUDA device (``pytest -m cuda``), and
always in a child process with ``TRITON_INTERPRET=1``, which must be set before triton is imported.
The interpreter shows what is computed and in which order; whether a tensor core computes the rows
of a tile alike, and how fast, only the CUDA run can tell. That run is still to be made.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import dot_row_by_row
from moving import move_views, pack_views, view_prefixes
from torch import Tensor

from sgl_kernel_ext import CODECS, packed_pool
from sgl_kernel_ext.packed import (
    CHANNEL2,
    CHANNEL4,
    PLAIN,
    ROTATED2,
    ROTATED4,
    UNIFORM2,
    UNIFORM4,
    UNIFORM8,
)
from sgl_kernel_ext.reference import attention as reference
from sgl_kernel_ext.reference import packed as reference_packed
from sgl_kernel_ext.triton import attention as kernels
from sgl_kernel_ext.triton import packed, tiles

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SLOTS = 3000
# log2(0) and 0 * inf are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


if INTERPRET:
    DEVICES = ["cpu"]
else:
    DEVICES = [pytest.param("cuda", marks=pytest.mark.cuda)]

    @pytest.mark.slow
    def test_in_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        child = subprocess.run(
            command,
            env=os.environ | {"TRITON_INTERPRET": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stdout + child.stderr
        assert " passed" in child.stdout
        assert "skipped" not in child.stdout


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch) -> str:
    if INTERPRET:
        dot_row_by_row(monkeypatch)
    return request.param


@dataclass(frozen=True)
class Pass:
    """Arguments of one call, and the rows of each group."""

    rows: list[int]
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    req_to_token: Tensor
    req_row: Tensor
    tail_start: Tensor
    tail_end: Tensor
    views: dict[str, Tensor]

    @property
    def args(self) -> dict[str, Any]:
        """By the names of the op's arguments, but for ``q_indptr``."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        return named | named.pop("views")

    def with_args(self, args: dict[str, Any]) -> "Pass":
        own = {f.name for f in fields(self)}
        views = {name: x for name, x in args.items() if name not in own}
        return replace(self, views=views, **{name: args[name] for name in args.keys() & own})

    def run(self, op=kernels.ragged_attention, **options) -> tuple[Tensor, Tensor]:
        lse = torch.full(self.q.shape[:2], float("nan"), device=self.q.device)
        indptr = torch.tensor([0, *self.rows], device=self.q.device).cumsum(0).int()
        out = op(
            self.q,
            self.k_pool,
            self.v_pool,
            self.req_to_token,
            indptr,
            self.req_row,
            self.tail_start,
            self.tail_end,
            self.q.shape[-1] ** -0.5,
            lse=lse,
            **self.views,
            **options,
        )
        return out, lse

    def row_alone(self, group: int, row: int) -> "Pass":
        """The pass of that row of the group, and nothing else."""
        hidden = self.rows[group] - 1 - row
        start = sum(self.rows[:group]) + row
        pick = slice(group, group + 1)
        views = {k: x if k == "view_indices" else x[pick] for k, x in self.views.items()}
        return replace(
            self,
            rows=[1],
            q=self.q[start : start + 1],
            req_row=self.req_row[pick],
            tail_start=self.tail_start[pick],
            tail_end=self.tail_end[pick] - hidden,
            views=views,
        )

    def tail(self, group: int) -> Tensor:
        row = self.req_row[group]
        return self.req_to_token[row, self.tail_start[group] : self.tail_end[group]].long()


def make_pass(
    device: str,
    groups: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
    heads: int = 6,
    kv_heads: int = 2,
    view_heads: int = 0,
    view_len: int = 80,
    seed: int = 0,
) -> Pass:
    """A pass over groups of (rows, tail entries); no slot is listed twice in the tails."""
    random = torch.Generator().manual_seed(seed)
    count = len(groups)
    columns = max(length for _, length in groups) + 7
    table = torch.zeros((count, columns), dtype=torch.int32)
    starts = torch.randint(0, 8, (count,), generator=random)
    free = torch.randperm(SLOTS, generator=random).int()
    for g, (_, length) in enumerate(groups):
        table[g, starts[g] : starts[g] + length], free = free[:length], free[length:]
    views = {}
    if view_heads:
        lens = torch.randint(1, view_len + 1, (count, view_heads), generator=random)
        lens[0] = 0
        begins = torch.randint(0, 9, (count, view_heads), generator=random)
        indices = torch.randint(0, SLOTS, (view_len + 9,), generator=random)
        views = {"view_indices": indices.int(), "view_start": begins, "view_len": lens.int()}

    def normal(*shape):
        return torch.randn(shape, generator=random).to(dtype).to(device)

    rows = [n for n, _ in groups]
    order = torch.randperm(count, generator=random)
    lengths = torch.tensor([length for _, length in groups])
    return Pass(
        rows=rows,
        q=normal(sum(rows), heads, head_dim),
        k_pool=normal(SLOTS, kv_heads, head_dim),
        v_pool=normal(SLOTS, kv_heads, head_dim),
        req_to_token=table[order].to(device),
        req_row=order.argsort().to(device),
        tail_start=starts.to(device),
        tail_end=(starts + lengths).int().to(device),
        views={k: x.to(device) for k, x in views.items()},
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def assert_close_to_reference(one: Pass, out: Tensor, lse: Tensor) -> None:
    exact = replace(one, q=one.q.float(), k_pool=one.k_pool.float(), v_pool=one.v_pool.float())
    expected, expected_lse = exact.run(reference.ragged_attention)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


MIXED = [(1, 100), (5, 70), (1, 1), (20, 65), (3, 3)]


@pytest.mark.parametrize("view_heads, in_order", [(0, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches_reference(device, dtype, view_heads, in_order):
    one = make_pass(device, MIXED, dtype=dtype, view_heads=view_heads)
    out, lse = one.run(in_order=in_order)
    assert out.dtype == dtype
    assert_close_to_reference(one, out, lse)


@pytest.mark.parametrize(
    "head_dim, heads, kv_heads",
    [(64, 9, 3), (80, 4, 4), (96, 6, 2), (128, 8, 2), (128, 20, 1), (256, 4, 1)],
)
def test_head_shapes(device, head_dim, heads, kv_heads):
    one = make_pass(
        device,
        [(1, 70), (3, 20)],
        dtype=torch.bfloat16,
        head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        view_heads=kv_heads,
        view_len=30,
    )
    assert_close_to_reference(one, *one.run())


def test_list_lengths_around_block_and_split_ends(device):
    assert (tiles.SPLIT, tiles.block_n(16, torch.float32)) == (512, 64)
    lengths = [2, 63, 64, 65, 128, 511, 512, 513, 1025]
    one = make_pass(device, [(2, n) for n in lengths], heads=2, kv_heads=1)
    out, lse = one.run(in_order=False)
    assert_close_to_reference(one, out, lse)
    merged, merged_lse = one.run(in_order=True)
    assert same_bits(out, merged)
    assert same_bits(lse, merged_lse)


def test_many_and_empty_groups(device):
    groups = [(g % 3, max(g % 3, g % 17)) for g in range(135)]
    assert groups[0] == (0, 0), "precondition: the first group is empty"
    one = make_pass(device, groups, heads=3, kv_heads=1)
    assert_close_to_reference(one, *one.run(in_order=True))


def test_strided_arguments_and_preallocated_output(device):
    one = make_pass(device, MIXED, view_heads=2)
    rows, heads, dim = one.q.shape
    fused = torch.zeros((rows, heads + 4, dim), device=device)
    fused[:, 1 : heads + 1] = one.q
    k = torch.stack([one.k_pool, one.v_pool], 1)
    strided = replace(one, q=fused[:, 1 : heads + 1], k_pool=k[:, 0], v_pool=k[:, 1])
    buffer = torch.full((rows, heads + 2, dim), 7.0, device=device)
    out, _ = strided.run(out=buffer[:, 2:])
    assert out.data_ptr() == buffer[:, 2:].data_ptr()
    assert same_bits(out, one.run()[0])
    assert (buffer[:, :2] == 7).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("in_order", [False, True])
def test_views_in_other_pools_give_the_bits_of_one_list(device, dtype, in_order, monkeypatch):
    monkeypatch.setattr(kernels, "SPLIT", 128)
    whole = make_pass(device, [(1, 70), (9, 258), (2, 40), (1, 131)], dtype=dtype)
    expected = whole.run(in_order=in_order)
    viewed = view_prefixes(whole.args, [6, 9, 40, 3])
    for homes in ([1, 1, 1, 1], [2, 3, 1, 0]):
        one = whole.with_args(move_views(viewed, homes))
        assert all(map(same_bits, one.run(in_order=in_order), expected)), homes


def test_views_per_head_in_other_pools(device):
    here = make_pass(device, MIXED, view_heads=2)
    there = here.with_args(move_views(here.args, [1, 0, 2, 1, 0]))
    out, lse = there.run()
    assert_close_to_reference(here, out, lse)
    assert all(map(same_bits, (out, lse), here.run()))
    wrong = there.views | {"view_pool": there.views["view_pool"] * 0}
    there = replace(there, views=wrong)
    assert not same_bits(there.run()[0], out), "control: the pool matters"


MIXES = (
    ((UNIFORM4, UNIFORM4), (UNIFORM8, UNIFORM4)),
    ((ROTATED4, ROTATED4), (ROTATED4, ROTATED2)),
    ((CHANNEL4, UNIFORM2), (CHANNEL2, CHANNEL4)),
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [16, 72])
@pytest.mark.parametrize("pairs", MIXES, ids=str)
def test_views_in_packed_pools(device, pairs, dtype, head_dim):
    whole = make_pass(device, [(1, 70), (9, 90), (2, 40)], dtype=dtype, head_dim=head_dim)
    moved = move_views(view_prefixes(whole.args, [6, 9, 3]), [1, 3, 2])
    coded, decoded = pack_views(moved, [*pairs, (PLAIN, PLAIN)])
    out, expected = (whole.with_args(args).run()[0] for args in (coded, decoded))
    if dtype == torch.bfloat16 and INTERPRET:  # it truncates to bf16
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    else:
        assert same_bits(out, expected)
    exact = whole.run()[0]
    assert same_bits(out[1:10], exact[1:10]), "the second group is not packed"
    assert not same_bits(out[0], exact[0]), "control: packing changes something"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 72, 128])
def test_pack_kv(device, dtype, head_dim):
    k, v = torch.randn(2, 9, 2, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    k[3], k[4, :, 5], v[5], v[6] = 0.0, 60000.0, -3.0, v[6] * 1e-6
    slots = torch.arange(64, 73).int()
    for name, codec in CODECS.items():
        pool = packed_pool(codec, 96, 2, head_dim, device)
        pool.keys.fill_(7), pool.values.fill_(7)
        packed.pack_kv(k.to(device), v.to(device), pool, slots.to(device))
        for x, (found, part) in zip((k, v), pool.parts, strict=True):
            expected = torch.full_like(found, 7, device="cpu")
            expected[slots[:: part.tokens].long() // part.tokens] = reference_packed.pack(x, part)
            assert torch.equal(found.cpu(), expected), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_row_bits_do_not_depend_on_the_batch(device, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "SPLIT", 128)
    groups = [(1, 40), (9, 258), (2, 131)]
    one = make_pass(device, groups, dtype=dtype, view_heads=2)
    packed_rows = max(one.rows) * 3
    assert packed_rows > tiles.BLOCK_M, "precondition: rows share tiles and fill more than one"
    out, lse = one.run(in_order=False)
    row = 0
    for g, (rows, _) in enumerate(groups):
        for j in range(rows):
            alone, alone_lse = one.row_alone(g, j).run(in_order=True)
            assert same_bits(alone[0], out[row]), (g, j)
            assert same_bits(alone_lse[0], lse[row]), (g, j)
            row += 1


def test_bits_show_another_order_of_the_sums(device, monkeypatch):
    """Negative control of the comparisons above: other splits, or entries swapped, change bits."""
    one = make_pass(device, [(3, 400)])
    out, _ = one.run()
    table = one.req_to_token.clone()
    row, start = int(one.req_row[0]), int(one.tail_start[0])
    table[row, [start, start + 100]] = table[row, [start + 100, start]]
    swapped, _ = replace(one, req_to_token=table).run()
    monkeypatch.setattr(kernels, "SPLIT", 128)
    resplit, _ = one.run()
    for other in (swapped, resplit):
        assert not same_bits(out, other)
        torch.testing.assert_close(out, other)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unseen_entries_change_no_bit(device, dtype, poison):
    groups = [(1, 30), (8, 150)]
    one = make_pass(device, groups, dtype=dtype)
    clean, clean_lse = one.run()
    listed = torch.cat([one.tail(0), one.tail(1)])
    own = one.tail(1)[-8:]
    k, v = one.k_pool.clone(), one.v_pool.clone()
    unlisted = torch.ones(SLOTS, dtype=torch.bool, device=device)
    unlisted[listed] = False
    assert unlisted.sum() > 1000
    k[unlisted] = v[unlisted] = poison
    # The slots of rows 5, 6 and 7 of the second group, which its rows 0 to 4 do not see.
    k[own[5:]] = v[own[5:]] = poison
    out, lse = replace(one, k_pool=k, v_pool=v).run()
    assert same_bits(out[:6], clean[:6])
    assert same_bits(lse[:6], clean_lse[:6])
    assert out[6:].isnan().any(-1).all(), "control: rows that see the poison show it"


def test_poisoned_values_reach_the_rows_that_see_them_alike(device):
    one = make_pass(device, [(4, 50)])
    v = one.v_pool.clone()
    poison = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0], device=device)
    v[int(one.tail(0)[-3]), 0, :4] = poison
    one = replace(one, v_pool=v)
    out, _ = one.run()
    assert out[0].isfinite().all()
    assert not out[1:, :3, :3].isfinite().any()
    for j in range(4):
        alone, _ = one.row_alone(0, j).run()
        torch.testing.assert_close(alone[0], out[j], atol=0, rtol=0, equal_nan=True)


def test_lists_longer_than_the_hint_give_nan(device):
    one = make_pass(device, [(1, 512), (1, 513)], heads=2, kv_heads=1)
    out, lse = one.run(max_len_hint=512, in_order=False)
    full, full_lse = one.run(in_order=False)
    assert same_bits(out[0], full[0])
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert same_bits(one.run(max_len_hint=512, in_order=True)[0], full)
    assert full_lse.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_key_scores(device, dtype, causal):
    rows, heads, kv_heads, keys = 18, 3, 1, 515
    one = make_pass(device, [(rows, keys)], dtype=dtype, heads=heads, kv_heads=kv_heads)
    slots = one.tail(0).int()
    k_pool = torch.full_like(one.k_pool, float("nan"))
    k_pool[slots.long()] = one.k_pool[slots.long()]
    scores = kernels.key_scores(one.q, k_pool, slots, 0.25, causal=causal)
    args = (one.q.float(), k_pool.float(), slots, 0.25)
    expected = reference.key_scores(*args, causal=causal)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(scores.sum(1), torch.full((heads,), float(rows), device=device))
    other = reference.key_scores(*args, causal=not causal)
    assert (scores - other).abs().max() > 1e-3, "control: the mask matters"

"""Few queries read keys and values where they lie, many read them packed: the bits are the same."""

import re
from pathlib import Path

import pytest
import torch
from batches import BUILT, Batch, Group, build, same_bits
from moving import move_views, pack_views, view_prefixes

from sgl_kernel_ext import _loader, attention
from sgl_kernel_ext.packed import CHANNEL2, PLAIN, ROTATED4, UNIFORM4, UNIFORM8

HEADER = Path(__file__).parents[1] / "csrc" / "attention_few.h"
FEW = int(re.search(r"kFewQueries = (\d+)", HEADER.read_text())[1])
ROWS = FEW + 15
# Last panels of 1, 2, 3 and 4 blocks; the first ends within the rows' own keys, so that only some
# of the rows see its second split.
LENGTHS = [256 + ROWS - FEW // 2, 256 + ROWS + 3, 256 + ROWS + 22, 2 * 256 + 64 + ROWS]
POOLS = [(PLAIN, PLAIN), (UNIFORM8, UNIFORM4), (ROTATED4, CHANNEL2)]


@pytest.fixture(params=BUILT)
def op(request, monkeypatch):
    module = _loader.load_isa(request.param)
    monkeypatch.setattr(attention, "cpu_module", lambda: module)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of tiny calls
    yield attention.ragged_attention
    torch.set_num_threads(before)


def both(op, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.empty(batch.args["q"].shape[:2])
    return batch.attend(op, lse=lse), lse


def check(op, batch: Batch) -> None:
    """Units of 1 to FEW + 1 queries of a KV head against one of ROWS, of which rows are taken from
    the start and the end."""
    together = both(op, batch)
    for count in range(1, FEW + 2):
        for first in (0, ROWS - count):
            rows = slice(first, first + count)
            alone = both(op, batch.chunk(0, first, first + count))
            for got, expected in zip(alone, together, strict=True):
                assert same_bits(got, expected[rows]), f"{count} queries from {first} on"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 72, 80, 96, 128, 256])
def test_few_and_many_queries_give_the_same_bits(op, dim, dtype):
    for length in LENGTHS:
        check(op, build((Group(ROWS, length),), (2, 2), dim, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("codecs", POOLS, ids=lambda pair: "-".join(map(str, pair)))
def test_views_elsewhere(op, dtype, dim, codecs):
    """The border to the tail within a block, a panel and a split, and at the end of a panel."""
    for length, tail in ((256 + ROWS + 22, ROWS + 5), (3 * 64 + ROWS, ROWS), (600, 600 - 7)):
        args = view_prefixes(build((Group(ROWS, length),), (2, 2), dim, dtype).args, [tail])
        packed, decoded = pack_views(move_views(args, [2]), [(PLAIN, PLAIN), codecs])
        check(op, Batch(packed))
        assert all(map(same_bits, both(op, Batch(packed)), both(op, Batch(decoded))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_what_later_rows_see_leaves_no_trace(op, dtype, poison):
    """Not finite: only for the row of a chunk that sees it, be the chunk short or long."""
    batch = build((Group(ROWS, 256 + ROWS - FEW // 2),), (2, 2), dtype=dtype)
    expected = both(op, batch)
    for row in (1, FEW // 2, FEW // 2 + 1, ROWS - 1):
        pools = {name: batch.args[name].clone() for name in ("k_pool", "v_pool")}
        for pool in pools.values():
            pool[batch.own_slot(0, row)] = poison
        poisoned = batch.with_args(**pools)
        for first in (max(0, row - FEW + 1), 0):
            got = both(op, poisoned.chunk(0, first, row + 1))
            for new, old in zip(got, expected, strict=True):
                assert same_bits(new[:-1], old[first:row])
                assert not new[-1].isfinite().any(), "precondition: it is seen"


def test_one_query_more_is_another_row(op):
    """Negative control: a chunk of other rows does not pass."""
    batch = build((Group(ROWS, 300),), (2, 2))
    together = both(op, batch)[0]
    assert not same_bits(both(op, batch.chunk(0, 1, FEW + 1))[0], together[:FEW])

"""Views in other pools: a row's bits depend on its keys and values, not on where they lie."""

import pytest
import torch
from batches import BUILT, DTYPES, Batch, Group, build, same_bits
from moving import move_views, view_prefixes

from sgl_kernel_ext import ViewPool, _loader, attention
from sgl_kernel_ext.reference import attention as reference


@pytest.fixture(params=[*BUILT, "reference"])
def op(request, monkeypatch):
    if request.param == "reference":
        return reference.ragged_attention
    module = _loader.load_isa(request.param)
    monkeypatch.setattr(attention, "cpu_module", lambda: module)
    return attention.ragged_attention


def both(op, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.empty(batch.args["q"].shape[:2])
    return batch.attend(op, lse=lse), lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((8, 1), 72), ((4, 4), 128)], ids=str)
def test_prefixes_elsewhere_give_the_bits_of_one_list(op, dtype, heads, dim):
    """Draft, verify, decode and prefill; borders within and at ends of blocks and splits."""
    rows = [1, 9, 5, 1, 40, 3, 2, 1]
    lengths = [300, 620, 257, 64, 40, 530, 90, 513]
    tails = [20, 9, 5, 1, 40, 274, 26, 1]
    groups = tuple(Group(n, length) for n, length in zip(rows, lengths, strict=True))
    whole = build(groups, heads, dim, dtype)
    expected = both(op, whole)
    viewed = Batch(view_prefixes(whole.args, tails))
    assert all(map(same_bits, both(op, viewed), expected))
    for homes in ([1] * 8, [0, 1, 2, 3, 2, 1, 0, 3]):
        moved = Batch(move_views(viewed.args, homes))
        assert all(map(same_bits, both(op, moved), expected)), homes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_per_kv_head(op, dtype):
    groups = (
        Group(rows=1, tail=7, view=(0, 300, 41)),
        Group(rows=4, tail=20, view=(256, 1, 0)),
        Group(rows=1, tail=64),
        Group(rows=2, tail=30, view=(70, 64, 65)),
    )
    here = build(groups, dtype=dtype)
    moved = Batch(move_views(here.args, [1, 0, 2, 2]))
    assert all(map(same_bits, both(op, moved), both(op, here)))


@pytest.mark.parametrize("op", BUILT, indirect=True)
def test_one_long_view_is_cut_into_items_without_a_trace(op):
    viewed = Batch(view_prefixes(build((Group(9, 2400),)).args, [100]))
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads, batch in ((1, viewed), (5, Batch(move_views(viewed.args, [2])))):
            torch.set_num_threads(threads)
            outputs.append(batch.attend(op))
    finally:
        torch.set_num_threads(before)
    assert same_bits(*outputs)


def test_the_other_pool_is_read(op):
    """Negative control: other numbers there, or another pool, change what its groups see."""
    whole = build((Group(2, 300), Group(1, 90)), dtype=torch.float32)
    args = move_views(view_prefixes(whole.args, [10, 20]), [1, 2])
    expected = Batch(args).attend(op)
    first, second = args["view_pools"]
    for part in (0, 1):
        changed = list(first[:2])
        changed[part] = first[part].clone()
        changed[part][args["view_indices"][7]] += 1
        got = Batch(args | {"view_pools": [ViewPool(*changed), second]}).attend(op)
        assert (got[:2] != expected[:2]).any(-1).all()
        assert same_bits(got[2:], expected[2:])
    other = Batch(args | {"view_pool": torch.tensor([2, 2], dtype=torch.int32)}).attend(op)
    assert other[:2].isnan().all(), "most slots of the second pool hold nothing"
    assert same_bits(other[2:], expected[2:])

"""ragged_attention against its reference and its promises, for every module this CPU runs."""

import pytest
import torch
from batches import BUILT, DTYPES, Batch, Group, build, randn, same_bits

from sgl_kernel_ext import _loader, attention

HEADS = [(9, 3), (8, 8), (8, 1), (32, 8)]


MIX = (
    Group(rows=1, tail=20, view=130),  # draft
    Group(rows=5, tail=300),  # verify
    Group(rows=1, tail=1),  # the first token
    Group(rows=33, tail=33),  # prefill
    Group(rows=3, tail=3, view=1),
    Group(rows=1, tail=257),  # decode
)


@pytest.fixture(params=BUILT)
def op(request, monkeypatch):
    module = _loader.load_isa(request.param)
    monkeypatch.setattr(attention, "cpu_module", lambda: module)
    return attention.ragged_attention


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_close(batch: Batch, op) -> None:
    """Each output within its rounding errors: of the output, and of P to bf16 at worst."""
    q = batch.args["q"]
    lse = torch.empty(q.shape[:2])
    out = batch.attend(op, lse=lse).float()
    expected, expected_lse, magnitude = batch.expected
    roundoff = torch.finfo(q.dtype).eps / 2
    allowed = roundoff * expected.abs() + 1e-5
    if q.dtype == torch.bfloat16:
        allowed = 1.01 * (allowed + roundoff * magnitude)
    assert expected.isfinite().all()
    excess = (out - expected).abs() - allowed
    assert excess.max() <= 0, f"off by {excess.max()} more than allowed"
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)


def test_something_is_built():
    assert BUILT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 8, 72])
def test_ragged_mix(op, dtype, heads, dim):
    assert_close(build(MIX, heads, dim, dtype), op)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_per_kv_head(op, dtype):
    groups = (
        Group(rows=1, tail=7, view=(0, 300, 41)),
        Group(rows=4, tail=20, view=(256, 1, 0)),
        Group(rows=1, tail=64),
    )
    assert_close(build(groups, dtype=dtype), op)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_blocks_and_splits(op, dtype):
    lengths = [1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 271, 272, 273, 511, 512, 513]
    for part in (lengths[:10], lengths[10:13], lengths[13:]):
        assert_close(build(tuple(Group(1, length) for length in part), dtype=dtype), op)
        assert_close(build(tuple(Group(min(9, n), n) for n in part), dtype=dtype), op)


def test_scale_of_any_sign(op):
    for scale in (0.0, -0.3, 0.2):
        assert_close(build(MIX, dtype=torch.float32).with_args(scale=scale), op)


def test_strided_operands(op):
    batch = build(MIX, dtype=torch.bfloat16)
    a = batch.args
    rows, heads, dim = a["q"].shape
    expected = batch.attend(op)

    qkv = randn(rows, heads * dim + 40, dtype=torch.bfloat16)
    q = qkv[:, 8 : 8 + heads * dim].view(rows, heads, dim)
    q.copy_(a["q"])
    pools = torch.stack([a["k_pool"], a["v_pool"]], dim=1)
    room = torch.full((rows, heads + 2, dim + 8), 7.0, dtype=torch.bfloat16)
    out = room[:, 1:-1, :dim]
    assert not q.is_contiguous() and not out.is_contiguous()
    strided = batch.with_args(q=q, k_pool=pools[:, 0], v_pool=pools[:, 1])
    assert strided.attend(op, out=out) is out
    assert same_bits(out, expected)
    assert (room[:, [0, -1]] == 7).all() and (room[:, :, dim:] == 7).all()


def test_nothing_to_do(op):
    assert build(()).attend(op).shape == (0, 9, 64)
    idle = build((Group(0, 5), Group(2, 9), Group(0, 0)))
    assert same_bits(idle.attend(op), idle.select([1]).attend(op))


def random_batch(seed: int, dtype: torch.dtype) -> tuple[Batch, list[Group]]:
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    groups = []
    for _ in range(integer(2, 5)):
        rows = (1, integer(2, 12), integer(30, 120))[integer(0, 2)]
        view = integer(0, 1) * integer(1, 300)
        groups.append(Group(rows, rows + integer(0, 250), view))
    heads = HEADS[integer(0, len(HEADS) - 1)]
    return build(tuple(groups), heads, (64, 80, 128)[integer(0, 2)], dtype, seed), groups


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rows_do_not_depend_on_the_pass(op, threads, seed, dtype):
    batch, groups = random_batch(seed, dtype)
    indptr = batch.args["q_indptr"].tolist()
    threads(2)
    together = batch.attend(op)
    for count in (1, 3, 5):
        threads(count)
        assert same_bits(batch.attend(op), together), f"{count} threads"
    threads(2)
    backwards = list(range(len(groups)))[::-1]
    assert same_bits(
        batch.select(backwards).attend(op),
        torch.cat([together[indptr[g] : indptr[g + 1]] for g in backwards]),
    )
    for g, group in enumerate(groups):
        rows = together[indptr[g] : indptr[g + 1]]
        assert same_bits(batch.select([g]).attend(op), rows)
        for row in {0, group.rows // 2, group.rows - 1}:
            assert same_bits(batch.chunk(g, row, row + 1).attend(op), rows[row : row + 1])
        for size in (5, 32):
            for first in range(0, group.rows, size):
                last = min(first + size, group.rows)
                assert same_bits(batch.chunk(g, first, last).attend(op), rows[first:last])


def test_one_long_list_is_cut_into_items_without_a_trace(op, threads):
    """2,400 keys are 10 splits: several work items on 5 threads, one on 1 thread."""
    for rows in (1, 9, 200):
        batch = build((Group(rows, 2400),))
        threads(1)
        expected = batch.attend(op)
        threads(5)
        assert same_bits(batch.attend(op), expected)
        threads(2)
        assert same_bits(batch.chunk(0, rows - 1, rows).attend(op), expected[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_later_rows_leave_no_trace(op, dtype, poison):
    # The group's own keys straddle a block (256 = 16 * 16) and a split.
    batch = build((Group(40, 270), Group(1, 40)), dtype=dtype)
    expected = batch.attend(op)
    for row in (1, 13, 26, 27, 39):
        slot = batch.own_slot(0, row)
        poisoned = {name: batch.args[name].clone() for name in ("k_pool", "v_pool")}
        for pool in poisoned.values():
            pool[slot] = poison
        got = batch.with_args(**poisoned).attend(op)
        assert same_bits(got[:row], expected[:row])
        assert same_bits(got[40:], expected[40:])
        assert not got[row:40].isfinite().any(), "rows that see the poison must show it"


def test_every_visible_key_and_value_counts(op):
    batch = build((Group(3, 300, 20),), dtype=torch.float32)
    a, expected = batch.args, batch.attend(op)
    tail = a["req_to_token"][a["req_row"][0], a["tail_start"][0] : a["tail_end"][0]]
    view = a["view_indices"][a["view_start"][0, 0] :][: a["view_len"][0, 0]]
    for slot in [*view[[0, 19]].tolist(), *tail[[0, 235, 236, 255, 297]].tolist()]:
        for name in ("k_pool", "v_pool"):
            changed = a[name].clone()
            changed[slot, 1] += 1.0
            got = batch.with_args(**{name: changed}).attend(op)
            assert (got[:, 3:6] != expected[:, 3:6]).any(-1).all(), f"{name} {slot}"
            assert same_bits(got[:, :3], expected[:, :3])
            assert same_bits(got[:, 6:], expected[:, 6:])
    last = a["v_pool"].clone()
    last[batch.own_slot(0, 2)] += 1.0
    got = batch.with_args(v_pool=last).attend(op)
    assert same_bits(got[:2], expected[:2])
    assert not same_bits(got[2], expected[2])

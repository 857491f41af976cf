"""Every registered method obeys the contract of ``Dropper``; then what each one promises."""

from dataclasses import replace

import pytest
import torch

from sglang_vericache import compressors
from sglang_vericache.compressors import Calibration, Rotary, Settings
from sglang_vericache.compressors.base import Dropper
from sglang_vericache.compressors.expected_attention import ExpectedAttention
from sglang_vericache.compressors.h2o import H2O
from sglang_vericache.compressors.lagkv import LagKV
from sglang_vericache.compressors.quest import Quest
from sglang_vericache.core import Budget

WINDOW, TOKENS = 8, 40
CALIBRATION = Calibration(heads=((0,), (1,)), weights=(0.75, 0.25))
SETTINGS = Settings(ratio=0.25, min_tokens=TOKENS, window=WINDOW, calibration=CALIBRATION)
LENGTHS = [0, 1, 2, WINDOW - 1, WINDOW, WINDOW + 1, TOKENS - 1, TOKENS, TOKENS + 1, 400]
BUDGETS = ["snapkv+pyramidkv", "snapkv-per-head+adakv", "snapkv+chunkkv", "streaming+calibrated"]
PER_HEAD = [name for name in compressors.names() if compressors.find(name).per_head]
METHODS = [
    *(*compressors.names(), *BUDGETS, "snapkv+int4", "snapkv-per-head+int8"),
    *("snapkv-per-head+pyramidkv+chunkkv+adakv+int4", "compresskv+chunkkv"),
]
METHODS += [f"{name}+adakv" for name in PER_HEAD if f"{name}+adakv" not in METHODS]
CONTROLS = ["identity", "int4", "int8", "random-kv", "streaming"]


def compress(context, name, length, settings=SETTINGS, **shape):
    dropper = compressors.create(name, settings)
    rows = dropper.query_rows
    layers = [context(length, rows=rows, layer=i, **shape) for i in range(2)]
    return compressors.compress(dropper, layers, settings.budget)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", METHODS)
def test_view_is_valid_at_every_length(context, name, length):
    view = compress(context, name, length)
    view.check_integrity()
    dropper, tokens = compressors.create(name, SETTINGS), SETTINGS.budget.tokens(length)
    heads = 2 if dropper.per_head else 1
    assert view.length == length
    assert [p.shape[0] for p in view.layers] == [heads, heads]
    assert all(p.dtype == torch.int32 for p in view.layers)
    budget = SETTINGS.budget
    assert max(view.kept) <= dropper.longest(length, 2, budget)
    if length <= TOKENS or not dropper.drops:
        assert view.is_full
    elif isinstance(dropper, Quest):
        count = dropper.count(context(length), SETTINGS.budget)
        assert [sum(lists) for lists in view.list_lengths] == [heads * count] * 2
        assert tokens - dropper.page < count <= tokens
    else:
        assert sum(map(sum, view.list_lengths)) == 2 * heads * tokens
        even = type(dropper).count is Dropper.count and not view.counts
        assert not even or view.kept == (tokens, tokens)


@pytest.mark.parametrize("shape", [{"heads": 2, "kv_heads": 2}, {"heads": 8, "kv_heads": 1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", METHODS)
def test_every_dtype_and_head_grouping(context, name, dtype, shape):
    view = compress(context, name, 200, dtype=dtype, **shape)
    view.check_integrity()


@pytest.mark.parametrize("name", METHODS)
def test_same_input_gives_the_same_view(context, name):
    first, second = compress(context, name, 400), compress(context, name, 400)
    assert all(torch.equal(a, b) for a, b in zip(first.layers, second.layers, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_inputs_are_not_changed(context, name):
    ctx = context(200, rows=WINDOW)
    before = [t.clone() for t in (ctx.queries, ctx.keys(), ctx.values())]
    compressors.compress(compressors.create(name, SETTINGS), [ctx], SETTINGS.budget)
    after = (ctx.queries, ctx.keys(), ctx.values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_refresh_from_few_verify_rows(context, name, rows):
    dropper = compressors.create(name, SETTINGS)
    ctx = context(2000)
    prompt = compressors.compress(dropper, [ctx], SETTINGS.budget)
    verify = replace(ctx, queries=torch.randn(rows, 6, 16))
    refreshed = compressors.compress(dropper, [verify], SETTINGS.budget)
    refreshed.check_integrity()
    changed = not torch.equal(prompt.layers[0], refreshed.layers[0])
    assert changed == (dropper.query_rows > 0)


def test_identity_keeps_everything(context):
    assert compress(context, "identity", 400).is_full


def test_random_kv_depends_on_seed_layer_and_length(context):
    views = [compress(context, "random-kv", 4000, replace(SETTINGS, seed=s)) for s in (0, 0, 1)]
    first, again, other = (torch.cat(view.layers) for view in views)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    longer = compress(context, "random-kv", 4001).layers[0]
    assert longer[0, :500].tolist() != first[0, :500].tolist(), "a refresh chooses anew"


def test_random_kv_is_uniform(context):
    (kept, _) = compress(context, "random-kv", 4000).layers
    halves = torch.bincount(kept[0] // 1000, minlength=4).tolist()
    assert sum(halves) == 1000
    assert all(200 < count < 300 for count in halves)


def test_streaming_keeps_sinks_and_the_recent_rest(context):
    view = compress(context, "streaming", 400)
    assert view.layers[0][0].tolist() == [*range(4), *range(400 - 96, 400)]


@pytest.mark.parametrize("name", ["snapkv", "snapkv-per-head"])
def test_snapkv_keeps_sinks_window_and_what_the_window_looks_at(context, name):
    ctx = context(400, rows=WINDOW)
    keys = ctx.keys().clone()
    # The last query of each head finds its own key at 150.
    keys[150] = 10 * ctx.queries[-1].view(2, 3, 16).mean(dim=1)
    planted = replace(ctx, gather_keys=lambda: keys)
    dropper = compressors.create(name, SETTINGS)
    (kept,) = compressors.compress(dropper, [planted], Budget(0.05)).layers
    for head in kept.tolist():
        assert set(range(4)) | set(range(392, 400)) | set(range(148, 153)) <= set(head)
    (without,) = compressors.compress(dropper, [ctx], Budget(0.05)).layers
    assert 150 not in without.flatten().tolist()


def test_per_head_lists_follow_their_own_queries(context):
    ctx = context(400, rows=WINDOW)
    keys = torch.zeros_like(ctx.keys())
    keys[100, 0] = 10 * ctx.queries[-1, :3].mean(dim=0)
    keys[200, 1] = 10 * ctx.queries[-1, 3:].mean(dim=0)
    planted = replace(ctx, gather_keys=lambda: keys)
    dropper = compressors.create("snapkv-per-head", SETTINGS)
    (kept,) = compressors.compress(dropper, [planted], Budget(17 / 400)).layers
    first, second = (set(head) for head in kept.tolist())
    assert 100 in first and 200 not in first
    assert 200 in second and 100 not in second


def kept_at(dropper, ctx, count):
    """Sets of kept positions, one a list."""
    (kept,) = compressors.compress(dropper, [ctx], Budget(count / ctx.length)).layers
    return [set(head) for head in kept.tolist()]


def with_keys(ctx, keys):
    return replace(ctx, gather_keys=lambda: keys)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in CONTROLS])
def test_the_ends_are_kept(context, name):
    dropper = compressors.create(name, SETTINGS)
    ctx = context(400, rows=64)
    ends = {*range(4), *range(400 - WINDOW, 400)}
    assert all(ends <= kept for kept in kept_at(dropper, ctx, 100))
    scores = dropper.score(ctx)
    bare = [set(row.tolist()) for row in compressors.keep_best(scores, 100)]
    by_score = isinstance(dropper, (LagKV, Quest))  # these score the ends above all else
    assert by_score == all(ends <= kept for kept in bare)


def test_knorm_keeps_small_keys_of_each_head(context):
    ctx = context(400)
    keys = ctx.keys().clone()
    keys[100, 0] /= 10
    keys[200, 1] /= 10
    keys[300] *= 10
    first, second = kept_at(compressors.create("knorm", SETTINGS), with_keys(ctx, keys), 30)
    assert 100 in first and 100 not in second
    assert 200 in second and 200 not in first
    assert 300 not in first | second


def test_keydiff_keeps_what_points_elsewhere(context):
    ctx = context(400)
    common = torch.randn(2, 16)
    keys = 0.2 * ctx.keys() + common
    keys[100, 0] = -common[0]
    keys[200] = 5 * common  # long, but of the usual direction
    first, second = kept_at(compressors.create("keydiff", SETTINGS), with_keys(ctx, keys), 30)
    assert 100 in first and 100 not in second
    assert 200 not in first | second


def test_tova_asks_the_latest_token_and_h2o_all_observed(context):
    ctx = context(400, rows=64)
    queries, keys = torch.zeros_like(ctx.queries), ctx.keys().clone()
    queries[-1], queries[-60] = 10 * torch.eye(16)[:2, None]
    keys[100], keys[200] = 5 * torch.eye(16)[:2, None]
    planted = replace(with_keys(ctx, keys), queries=queries)
    (tova,) = kept_at(compressors.create("tova", SETTINGS), planted, 30)
    assert 100 in tova and 200 not in tova
    assert all({100, 200} <= head for head in kept_at(H2O(), planted, 30))
    assert all(200 not in head for head in kept_at(H2O(observed=59), planted, 30))


def test_h2o_averages_over_the_queries_that_see_a_token(context):
    ctx = context(20, rows=8, heads=2, kv_heads=2)
    expected = torch.zeros(2, 20)
    for head in range(2):
        seen: list[list[float]] = [[] for _ in range(20)]
        for i, query in enumerate(ctx.queries[:, head]):
            keys = ctx.keys()[: 13 + i, head]
            for t, share in enumerate((keys @ query / 4).softmax(dim=0).tolist()):
                seen[t].append(share)
        expected[head] = torch.tensor([sum(shares) / len(shares) for shares in seen])
    torch.testing.assert_close(H2O().score(ctx), expected)


def test_lagkv_keeps_what_the_next_chunk_is_unlike(context):
    ctx = context(4 + 5 * 32 + 7)
    keys = ctx.keys().clone()
    keys[50, 0] *= torch.linspace(-20, 20, 16)
    dropper = LagKV(sinks=4, window=0, recent=0, lag=32)
    chunked = 4 + 32 + 7 + 4 * 8  # sinks, the last chunk, the rest, a quarter of four chunks
    first, second = kept_at(dropper, with_keys(ctx, keys), chunked)
    assert 50 in first
    assert 50 not in kept_at(dropper, ctx, chunked)[0], "it would have been kept anyway"
    for head in (first, second):
        assert {*range(4), *range(4 + 4 * 32, ctx.length)} <= head
        assert [sum(t in head for t in range(a, a + 32)) for a in range(4, 132, 32)] == [8] * 4


def test_lagkv_survives_constant_channels_and_short_contexts(context):
    ctx = context(200)
    keys = ctx.keys().clone()
    keys[..., 3] = 1.0
    dropper = LagKV(sinks=4, window=0, recent=0, lag=32)
    assert dropper.score(with_keys(ctx, keys)).isfinite().all()
    assert kept_at(dropper, context(67), 20) == [{*range(4), *range(51, 67)}] * 2
    assert kept_at(dropper, context(68), 64) != [{*range(4), *range(8, 68)}] * 2


def turning(neox=True, width=16, scale=1.0):
    angles = torch.arange(1000)[:, None] * 10.0 ** -torch.arange(0, 2, 4 / width)
    return Rotary(scale * torch.cat((angles.cos(), angles.sin()), dim=-1), neox)


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_undoes_what_it_does(neox):
    rotary = turning(neox, width=8, scale=1.2)
    x = torch.randn(3, 2, 16)
    positions = torch.tensor([5, 0, 700])
    rotated = torch.cat([rotary.average(x[i : i + 1], p[None]) for i, p in enumerate(positions)])
    torch.testing.assert_close(rotary.undo(rotated, positions), x)
    assert torch.equal(rotated[..., 8:], x[..., 8:]) and not torch.allclose(rotated, x, atol=0.1)
    one, other = (0, 4) if neox else (0, 1)
    angle = torch.atan2(rotated[0, 0, other], rotated[0, 0, one])
    started = torch.atan2(x[0, 0, other], x[0, 0, one])
    turned = torch.tensor((angle - started).item() - 5)
    torch.testing.assert_close(turned.cos(), torch.tensor(1.0))
    assert not torch.allclose(rotary.undo(rotated, positions + 1), x, atol=0.1)
    both = rotary.average(x, torch.tensor([3, 9]))
    apart = [rotary.average(x, torch.tensor([p])) for p in (3, 9)]
    torch.testing.assert_close(both, (apart[0] + apart[1]) / 2)


def test_expected_attention_is_that_of_random_future_queries(context):
    """Draw many queries of the estimated distribution, turn them, attend, and average."""
    rotary, ahead = turning(), 8
    before = 0.5 * torch.randn(64, 2, 16) + torch.randn(2, 16)
    ctx = context(80, rows=64, heads=2, kv_heads=1)
    placed = torch.arange(16, 80)
    queries = torch.cat([rotary.average(before[i : i + 1], placed[i : i + 1]) for i in range(64)])
    ctx = replace(ctx, queries=queries, rotary=rotary)
    torch.testing.assert_close(ctx.unrotated_queries(), before)
    scores = ExpectedAttention(sinks=4, future=ahead).score(ctx)

    keys, norms = ctx.keys()[4:, 0], ctx.values()[4:, 0].norm(dim=-1)
    mean, spread = before.mean(dim=0), before - before.mean(dim=0)
    expected = torch.zeros(76)
    for head in range(2):
        covariance = spread[:, head].T @ spread[:, head] / 64
        drawn = torch.distributions.MultivariateNormal(mean[head], covariance).sample((50_000,))
        turned = rotary.average(drawn[:, None], torch.arange(80, 80 + ahead))[:, 0]
        attention = (turned @ keys.T / 4).exp().mean(dim=0)
        expected += attention / attention.sum() / 2
    assert torch.equal(scores[0, :4], torch.zeros(4))
    torch.testing.assert_close(scores[0, 4:], expected * norms, rtol=0.1, atol=2e-4)
    here = ExpectedAttention(sinks=4, future=ahead).score(replace(ctx, rotary=None))
    assert not torch.allclose(here[0, 4:], expected * norms, rtol=0.1, atol=2e-4)


@pytest.mark.parametrize("length", [400, 401, 415])
def test_quest_keeps_whole_pages_and_finds_what_the_window_looks_at(context, length):
    ctx = context(length, rows=WINDOW)
    keys = ctx.keys().clone()
    keys[150] = 10 * ctx.queries[-1].view(2, 3, 16).mean(dim=1)
    dropper = Quest(window=WINDOW)
    for count in (70, 100, 200):
        for head in kept_at(dropper, with_keys(ctx, keys), count):
            assert count - 16 < len(head) <= count
            whole = {t // 16 for t in head}
            assert head == {t for t in range(length) if t // 16 in whole}
            assert 9 in whole, "the page of token 150"
    assert not all(150 in head for head in kept_at(dropper, ctx, 70)), "there anyway"


def test_quest_scores_are_bounds_of_attention(context):
    ctx = context(64, rows=1, heads=2, kv_heads=2)
    scores = Quest(sinks=0, window=1, page=4).score(ctx)
    logits = torch.einsum("hd,thd->ht", ctx.queries[0], ctx.keys()) / 4
    pages = ctx.keys().unflatten(0, (-1, 4))
    reaches = (ctx.queries[0] * pages.amin(dim=1)).maximum(ctx.queries[0] * pages.amax(dim=1))
    bounds = reaches.sum(dim=-1).T / 4
    assert (bounds.repeat_interleave(4, dim=1) >= logits - 1e-5).all()
    expected = bounds.softmax(dim=1)[:, :15].repeat_interleave(4, dim=1)
    torch.testing.assert_close(scores[:, :60], expected)
    assert (scores[:, 60:] > scores[:, :60].max()).all(), "the page of the window"


def test_key_scores_kernel_replaces_the_fallback(context):
    ctx = context(50)
    marked = replace(ctx, key_scores=lambda queries: torch.full((6, 50), float(len(queries))))
    assert torch.equal(marked.attention(), torch.full((6, 50), 32.0))
    assert not torch.equal(ctx.attention(), marked.attention())


def test_a_codec_changes_how_a_method_stores_not_what_it_keeps(context):
    ctx = [context(400, rows=WINDOW)]
    plain, packed = (compressors.create(name, SETTINGS) for name in ("snapkv", "snapkv+int4"))
    assert (plain.codec, packed.codec) == (None, "int4")
    assert packed.name == "snapkv+int4" and packed.query_rows == plain.query_rows
    views = [compressors.compress(dropper, ctx, SETTINGS.budget) for dropper in (plain, packed)]
    assert torch.equal(views[0].layers[0], views[1].layers[0])
    assert compressors.create("snapkv+int4", SETTINGS) == packed, "equal settings, equal methods"


def test_every_codec_has_a_kernel():
    from sgl_kernel_ext import CODECS

    droppers = [compressors.create(name, SETTINGS) for name in compressors.names()]
    assert {dropper.codec for dropper in droppers} == {None, *CODECS}


@pytest.mark.parametrize("name", ["snapkv+int3", "int4+int4", "snapkv+", "+int4", "nothing+int4"])
def test_names_that_do_not_compose(name):
    with pytest.raises(ValueError, match=r"unknown compressor .*snapkv.*\+int4"):
        compressors.create(name, SETTINGS)

"""Every registered method obeys the contract of ``Dropper``; then what each one promises."""

from dataclasses import replace

import pytest
import torch

from sglang_vericache import compressors
from sglang_vericache.compressors import Calibration, Settings
from sglang_vericache.compressors.base import Dropper
from sglang_vericache.core import Budget

WINDOW, TOKENS = 8, 40
CALIBRATION = Calibration(heads=((0,), (1,)), weights=(0.75, 0.25))
SETTINGS = Settings(ratio=0.25, min_tokens=TOKENS, window=WINDOW, calibration=CALIBRATION)
LENGTHS = [0, 1, 2, WINDOW - 1, WINDOW, WINDOW + 1, TOKENS - 1, TOKENS, TOKENS + 1, 400]
BUDGETS = ["snapkv+pyramidkv", "snapkv-per-head+adakv", "snapkv+chunkkv", "streaming+calibrated"]
METHODS = [
    *(*compressors.names(), *BUDGETS, "snapkv+int4", "snapkv-per-head+int8"),
    *("snapkv-per-head+pyramidkv+chunkkv+adakv+int4", "compresskv+chunkkv"),
]


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
    dropper = compressors.create(name, SETTINGS)
    heads = 2 if dropper.per_head else 1
    assert view.length == length
    assert [p.shape[0] for p in view.layers] == [heads, heads]
    assert all(p.dtype == torch.int32 for p in view.layers)
    budget = SETTINGS.budget
    assert max(view.kept) <= dropper.longest(length, 2, budget)
    if length <= TOKENS or not dropper.drops:
        assert view.is_full
    else:
        assert sum(map(sum, view.list_lengths)) == 2 * heads * budget.tokens(length)
        even = type(dropper).count is Dropper.count and not view.counts
        assert not even or view.kept == (budget.tokens(length),) * 2


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
    ctx = context(400)
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

"""Budgets that wrap a dropper: who gets how much, and that no token is lost or won by it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_vericache import compressors
from sglang_vericache.compressors import Calibration, Protected, Settings, compress
from sglang_vericache.compressors.layer_budgets import apportion
from sglang_vericache.compressors.select import keep_best_of_all
from sglang_vericache.core import Budget

WINDOW, LAYERS, HEADS = 8, 5, 2
CALIBRATION = Calibration(heads=((0,),) * LAYERS, weights=(0.5, 0.0, 0.2, 0.2, 0.1))
SETTINGS = Settings(ratio=1.0, min_tokens=0, window=WINDOW, calibration=CALIBRATION)
LAYERED = ["pyramidkv", "calibrated"]


def counts(context, name, length, budget, settings=SETTINGS):
    dropper = compressors.create(name, settings)
    layers = [
        context(length, rows=WINDOW, layer=layer, num_layers=LAYERS) for layer in range(LAYERS)
    ]
    view = compress(dropper, layers, Budget(1e-9, budget) if length else Budget(1.0))
    view.check_integrity()
    return view


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 70, 400])
def test_layers_share_one_sum_and_a_larger_budget_takes_from_nobody(context, name, length):
    before = (0,) * LAYERS
    for budget in range(1, length + 2, max(length // 40, 1)):
        dropper = compressors.create(f"streaming+{name}", SETTINGS)
        contexts = [context(length, layer=i, num_layers=LAYERS) for i in range(LAYERS)]
        kept = tuple(dropper.count(ctx, Budget(1e-9, budget)) for ctx in contexts)
        assert sum(kept) == LAYERS * min(budget, length)
        assert max(kept) <= dropper.longest(length, HEADS, Budget(1e-9, budget)) <= length
        assert all(a <= b for a, b in zip(before, kept, strict=True)), (budget, before, kept)
        before = kept
    assert before == (length,) * LAYERS


def test_pyramidkv_falls_linearly(context):
    """B = 100, 4 + 8 are kept anyway: 12 + 1.95 * 88 down to 12 + 0.05 * 88."""
    view = counts(context, "snapkv+pyramidkv", 400, 100)
    assert view.kept == (183, 141, 100, 59, 17)
    assert counts(context, "snapkv", 400, 100).kept == (100,) * LAYERS


def test_calibrated_follows_the_weights_within_its_limits(context):
    """32 at least, 300 at most; what the first layer may not have goes to the others."""
    view = counts(context, "snapkv+calibrated", 2000, 100)
    assert view.kept == (202, 32, 100, 100, 66)
    lopsided = Settings(calibration=Calibration(((0,),) * LAYERS, (0.96, 0.01, 0.01, 0.01, 0.01)))
    view = counts(context, "snapkv+calibrated", 2000, 100, lopsided)
    assert view.kept == (300, 50, 50, 50, 50)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.data())
def test_apportioned_tokens_add_up(weights, data):
    least = data.draw(st.integers(0, 10))
    most = data.draw(st.integers(least, 40))
    total = data.draw(st.integers(least * len(weights), most * len(weights)))
    found = apportion(tuple(weights), total, least, most)
    assert sum(found) == total and least <= min(found) and max(found) <= most
    if total < most * len(weights):
        more = apportion(tuple(weights), total + 1, least, most)
        assert sum(b - a for a, b in zip(found, more, strict=True) if b >= a) == 1


def reference(rows, count, sure, protected):
    """AdaKV one token at a time: protected, then each head's own best, then the best of all."""
    length = len(rows[0])
    wanted = max(protected.recent, int(protected.recent_share * count))
    sinks = list(range(min(protected.sinks, count)))
    recent = list(range(length))[max(length - min(wanted, count - len(sinks)), 0) :]
    kept = []
    for row in rows:
        own = dict.fromkeys([*sinks, *recent])
        for t in sorted(range(length), key=lambda t: (-row[t], t)):
            if len(own) < sure:
                own[t] = None
        kept.append(own)
    order = sorted((-x, head, t) for head, row in enumerate(rows) for t, x in enumerate(row))
    for _, head, t in order:
        if sum(map(len, kept)) < count * len(rows):
            kept[head][t] = None
    return [sorted(own) for own in kept]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_adakv_matches_a_sort(data):
    length = data.draw(st.integers(1, 16))
    values = st.sampled_from([0.0, 0.5, 1.0, -2.0, 7.0])
    rows = data.draw(
        st.lists(st.lists(values, min_size=length, max_size=length), min_size=1, max_size=3)
    )
    count = data.draw(st.integers(1, length))
    sure = data.draw(st.integers(1, count))
    share = data.draw(st.sampled_from([0.0, 0.4]))
    protected = Protected(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4)), share)
    kept, lengths = keep_best_of_all(torch.tensor(rows), count, sure, protected)
    found = [row[:n].tolist() for row, n in zip(kept, lengths, strict=True)]
    assert found == reference(rows, count, sure, protected)


def test_adakv_moves_tokens_to_the_head_that_needs_them(context):
    """The second head attends to one key alone and keeps its floor; the first gets the rest."""
    length, budget = 400, 50
    ctx = context(length, rows=WINDOW, num_layers=1)
    keys = torch.zeros_like(ctx.keys())
    keys[30, 1] = 100 * ctx.queries[-1, 3:].mean(dim=0)
    planted = replace(ctx, gather_keys=lambda: keys)
    paper = Settings(window=WINDOW, sinks=0, recent=0.0)
    views = {
        name: compress(compressors.create(name, paper), [planted], Budget(1e-9, budget))
        for name in ("snapkv-per-head", "snapkv-per-head+adakv")
    }
    assert views["snapkv-per-head"].list_lengths == ((50, 50),), "the control gives equal parts"
    view = views["snapkv-per-head+adakv"]
    view.check_integrity()
    ((first, second),) = view.list_lengths
    assert first + second == 2 * budget and second < 40 < 60 < first
    assert second >= int(0.2 * budget)
    assert 30 in view.layers[0][1].tolist() and view.mean_kept == budget
    assert view.kept == (first,) and not view.is_full


@pytest.mark.parametrize("budget", [1, 2, WINDOW, 39, 40, 41, 399, 400, 401])
def test_adakv_at_every_budget(context, budget):
    view = counts(context, "snapkv-per-head+adakv", 400, budget)
    kept = min(budget, 400)
    assert all(sum(lists) == HEADS * kept for lists in view.list_lengths)
    assert min(map(min, view.list_lengths)) >= max(1, int(0.2 * kept))
    assert view.is_full == (budget >= 400)


def test_chunkkv_keeps_whole_chunks(context):
    """11 of 20 chunks fit; kvpress keeps as many whole ones, without the rest of the budget."""
    plain = Settings(window=1, sinks=0, recent=0.0)
    ctx = [context(400, rows=1, num_layers=1)]
    scores = compressors.create("snapkv", plain).score(ctx[0])[0]
    best = scores.view(20, 20).mean(dim=1).topk(12).indices.tolist()
    view = compress(compressors.create("snapkv+chunkkv", plain), ctx, Budget(1e-9, 225))
    kept = set(view.layers[0][0].tolist()) - {399}
    whole = {20 * chunk + i for chunk in best[:11] for i in range(20)}
    assert whole - {399} <= kept
    assert kept - whole <= set(range(20 * best[11], 20 * best[11] + 20))
    single = compress(compressors.create("snapkv", plain), ctx, Budget(1e-9, 225))
    assert not whole - {399} <= set(single.layers[0][0].tolist())


@pytest.mark.parametrize("length", [1, 19, 20, 21, 41])
def test_chunkkv_scores_the_short_last_chunk_by_its_own_mean(context, length):
    ctx = context(length, rows=1)
    plain = compressors.create("streaming", Settings()).score(ctx)[0]
    chunked = compressors.create("streaming+chunkkv", Settings()).score(ctx)[0]
    for t in range(length):
        begin = t - t % 20
        assert chunked[t] == pytest.approx(float(plain[begin : begin + 20].mean()))


def test_order_does_not_matter_and_names_say_what_is_there():
    one = compressors.create("snapkv-per-head+adakv+pyramidkv+int4", SETTINGS)
    assert one == compressors.create("snapkv-per-head+pyramidkv+adakv+int4", SETTINGS)
    assert one.name == "snapkv-per-head+adakv+pyramidkv+int4" and one.codec == "int4"
    assert one.refreshable and one.window == WINDOW and one.query_rows == WINDOW
    assert compressors.create("streaming+chunkkv", SETTINGS).refreshable is False


@pytest.mark.parametrize(
    "name",
    [
        "snapkv+adakv",  # one list for all heads
        "identity+pyramidkv",  # drops nothing
        "snapkv+int4+pyramidkv",  # codec last
        "snapkv+pyramidkv+pyramidkv",
        "snapkv+pyramidkv+calibrated",  # two budgets of the layers
        "compresskv+pyramidkv",
        "pyramidkv",
        "snapkv++int4",
    ],
)
def test_names_that_do_not_compose(name):
    with pytest.raises(ValueError, match=r"unknown compressor .*\+adakv.*\+pyramidkv.*\+int4"):
        compressors.create(name, SETTINGS)


@pytest.mark.parametrize("name", ["compresskv", "snapkv+calibrated", "compresskv+int4"])
def test_what_needs_a_calibration_says_how_to_make_one(name):
    with pytest.raises(ValueError, match="vericache calibrate --model-path MODEL"):
        compressors.create(name, Settings())


def test_compresskv_asks_its_heads_only(context):
    """Each head finds a key of its own; only that of the retrieval head is kept."""
    ctx = context(400, rows=WINDOW, num_layers=1, heads=4)
    keys = torch.zeros_like(ctx.keys())
    for head in range(4):
        keys[50 + 60 * head, head // 2] = 100 * ctx.queries[-1, head]
    same = ctx.queries[-1:].expand(WINDOW, -1, -1)
    planted = replace(ctx, queries=same, gather_keys=lambda: keys)
    for head in range(4):
        chosen = Calibration(heads=((head,),), weights=(1.0,))
        dropper = compressors.create("compresskv", Settings(recent=0.0, calibration=chosen))
        kept = compress(dropper, [planted], Budget(1e-9, 20)).layers[0][0].tolist()
        assert set(range(4)) | set(range(392, 400)) <= set(kept)
        assert [50 + 60 * other in kept for other in range(4)] == [h == head for h in range(4)]


@pytest.mark.parametrize(
    ("heads", "weights"),
    [([[0]], [0.5, 0.5]), ([[0], []], [0.5, 0.5]), ([[-1]], [1.0]), ([[0]], [0.9]), ([], [])],
)
def test_a_calibration_that_cannot_be_is_refused(heads, weights):
    with pytest.raises(ValueError, match=r"heads of|at least one head|shares of 1"):
        Calibration(tuple(map(tuple, heads)), tuple(weights))

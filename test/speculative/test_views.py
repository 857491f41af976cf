"""What the engine shows a method: a request's own keys, its latest queries and where they stand."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from sglang_vericache.compressors import (
    Calibration,
    LayerContext,
    Rotary,
    Settings,
    compress,
    create,
    find,
    names,
)
from sglang_vericache.compressors.knorm import Knorm
from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.platform import bootstrap
from sglang_vericache.speculative.queries import RecentQueries

bootstrap.install()

from sglang_vericache.speculative.state import Requests  # noqa: E402
from sglang_vericache.speculative.views import ViewChooser  # noqa: E402

LAYERS, QUERY_HEADS, HEADS, DIM, LENGTH = 2, 4, 2, 16, 300
SETTINGS = Settings(
    ratio=0.2, min_tokens=0, calibration=Calibration(heads=((0,), (3,)), weights=(0.75, 0.25))
)


class KV:
    """Stands in for SGLang's KV pool."""

    start_layer, layer_num, size = 0, LAYERS, 400

    def __init__(self):
        self.buffers = torch.randn(LAYERS, 2, self.size, HEADS, DIM)

    def get_key_buffer(self, layer):
        return self.buffers[layer, 0]

    def get_kv_buffer(self, layer):
        return tuple(self.buffers[layer])


class Rope(torch.nn.Module):
    is_neox_style = True

    def __init__(self):
        super().__init__()
        angles = torch.arange(1000)[:, None] / 10.0 ** torch.arange(DIM // 2)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.fixture
def chooser():
    torch.manual_seed(0)
    rows = torch.zeros(4, LENGTH, dtype=torch.int32)
    rows[1] = torch.randperm(KV.size)[:LENGTH]
    runner = SimpleNamespace(
        token_to_kv_pool=KV(),
        req_to_token_pool=SimpleNamespace(req_to_token=rows),
        model=torch.nn.ModuleList([torch.nn.Identity(), Rope()]),
        attn_backend=SimpleNamespace(add_view_pool=lambda layers: 1),
    )
    return ViewChooser(runner, VeriCacheConfig(settings={"min_tokens": 0}))


def state(name, queries, end=LENGTH):
    dropper, recent = create(name, SETTINGS), RecentQueries()
    if dropper.query_rows:
        recent.append(queries, end, dropper.query_rows)
    req = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=LENGTH))
    return SimpleNamespace(
        req=req, row=1, serial=0, dropper=dropper, settings=SETTINGS, queries=recent
    )


def expected(chooser, name, queries, positions):
    dropper = create(name, SETTINGS)
    slots, rope = chooser.req_to_token[1].long(), chooser._rotary
    rows = dropper.query_rows

    def layer(i):
        keys, values = (buffer[slots] for buffer in chooser.pool.get_kv_buffer(i))
        return LayerContext(
            layer=i,
            num_layers=LAYERS,
            length=LENGTH,
            num_kv_heads=HEADS,
            queries=queries[i, -rows:] if rows else torch.empty(0),
            gather_keys=lambda: keys,
            gather_values=lambda: values,
            query_positions=positions[-rows:],
            rotary=Rotary(rope.cos_sin_cache),
        )

    return compress(dropper, map(layer, range(LAYERS)), SETTINGS.budget)


@pytest.mark.parametrize("name", [n for n in names() if find(n).codec is None])
def test_a_method_sees_the_request(chooser, name):
    queries = torch.randn(LAYERS, 100, QUERY_HEADS, DIM)
    view = chooser.choose(state(name, queries))
    if name == "identity":
        assert view is None
        return
    wanted = expected(chooser, name, queries, torch.arange(LENGTH - 100, LENGTH))
    assert view is not None and view.kept[0] < LENGTH
    assert all(map(torch.equal, view.layers, wanted.layers))


def filed(chooser, name, queries):
    """What drafts of a request read: the view that was packed, and where the tail begins."""
    views = []

    def file(state, view, slots):
        views.append(view)
        return True

    chooser.packed.file = file
    request = state(name, queries)
    view = chooser.choose(request)
    assert views == [view]
    return view, request.view_length


@pytest.mark.parametrize("name", ["kivi2", "snapkv+kivi2", "int4"])
def test_the_latest_tokens_stay_as_they_are(chooser, name):
    residual = 0 if name == "int4" else 32
    queries = torch.randn(LAYERS, 100, QUERY_HEADS, DIM)
    view, tail_start = filed(chooser, name, queries)
    assert tail_start == view.length == LENGTH - residual
    assert int(view.layers[0].max()) < tail_start
    if name == "snapkv+kivi2":
        whole = chooser.choose(state("snapkv", queries)).layers[0]
        assert torch.equal(view.layers[0], whole[whole < tail_start][None])
        assert 0 < view.kept[0] < whole.shape[1], "some would be listed"
    chooser._offloads = True
    view, tail_start = filed(chooser, name, queries)
    assert tail_start == view.length == LENGTH, "they would not be on the device"


def test_short_contexts_are_not_packed_at_all(chooser):
    request = state("kivi4", None)
    request.req.kv.kv_committed_len, request.barred = 32, True
    assert chooser.choose(request) is None
    assert request.has_view and request.view_length == 0 and not request.barred


def test_queries_that_are_not_the_latest_are_turned_back_from_where_they_stand(chooser):
    queries = torch.randn(LAYERS, 100, QUERY_HEADS, DIM) + 3
    view = chooser.choose(state("expected-attention", queries, end=250))
    there = expected(chooser, "expected-attention", queries, torch.arange(150, 250))
    assert torch.equal(view.layers[0], there.layers[0])
    last = expected(chooser, "expected-attention", queries, torch.arange(200, 300))
    assert not torch.equal(view.layers[0], last.layers[0])


@dataclass(frozen=True)
class Failing(Knorm):
    def score(self, ctx):
        raise RuntimeError("cannot score")


def test_a_method_that_fails_costs_its_request_the_drafts(chooser, caplog):
    request = state("knorm", None)
    assert chooser.choose(request) is not None, "precondition"
    request.dropper, request.compressor, request.limit = Failing(), "failing", 8
    request.req.rid = "r1"
    assert chooser.choose(request) is None
    assert request.limit == 0 and request.has_view and request.view_length == 0
    assert "failing: no view, r1" in caplog.text and "cannot score" in caplog.text


def test_lists_that_find_no_memory_cost_their_request_the_drafts(chooser, caplog, monkeypatch):
    def no_memory(heads):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(chooser.store, "widen", no_memory)
    assert chooser.choose(state("streaming", None)) is not None, "it has a list a layer"
    request = state("knorm", None)
    request.compressor, request.limit, request.req.rid = "knorm", 8, "r1"
    assert chooser.choose(request) is None
    assert request.limit == 0 and request.has_view and request.view_length == 0
    assert "knorm: no view, r1" in caplog.text and "no memory" in caplog.text


class Req:
    def __init__(self, **asked):
        self.sampling_params = SimpleNamespace(custom_params={"vericache": asked})


def test_a_prompt_keeps_the_queries_that_its_own_method_wants():
    requests = Requests(VeriCacheConfig(draft_len=4))
    queries = torch.randn(LAYERS, 100, QUERY_HEADS, DIM)
    for asked, rows in (
        ({}, 16),
        ({"window": 8}, 8),
        ({"compressor": "h2o"}, 64),
        ({"compressor": "tova"}, 1),
        ({"compressor": "knorm"}, 0),
        ({"enabled": False}, 0),
    ):
        req = Req(**asked)
        assert requests.query_rows(req) == rows
        requests.keep_queries(req, queries, LENGTH, rows)
        kept = requests._prompt_queries.get(req)
        assert (0 if kept is None else len(kept)) == rows

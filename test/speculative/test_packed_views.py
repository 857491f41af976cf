"""Packed copies of requests: what is in them, and when their slots are free again."""

from types import SimpleNamespace

import pytest
import torch

from sgl_kernel_ext import CODECS
from sgl_kernel_ext.reference.packed import pack, unpack
from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.views import ViewStore
from sglang_vericache.speculative.packed_views import PackedViews

LAYERS, HEADS, DIM, SLOTS = 2, 3, 64, 200


class KV:
    """Stands in for SGLang's KV pool."""

    start_layer, layer_num = 0, LAYERS

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.buffers = torch.randn(LAYERS, 2, SLOTS, HEADS, DIM, generator=generator)

    def get_key_buffer(self, layer):
        return self.buffers[layer, 0]

    def get_kv_buffer(self, layer):
        return tuple(self.buffers[layer])


def state(serial, codec="int8", barred=50):
    dropper, req = SimpleNamespace(codec=codec), SimpleNamespace(finished=lambda: False)
    return SimpleNamespace(serial=serial, row=serial, dropper=dropper, barred=barred, req=req)


@pytest.fixture
def views():
    pools = []

    def add_view_pool(layers):
        pools.append(layers)
        return len(pools)

    store = ViewStore(rows=4, layers=LAYERS, heads=1, capacity=10, device="cpu")
    packed = PackedViews(KV(), store, 120, add_view_pool)
    packed.pools, packed.store = pools, store
    return packed


def everything(length=50):
    return DraftView((torch.arange(length, dtype=torch.int32)[None],) * LAYERS, length)


SOURCE = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)).int()


@pytest.mark.parametrize("heads", [1, HEADS])
def test_copies_hold_the_listed_tokens(views, heads):
    views.store.widen(heads)
    generator = torch.Generator().manual_seed(2)
    layers = [
        torch.stack(
            [torch.randperm(50, generator=generator)[:n].sort().values for _ in range(heads)]
        )
        for n in (20, 7)
    ]
    assert views.file(state(1), DraftView(tuple(x.int() for x in layers), 50), SOURCE[:50])
    lists = views.store.lists(torch.tensor([1]), torch.ones(1, dtype=torch.int32))
    assert lists.pool.tolist() == [1]
    for layer, positions in enumerate(layers):
        for head in range(HEADS):
            column = head % heads
            start, n = (int(x[layer, 0, column]) for x in (lists.start, lists.length))
            slots = lists.indices[start : start + n].long()
            for (packed, codec), plain in zip(
                views.pools[0][layer].parts, views._kv.buffers[layer], strict=True
            ):
                expected = plain[SOURCE[positions[column]].long(), head]
                found = unpack(packed[slots], DIM, codec)[:, head]
                torch.testing.assert_close(found, expected, atol=0.03, rtol=0.01)


def test_copies_of_blocks_hold_the_listed_tokens(views):
    """Lists of different lengths, of more than one block and of less."""
    views.store.widen(HEADS)
    kept = torch.arange(0, 80, 2, dtype=torch.int32)
    lists = torch.stack([kept, kept.minimum(kept[4]), kept.minimum(kept[32])])
    lengths = (40, 5, 33)
    view = DraftView((lists,) * LAYERS, 80, (lengths,) * LAYERS)
    view.check_integrity()
    assert views.file(state(1, codec="kivi4"), view, SOURCE[:80])
    assert views.usage()["kivi4"] == {"tokens": 128, "bytes": 128 * 480, "used": 64}
    filed = views.store.lists(torch.tensor([1]), torch.ones(1, dtype=torch.int32))
    for layer in range(LAYERS):
        for head, count in enumerate(lengths):
            start = int(filed.start[layer, 0, head])
            slots = filed.indices[start : start + count].long()
            source = SOURCE[lists[head, :count].long()].long()
            for (packed, codec), plain in zip(
                views.pools[0][layer].parts, views._kv.buffers[layer], strict=True
            ):
                found = unpack(packed, DIM, codec)[slots, head]
                torch.testing.assert_close(found, plain[source, head], atol=0.25, rtol=0.01)
    views.check_integrity()
    views.retain([])
    assert views.pool("kivi4").available() == 128


def test_lists_of_different_lengths_share_slots(views):
    """Entry j of every list is in slot j; a shorter list ends before the others."""
    views.store.widen(HEADS)
    lists = torch.tensor([[0, 4, 9, 30], [7, 8, 8, 8], [1, 2, 3, 3]], dtype=torch.int32)
    view = DraftView((lists,) * LAYERS, 50, ((4, 2, 3),) * LAYERS)
    view.check_integrity()
    assert views.file(state(1), view, SOURCE[:50])
    assert views.usage()["int8"]["used"] == 4
    filed = views.store.lists(torch.tensor([1]), torch.ones(1, dtype=torch.int32))
    for layer in range(LAYERS):
        assert filed.length[layer, 0].tolist() == [4, 2, 3]
        for head, count in enumerate((4, 2, 3)):
            start = int(filed.start[layer, 0, head])
            slots = filed.indices[start : start + count].long()
            keys = views._kv.buffers[layer][0][SOURCE[lists[head, :count].long()].long(), head]
            packed, codec = views.pools[0][layer].parts[0]
            found = unpack(packed[slots], DIM, codec)[:, head]
            torch.testing.assert_close(found, keys, atol=0.03, rtol=0.01)


def test_slots_come_back(views):
    first, second, third = state(1), state(2), state(3)
    assert all(views.file(each, everything(), SOURCE[:50]) for each in (first, second))
    assert not views.has_room(third)
    assert not views.file(third, everything(), SOURCE[:50]) and not views.holds(third)
    assert views.has_room(state(3, barred=20)) and not views.has_room(state(3, barred=21))
    assert views.has_room(state(3, codec="int4")), "a pool of its own"
    views.check_integrity()
    assert views.usage()["int8"]["used"] == 100
    views.release(first)
    assert views.has_room(third) and views.file(third, everything(), SOURCE[:50])
    second.req.finished = lambda: True
    assert views.usage()["int8"]["used"] == 50
    views.retain([third])
    assert not views.holds(second) and views.holds(third)
    assert views.pool("int8").available() == 70
    views.check_integrity()
    views.retain([])
    assert views.pool("int8").available() == 120
    assert views.store.lists(torch.tensor([3]), torch.ones(1, dtype=torch.int32)).pool is None


def test_what_was_lent_comes_back_before_anybody_goes_without(views):
    asked = []

    def give_up():
        asked.append(views.usage()["int8"]["used"])
        views.take_back("borrower")

    views.give_up_room = give_up
    slots = views.lend("borrower", "int8", 80)
    assert len(slots) == 80 and views.lend("other", "int8", 41) is None
    views.check_integrity()
    assert views.has_room(state(1)), "it could have what is lent"
    assert views.file(state(2, codec="int4"), everything(), SOURCE[:50]) and asked == []
    assert views.file(state(1), everything(), SOURCE[:50]) and asked == [80]
    views.check_integrity()
    assert not views.has_room(state(3, barred=71))


def test_what_is_larger_than_the_pool_never_finds_room(views):
    """Or its view would be chosen anew in every iteration in which the pool is empty."""
    assert not views.file(state(1), everything(121), SOURCE[:121])
    assert views.has_room(state(1, barred=120)) and not views.has_room(state(1, barred=121))


def test_nothing_is_lost_where_there_is_no_memory_to_file_a_copy(views, monkeypatch):
    def no_memory(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(views.store, "put_elsewhere", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        views.file(state(1), everything(), SOURCE[:50])
    assert not views.holds(state(1)) and views.pool("int8").available() == 120
    views.check_integrity()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_listed_codes_are_those_of_the_copy(views, codec):
    own = state(1, codec=codec)
    view = DraftView(tuple(torch.arange(n, dtype=torch.int32)[None] for n in (50, 20)), 50)
    assert views.file(own, view, SOURCE[:50])
    for layer, kept in enumerate(view.kept):
        buffers, slots = views.listed(own, layer)
        for packed, plain in zip(buffers, views._kv.buffers[layer], strict=True):
            expected = pack(plain[SOURCE[:kept].long()], CODECS[codec].keys)
            assert torch.equal(packed[slots[:kept].long()], expected)

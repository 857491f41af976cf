"""The store of draft views: lists of any length per layer, one or several a layer."""

import torch

from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.views import ViewStore

SLOTS = torch.arange(100, 200, dtype=torch.int32)


def view(*counts, heads=1):
    layers = (torch.arange(n, dtype=torch.int32).repeat(heads, 1) for n in counts)
    return DraftView(tuple(layers), 100)


def listed(store, row, layer, head=0):
    lists = store.lists(torch.tensor([row]), torch.ones(1, dtype=torch.int32))
    start, length = int(lists.start[layer, 0, head]), int(lists.length[layer, 0, head])
    return lists.indices[start : start + length].tolist()


def test_a_longer_list_makes_room_and_moves_nothing():
    """A method may keep more than the budget in one layer and less in another."""
    store = ViewStore(rows=3, layers=2, heads=1, capacity=10, device="cpu")
    store.put(1, view(10, 5), SLOTS)
    store.put(2, view(3, 60), SLOTS)
    assert store.capacity == 60
    assert listed(store, 1, 0) == SLOTS[:10].tolist()
    assert listed(store, 1, 1) == SLOTS[:5].tolist()
    assert listed(store, 2, 1) == SLOTS[:60].tolist()


def test_widening_repeats_lists_for_every_head():
    store = ViewStore(rows=2, layers=1, heads=1, capacity=8, device="cpu")
    store.put(0, view(4), SLOTS)
    store.widen(3)
    store.put(1, view(20, heads=3), SLOTS)
    assert [listed(store, 0, 0, head) for head in range(3)] == [SLOTS[:4].tolist()] * 3
    assert [listed(store, 1, 0, head) for head in range(3)] == [SLOTS[:20].tolist()] * 3


def test_a_group_that_verifies_has_no_list():
    store = ViewStore(rows=1, layers=1, heads=1, capacity=8, device="cpu")
    store.put(0, view(4), SLOTS)
    lists = store.lists(torch.tensor([0, 0]), torch.tensor([1, 0], dtype=torch.int32))
    assert lists.length[0, :, 0].tolist() == [4, 0]

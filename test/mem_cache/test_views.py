"""The store of draft views: lists of any length per layer, one or several a layer."""

import pytest
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


def test_without_memory_to_make_room_nothing_changes(monkeypatch):
    store = ViewStore(rows=2, layers=1, heads=1, capacity=8, device="cpu")
    store.put(0, view(4), SLOTS)

    def no_memory(*args):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", no_memory)
        for attempt in (lambda: store.widen(3), lambda: store.put(1, view(20), SLOTS)):
            with pytest.raises(torch.OutOfMemoryError):
                attempt()
            assert listed(store, 0, 0) == SLOTS[:4].tolist()
    store.put(1, view(20), SLOTS)
    store.widen(3)
    assert listed(store, 1, 0, 2) == SLOTS[:20].tolist()


def test_a_group_that_verifies_has_no_list():
    store = ViewStore(rows=1, layers=1, heads=1, capacity=8, device="cpu")
    store.put(0, view(4), SLOTS)
    lists = store.lists(torch.tensor([0, 0]), torch.tensor([1, 0], dtype=torch.int32))
    assert lists.length[0, :, 0].tolist() == [4, 0]


def test_views_in_another_pool_keep_their_lists_when_the_store_grows():
    """One list serves all layers and heads, and may take a row's whole block."""
    store = ViewStore(rows=3, layers=2, heads=1, capacity=10, device="cpu")
    drafting = torch.ones(2, dtype=torch.int32)
    store.put(0, view(10, 5), SLOTS)
    assert store.lists(torch.tensor([0, 1]), drafting).pool is None
    copy = torch.arange(900, 918, dtype=torch.int32)
    store.put_elsewhere(1, view(18, 4), copy, 2)
    assert store.capacity == 10, "precondition: the list is longer than a layer's room"
    for change in (lambda: None, lambda: store.widen(3), lambda: store.put(2, view(60, 2), SLOTS)):
        change()
        assert listed(store, 1, 0) == copy.tolist()
        assert listed(store, 1, 1) == copy[:4].tolist()
        assert listed(store, 0, 0) == SLOTS[:10].tolist()
    lists = store.lists(torch.tensor([1, 0]), drafting)
    assert lists.pool.tolist() == [2, 0]
    assert store.lists(torch.tensor([1, 0]), drafting * 0).pool.tolist() == [0, 0]
    store.put_elsewhere(2, view(400, 1), torch.arange(400, dtype=torch.int32), 1)
    assert listed(store, 2, 0) == list(range(400)) and listed(store, 1, 0) == copy.tolist()

    store.host_pool = 3
    hosts = torch.tensor([0, 0, 1], dtype=torch.int32)
    mixed = store.lists(torch.tensor([1, 0, 0]), 1 - hosts, hosts)
    assert mixed.pool.tolist() == [2, 0, 3]

    store.forget(1)
    store.forget(2)
    store.put(1, view(3, 7), SLOTS)
    assert [listed(store, 1, layer) for layer in (0, 1)] == [SLOTS[:3].tolist(), SLOTS[:7].tolist()]
    assert store.lists(torch.tensor([1, 0]), drafting).pool is None


class Pool:
    """Keys and values that name their slot and head."""

    start_layer = 0

    def __init__(self, layers, heads):
        named = 10.0 * torch.arange(300)[:, None, None] + torch.arange(heads)[:, None]
        self.buffers = torch.stack([named, -named]).repeat(layers, 1, 1, 1, 1)

    def get_kv_buffer(self, layer):
        return self.buffers[layer].unbind()


def test_lists_of_different_lengths_are_filed_and_copied():
    """Each head of a layer reads its own tokens and no more, before and after they move."""
    lists = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 9, 9, 9]], dtype=torch.int32)
    uneven = DraftView((lists, lists[:, :1]), 100, ((5, 2), (1, 1)))
    uneven.check_integrity()
    store = ViewStore(rows=2, layers=2, heads=2, capacity=4, device="cpu")
    store.put(1, uneven, SLOTS)
    wanted = [[100, 101, 102, 103, 104], [107, 109]]
    assert [listed(store, 1, 0, head) for head in range(2)] == wanted
    assert [listed(store, 1, 1, head) for head in range(2)] == [[100], [107]]
    assert store.longest(1) == 5

    pool, slots = Pool(2, 2), torch.arange(200, 205)
    store.relocate(1, pool, slots)
    for head in range(2):
        moved = listed(store, 1, 0, head)
        assert moved == slots[: len(wanted[head])].tolist()
        keys = pool.get_kv_buffer(0)[0][moved, head, 0]
        assert keys.tolist() == [10 * slot + head for slot in wanted[head]]


def test_a_list_may_not_go_on_behind_its_end():
    lists = torch.tensor([[0, 1, 2], [7, 9, 8]], dtype=torch.int32)
    with pytest.raises(AssertionError):
        DraftView((lists,), 100, ((3, 2),)).check_integrity()
    with pytest.raises(AssertionError):
        DraftView((lists[:1],), 100, ((2,),)).check_integrity()
    lists[1, 2] = 9
    DraftView((lists,), 100, ((3, 2),)).check_integrity()

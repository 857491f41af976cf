"""SGLang's real radix tree under draft views: what a request has locked stays (case K9).

Views are lists of slots in the tree's own pool, so the promise they need is the tree's: a locked
node is never evicted, lock counts never fall below zero, and sizes add up to the pool.
"""

from array import array
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.views import ViewStore
from sglang_vericache.platform import bootstrap

bootstrap.install()

from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture  # noqa: E402

SLOTS, REQUESTS, PAGES = 192, 6, 10


@dataclass
class Reader:
    """A running request: the prefix it has locked, and the slots it read there first."""

    row: int
    node: int
    receipt: object
    tokens: list[int]
    slots: torch.Tensor


class Model:
    """The cache and what must be true of it, whatever is done in which order."""

    def __init__(self, page):
        config = CacheConfig(page_size=page, kv_size=SLOTS, num_layers=2, max_num_reqs=REQUESTS)
        self.page = page
        self.tree, self.allocator, _ = build_fixture(config)
        self.views = ViewStore(rows=REQUESTS, layers=1, heads=1, capacity=SLOTS, device="cpu")
        self.readers: list[Reader] = []
        self.total = self.allocator.available_size()

    def match(self, tokens):
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def slots(self, match):
        return self.tree.path_device_indices(match.last_device_node)[: match.device_prefix_len]

    def insert(self, tokens):
        """What a finished request does: its new tokens enter the tree, its copies are freed."""
        if self.allocator.available_size() < len(tokens):
            self.tree.evict(EvictParams(num_tokens=len(tokens)))
        value = self.allocator.alloc(len(tokens))
        if value is None:
            return
        self.tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=value))
        assert self.match(tokens).device_prefix_len == len(tokens)

    def lock(self, tokens):
        """A request starts on a cached prefix, and chooses a view of it."""
        found = self.match(tokens)
        taken = {reader.row for reader in self.readers}
        if found.device_prefix_len == 0 or len(taken) == REQUESTS:
            return
        row = min(set(range(REQUESTS)) - taken)
        receipt = self.tree.inc_lock_ref(found.last_device_node)
        slots = self.slots(found).clone()
        view = DraftView((torch.arange(0, len(slots), 2, dtype=torch.int32)[None],), len(slots))
        self.views.put(row, view, slots)
        reader = Reader(row, found.last_device_node, receipt, tokens[: len(slots)], slots)
        self.readers.append(reader)

    def unlock(self, which):
        reader = self.readers.pop(which % len(self.readers))
        self.tree.dec_lock_ref(reader.node, reader.receipt.to_dec_params())

    def evict(self, count):
        self.tree.evict(EvictParams(num_tokens=count))

    def check(self):
        self.tree.sanity_check()
        free, evictable = self.allocator.available_size(), self.tree.evictable_size()
        locked = self.tree.protected_size()
        assert min(free, evictable, locked) >= 0
        assert free + evictable + locked == self.total
        assert (locked == 0) == (not self.readers)
        free_slots = set(self.allocator.get_all_free_pages().tolist())
        for reader in self.readers:
            slots = self.slots(self.match(reader.tokens))
            assert torch.equal(slots, reader.slots), "a locked prefix moved or was evicted"
            count = int(self.views.length[0, reader.row])
            listed = self.views.indices[reader.row, 0, 0, :count]
            assert torch.equal(listed, reader.slots[::2].int()), "a view lists other slots"
            assert free_slots.isdisjoint(listed.tolist()), "a listed slot is free"


@pytest.mark.parametrize("page", [1, 16])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_events(page, data):
    model = Model(page)
    chains: list[list[int]] = []
    for step in range(data.draw(st.integers(1, 40))):
        event = data.draw(st.sampled_from(["insert", "insert", "lock", "lock", "unlock", "evict"]))
        if event == "insert" or not chains:
            base = data.draw(st.sampled_from(chains)) if chains else []
            cut = data.draw(st.integers(0, len(base) // page)) * page
            fresh = data.draw(st.integers(1, max(PAGES // page, 1))) * page
            tokens = (base[:cut] + [1000 * (step + 1) + i for i in range(fresh)])[:96]
            model.insert(tokens)
            chains.append(tokens)
        elif event == "lock":
            model.lock(data.draw(st.sampled_from(chains)))
        elif event == "unlock" and model.readers:
            model.unlock(data.draw(st.integers(0, REQUESTS)))
        elif event == "evict":
            model.evict(data.draw(st.integers(0, SLOTS)))
        model.check()
    while model.readers:
        model.unlock(0)
    model.check()
    model.evict(SLOTS)
    assert model.allocator.available_size() == model.total


def test_unlocked_prefixes_are_evicted():
    """Negative control: it is the lock that keeps a prefix."""
    model = Model(1)
    tokens = list(range(1, 40))
    model.insert(tokens)
    model.lock(tokens)
    model.evict(SLOTS)
    model.check()
    model.unlock(0)
    model.evict(SLOTS)
    assert model.match(tokens).device_prefix_len == 0

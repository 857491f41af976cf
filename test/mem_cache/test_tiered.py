"""The real tree, pools and copies of HiCache under requests that come, offload, stage and go (K9).

Every slot that is written holds a value that its token, position and history determine, so a check
finds any prefix that was evicted, moved or overwritten, in full or compressed form (H14).
"""

import atexit
import time
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.views import ViewStore
from sglang_vericache.platform import bootstrap, hicache

bootstrap.install()
hicache.install()

from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture  # noqa: E402

from sglang_vericache.mem_cache.tiered import TieredCache  # noqa: E402

SLOTS, REQUESTS, LAYERS, LONGEST = 96, 5, 2, 40


class Model:
    """The cache, its requests, and what must be true of them whatever happened."""

    def __init__(self, page, host_ratio=4.0):
        self.page = page
        config = CacheConfig(
            page_size=page, kv_size=SLOTS, num_layers=LAYERS, max_num_reqs=REQUESTS
        )
        stock, self.allocator, self.rows = build_fixture(config)
        self.cache = TieredCache(stock.cache_init_params)
        server_args = ServerArgs(
            model_path="dummy",
            page_size=page,
            hicache_io_backend="direct",
            hicache_mem_layout="layer_first",
            hicache_ratio=host_ratio,
        )
        set_global_server_args_for_scheduler(server_args)
        self.cache.init_hicache(server_args, stock.cache_init_params)
        atexit.unregister(self.cache.shutdown)
        self.pool = self.allocator.get_kvcache()
        self.store = ViewStore(REQUESTS + 1, LAYERS, 1, LONGEST, "cpu")
        self.running: list[Req] = []
        self.kept: dict[Req, list[int]] = {}
        self.total = self.allocator.available_size()
        self.started = 0
        self.staged = self.read_in_place = 0
        self.cache.reads_host = True
        self.cache.give_up_room = self.take_back_all

    def events(self):
        """What SGLang's scheduler does between two passes."""
        self.cache.check_hicache_events()

    def room(self, tokens):
        missing = tokens - self.allocator.available_size()
        if missing > 0:
            self.cache.evict(EvictParams(num_tokens=missing))
        return self.allocator.available_size() >= tokens

    def evict(self, tokens):
        """And spoil what is free, so that no read of it goes unnoticed."""
        self.cache.evict(EvictParams(num_tokens=tokens))
        free = [s for s in self.allocator.get_all_free_pages().tolist() if s]
        for layer in range(LAYERS):
            for buffer in self.pool.get_kv_buffer(layer):
                buffer[free] = 777

    def value(self, req, position):
        ids = [*req.origin_input_ids, *req.output_ids][: position + 1]
        return hash(tuple(ids)) % 251 + position / 256

    def write(self, req, start, end):
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        for position in range(start, end):
            for layer in range(LAYERS):
                for scale, buffer in zip((1, -1), self.pool.get_kv_buffer(layer), strict=True):
                    buffer[row[position]] = scale * (self.value(req, position) + layer)

    def grow(self, req, tokens):
        """Whole pages of new slots for the next tokens."""
        slots = self.allocator.alloc(tokens)
        start = req.kv.kv_committed_len
        self.rows.req_to_token[req.kv.req_pool_idx, start : start + tokens] = slots.int()
        req.kv.kv_committed_len = req.kv.kv_allocated_len = start + tokens
        self.write(req, start, start + tokens)

    def start(self, ids):
        """Match, load what the host has, prefill the rest, publish it."""
        if len(self.running) == REQUESTS:
            return
        self.started += 1
        params = SamplingParams(max_new_tokens=8)
        req = Req(f"r{self.started}", "", array("q", ids), params)
        req.refresh_fill_ids()
        found = match_kv_cache(req, self.cache, array("q", ids))
        if found.host_hit_length and self.room(found.host_hit_length):
            self.cache.load_back(found.best_match_node)
            found = match_kv_cache(req, self.cache, array("q", ids))
        lock = self.cache.lock(req.last_node)
        fresh = len(ids) - req.prefix_len
        if not self.room(fresh):
            self.cache.unlock(lock)
            return
        req.lock = lock
        self.rows.alloc([req])
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[: req.prefix_len] = self.cache.path_device_indices(req.last_node)[: req.prefix_len]
        req.kv.cache_protected_len = req.kv.kv_committed_len = req.prefix_len
        index = self.cache.ready_to_load_host_cache()
        if index >= 0:  # as the prefill pass does
            counter = self.cache.cache_controller.layer_done_counter
            counter.events[index].wait(LAYERS - 1)
        self.compare(req, range(req.prefix_len), row, ())
        self.grow(req, fresh)
        self.cache.checkpoint(req, up_to=len(ids))
        self.running.append(req)

    def decode(self, req):
        """A page of tokens after a verify pass, which needs the full KV."""
        if self.cache.is_offloaded(req) or req.kv.kv_committed_len + self.page > LONGEST:
            return
        if not self.room(self.page):
            return
        req.output_ids.extend(range(9000 + self.started, 9000 + self.started + self.page))
        self.grow(req, self.page)

    def offload(self, req):
        if self.cache.is_offloaded(req) or not self.cache.can_offload(req):
            return
        self.cache.await_copy(req)  # as whoever chooses a view does
        self.cache.keep(req)
        self.kept.pop(req, None)
        self.cache.publish(req)
        length = req.kv.kv_committed_len
        kept = list(range(0, length, 3))
        row = self.rows.req_to_token[req.kv.req_pool_idx, :length]
        view = DraftView((torch.tensor([kept], dtype=torch.int32),) * LAYERS, length)
        self.store.put(req.kv.req_pool_idx, view, row)
        slots = self.cache.allocate(len(kept))
        if slots is None:
            return
        self.store.relocate(req.kv.req_pool_idx, self.pool, slots)
        if self.cache.offload(req, slots):
            self.kept[req] = kept
        else:
            self.allocator.free(slots)

    def stage(self, req):
        if not self.cache.is_offloaded(req):
            return
        loaded = self.cache.stage(req)
        if loaded is None:
            return
        self.staged += loaded
        index = self.cache.start_copies()
        if index >= 0:  # as the pass does
            counter = self.cache.cache_controller.layer_done_counter
            counter.events[index].wait(LAYERS - 1)
        self.verify(req)

    def verify(self, req):
        """What a verify pass reads is there."""
        if req in self.cache.holdings and not self.cache.is_offloaded(req):
            self.cache.await_copy(req)
            row = self.rows.req_to_token[req.kv.req_pool_idx]
            self.compare(req, range(req.kv.cache_protected_len), row, ())

    def read_host(self, req):
        """A verify pass that reads the prefix where it lies, as on a CPU."""
        if not self.cache.may_read_host(req):
            return
        slots = self.cache.host_slots(req)
        assert len(slots) == req.kv.cache_protected_len
        self.compare(req, range(len(slots)), slots, (), self.cache.host_buffers())
        self.read_in_place += len(slots)

    def retract(self, req):
        """What it has computed goes to the host first."""
        self.cache.demote(req)
        self.finish(req, aborted=True)

    def lend(self, tokens):
        """To drafts of a request whose full KV has not come, which write there."""
        self.started += 1
        slots = self.cache.lend(self.started, tokens)
        if slots is not None:
            for layer in range(LAYERS):
                for buffer in self.pool.get_kv_buffer(layer):
                    buffer[slots] = 555

    def take_back_all(self):
        for borrower in list(self.cache.lent):
            self.cache.take_back(borrower)

    def copy_ahead(self, req):
        """Several at once, slowly; nobody waits for them now."""
        stream = self.cache.cache_controller.l2_transfer_engine.host_to_device_stream
        stream.launch(lambda: time.sleep(0.003))
        self.cache.copy_ahead([r for r in self.running if self.cache.is_offloaded(r)])

    def release(self, req):
        if req in self.cache.holdings and not self.cache.is_offloaded(req):
            self.cache.release(req)

    def finish(self, req, aborted):
        self.running.remove(req)
        self.kept.pop(req, None)
        release_kv_cache(req, self.cache, checkpoint=not aborted)

    def sync(self):
        """Wait for all copies, as a pass that reads them does."""
        engine = self.cache.cache_controller.l2_transfer_engine
        engine.host_to_device_stream.synchronize()
        engine.device_to_host_stream.synchronize()

    def check(self):
        self.sync()
        self.events()  # the tree's own check wants no copy in flight
        self.cache.sanity_check()
        private = sum(r.kv.kv_allocated_len - r.kv.cache_protected_len for r in self.running)
        free, evictable = self.allocator.available_size(), self.cache.evictable_size()
        assert free + evictable + self.cache.protected_size() + private == self.total
        pages = self.allocator.get_all_free_pages()
        free_slots = set(pages.tolist())
        for req in self.running:
            row = self.rows.req_to_token[req.kv.req_pool_idx]
            start = req.kv.cache_protected_len if self.cache.is_offloaded(req) else 0
            self.compare(req, range(start, req.kv.kv_committed_len), row[start:], free_slots)
            if req in self.cache.holdings:
                listed = self.store.indices[req.kv.req_pool_idx, 0, 0, : len(self.kept[req])]
                self.compare(req, self.kept[req], listed, free_slots)

    def compare(self, req, positions, slots, free_slots, buffers=None):
        on_device = buffers is None  # where slot 0 is a dummy
        buffers = buffers or [self.pool.get_kv_buffer(layer) for layer in range(LAYERS)]
        for position, slot in zip(positions, slots.tolist(), strict=False):
            assert slot or not on_device, "no slot"
            assert slot not in free_slots, "a slot in use is free"
            for layer, (keys, values) in enumerate(buffers):
                wanted = torch.tensor(self.value(req, position) + layer).to(keys.dtype)
                assert (keys[slot] == wanted).all(), "another token's key"
                assert (values[slot] == -wanted).all(), "another token's value"


EVENTS = [
    *("start", "start", "decode", "offload", "stage", "release", "finish", "abort", "evict"),
    *("copy_ahead", "verify", "read_host", "retract", "lend", "take_back", "flush"),
]


@pytest.mark.parametrize(("page", "host_ratio"), [(1, 4.0), (4, 4.0), (1, 1.1)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_events(page, host_ratio, data):
    model = Model(page, host_ratio)
    prompts: list[list[int]] = []
    for step in range(data.draw(st.integers(1, 40))):
        event = data.draw(st.sampled_from(EVENTS))
        model.events()
        if event == "start":
            base = data.draw(st.sampled_from(prompts)) if prompts else []
            cut = data.draw(st.integers(0, len(base) // page)) * page
            fresh = data.draw(st.integers(1, 20 // page)) * page
            ids = (base[:cut] + [100 * (step + 1) + i for i in range(fresh)])[:32]
            prompts.append(ids)
            model.start(ids)
        elif event == "flush":
            if not model.running:
                model.cache.reset()  # takes back what was lent
                assert not model.cache.lent
                model.allocator.clear()
                prompts = []
        elif event == "evict":
            model.evict(data.draw(st.integers(1, SLOTS)))
        elif event == "lend":
            model.lend(data.draw(st.integers(1, SLOTS // 4)))
        elif event == "take_back":
            model.take_back_all()
        elif model.running:
            req = data.draw(st.sampled_from(model.running))
            if event == "retract":
                prompts.append([*req.origin_input_ids, *req.output_ids])  # starts again later
            if event in ("finish", "abort"):
                model.finish(req, aborted=event == "abort")
            else:
                getattr(model, event)(req)
        if data.draw(st.booleans()):  # waits for copies, which hides those that nobody waited for
            model.check()
    while model.running:
        model.finish(model.running[0], aborted=False)
        model.check()
    model.take_back_all()
    model.events()
    model.sync()
    model.events()
    model.cache.evict(EvictParams(num_tokens=SLOTS))
    assert model.allocator.available_size() == model.total
    assert not model.cache.holdings


def test_full_kv_comes_back_as_it_was():
    """Precondition of the above: prefixes do leave the device, and come back."""
    model = Model(1)
    req = host_only(model, list(range(1, 33)))
    assert model.allocator.available_size() == model.total - model.cache.compressed_size()
    model.stage(req)
    assert model.staged == 32
    model.check()


def test_full_kv_is_read_on_the_host_as_it_was():
    model = Model(1)
    req = host_only(model, list(range(1, 33)))
    model.read_host(req)
    assert model.read_in_place == 32
    keys, _ = model.cache.host_buffers()[1]
    keys[model.cache.host_slots(req)[9]] += 1
    with pytest.raises(AssertionError, match="another token's key"):  # negative control
        model.read_host(req)


def test_a_retracted_request_is_found_on_the_host():
    model, ids = Model(1), list(range(1, 17))
    model.start(ids)
    (req,) = model.running
    model.decode(req)
    known = [*req.origin_input_ids, *req.output_ids]
    assert len(known) == 17
    model.retract(req)
    model.evict(SLOTS)
    assert model.allocator.available_size() == model.total
    model.start([*known, 99])
    assert model.running[0].prefix_len == len(known)
    model.check()


def host_only(model, ids):
    """A request whose prefix is on the host alone."""
    model.start(ids)
    (req,) = model.running
    model.offload(req)
    model.events()
    model.sync()
    model.events()
    model.evict(SLOTS)
    return req


def test_a_prefill_waits_for_a_copy_ahead():
    """It finds the prefix on the device before all of it has arrived."""
    model, ids = Model(1), list(range(1, 30))
    host_only(model, ids)
    model.copy_ahead(None)
    model.start([*ids, 31, 32])
    assert model.running[1].prefix_len == len(ids)
    model.check()


def test_a_verify_pass_waits_for_the_copy_of_another():
    model, ids = Model(1), list(range(1, 30))
    first = host_only(model, ids)
    model.stage(first)
    model.start(ids)
    second = model.running[1]
    model.offload(second)
    model.release(first)
    model.events()
    model.sync()
    model.events()
    model.evict(SLOTS)
    stream = model.cache.cache_controller.l2_transfer_engine.host_to_device_stream
    stream.launch(lambda: time.sleep(0.05))
    assert model.cache.copy_ahead([first]) > 0
    assert model.cache.stage(second) == 0, "precondition: another's copy brings it"
    assert model.cache.start_copies() < 0
    model.verify(second)


def test_a_host_pool_without_room_leaves_everything_resident():
    model = Model(1, host_ratio=1.0)
    for i in range(4):
        model.start([100 * i + j for j in range(1, 24)])
    assert len(model.running) == 4
    for req in model.running:
        model.offload(req)
        model.check()
    assert len(model.cache.holdings) < 4, "precondition: the host has room for some only"
    left = [req for req in model.running if req not in model.cache.holdings]
    assert all(req.lock is not None for req in left)

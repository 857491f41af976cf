"""A model of requests on the real tree, pools and copies of HiCache.

Every slot that is written holds a value that its token, position and history determine, so a check
finds any prefix that was evicted, moved or overwritten, in full or compressed form.
"""

import atexit
import time
from array import array
from collections import Counter

import torch

from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.views import ViewStore
from sglang_vericache.platform import bootstrap, hicache, streams

bootstrap.install()
hicache.install()

from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.pool_host import mha  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture  # noqa: E402

from sglang_vericache.mem_cache.tiered import TieredCache  # noqa: E402

SLOTS, REQUESTS, LAYERS, LONGEST = 96, 5, 2, 40


class Transfers:
    """Copies between the pools that have not ended, and the slots that were in two at once (H4).

    Attributes:
        live: copies that write to ("to") or read ("from") a slot, by (buffer, slot, way).
        most: slots in live copies at a time.
        clashes: of a copy that began while another wrote to one of its slots, or read where it
            writes.
    """

    def __init__(self):
        self.live: Counter[tuple[int, int, str]] = Counter()
        self.most = 0
        self.clashes: list[tuple[int, int, str]] = []
        mha.transfer_kv_direct = self.copy

    def copy(self, **kwargs):
        touched = [
            (layer.data_ptr(), slot, way)
            for way, layers, slots in (
                ("from", kwargs["src_layers"], kwargs["src_indices"]),
                ("to", kwargs["dst_layers"], kwargs["dst_indices"]),
            )
            for layer in layers
            for slot in slots.tolist()
        ]
        for buffer, slot, way in touched:
            writers, readers = (self.live[buffer, slot, name] for name in ("to", "from"))
            if writers or (way == "to" and readers):
                self.clashes.append((buffer, slot, way))
        self.live.update(touched)
        self.most = max(self.most, self.live.total())
        hicache.transfer_kv_direct(**kwargs)
        streams.current_stream().launch(lambda: self.live.subtract(touched))


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
        self.transfers = Transfers()
        self.started = 0
        self.staged = self.read_in_place = 0
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
        """New slots for the next tokens."""
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
        req.kv.kv_allocated_len = req.prefix_len
        index = self.cache.ready_to_load_host_cache()
        if index >= 0:  # as the prefill pass does
            counter = self.cache.cache_controller.layer_done_counter
            counter.events[index].wait(LAYERS - 1)
        self.compare(req, range(req.prefix_len), row, ())
        self.grow(req, fresh)
        self.cache.checkpoint(req, up_to=len(ids))
        self.running.append(req)

    def decode(self, req):
        """Up to a page of tokens after a verify pass, which needs the full KV."""
        if self.cache.is_offloaded(req) or req.kv.kv_committed_len + self.page > LONGEST:
            return
        if not self.room(self.page):
            return
        tokens = 1 + (len(req.output_ids) + self.started) % self.page
        req.output_ids.extend(range(9000 + self.started, 9000 + self.started + tokens))
        self.grow(req, tokens)

    def offload(self, req):
        if self.cache.is_offloaded(req) or not self.cache.can_offload(req):
            return
        self.cache.await_copy(req)  # as whoever chooses a view does
        self.cache.keep(req)
        self.kept.pop(req, None)
        self.cache.publish(req)
        length = req.kv.kv_committed_len
        # Some tokens, then whole pages.
        kept = sorted({*range(0, length, 3), *range(length * 3 // 4, length)})
        row = self.rows.req_to_token[req.kv.req_pool_idx, :length]
        view = DraftView((torch.tensor([kept], dtype=torch.int32),) * LAYERS, length)
        self.store.put(req.kv.req_pool_idx, view, row)
        slots = self.cache.allocate(len(kept))
        if slots is None:
            return
        self.store.relocate(req.kv.req_pool_idx, self.pool, slots)
        if self.cache.offload(req, slots, view):
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
        self.cache.reads_host = True
        readable, self.cache.reads_host = self.cache.may_read_host(req), False
        if not readable:
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
        self.cache.sanity_check()  # lock counts and sizes, too
        assert not self.transfers.clashes, "a slot in two live transfers"
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
            for layer, (keys, values, *_) in enumerate(buffers):
                wanted = torch.tensor(self.value(req, position) + layer).to(keys.dtype)
                assert (keys[slot] == wanted).all(), "another token's key"
                assert (values[slot] == -wanted).all(), "another token's value"

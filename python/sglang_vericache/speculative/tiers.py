"""Which running requests leave their full KV to the host, and when they get it back."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING

from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.core import Action, Counters
from sglang_vericache.mem_cache.tiered import TieredCache
from sglang_vericache.scheduler import Link
from sglang_vericache.speculative.state import asked_by

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_vericache.speculative.state import RequestState
    from sglang_vericache.speculative.views import ViewChooser

# ``auto`` offloads while less than this share of the device's slots is free or evictable.
LOW_WATER = 0.25
LOADED_RATE = 0.1


class Tiers:
    """Moves full KV between device and host around the passes of the decode loop.

    Args:
        cache: holds both copies.
        chooser: files the views that drafts read.
        config: tier ``host`` offloads every request that drafts, ``auto`` under pressure.
        counters: counts what is moved.
    """

    def __init__(
        self,
        cache: TieredCache,
        chooser: ViewChooser,
        config: VeriCacheConfig,
        counters: Counters,
    ) -> None:
        self._cache, self._chooser, self._config = cache, chooser, config
        self._counters = counters
        # Of the full KV of a request that verifies, how much had left the device lately.
        self._loaded_share = 1.0
        cache.gives_back = self._gives_back

    def choose_view(self, state: RequestState) -> None:
        """Choose a view of a request whose full KV is on the device, and offload it if due."""
        offloads = self._wants(state)
        self._cache.keep(state.req)  # the copy of its last view is not read any more
        if offloads:
            self._cache.publish(state.req)  # may move KV to slots the tree had
        self._chooser.choose(state)
        if offloads and state.view_length:
            self._offload(state)

    def arrange(
        self,
        states: Sequence[RequestState],
        actions: Sequence[Action],
        copying: Collection[Hashable],
    ) -> tuple[list[Action], int, int]:
        """Bring the full KV of verifying requests to the device, and that of some to come.

        Args:
            copying: serials of requests that verify soon and whose copies should run now.

        Returns:
            The actions, with ``WAIT`` for those that found no room; the tokens that this pass has
            to wait for; and the index of their copies for ``ScheduleBatch.hicache_consumer_index``.
        """
        cache, holdings = self._cache, self._cache.holdings
        arranged = list(actions)
        for state, action in zip(states, actions, strict=True):
            held = holdings.get(state.req)
            if held is None or not held.staged or action is not Action.DRAFT:
                continue
            if state.serial not in copying:
                cache.release(state.req)
        total = staged = 0
        short: list[int] = []
        for i, (state, action) in enumerate(zip(states, actions, strict=True)):
            if action is not Action.VERIFY or state.req not in holdings:
                continue
            if holdings[state.req].staged:
                cache.await_copy(state.req)
                staged += 1
                continue
            loaded = cache.stage(state.req)
            if loaded is None:
                arranged[i] = Action.WAIT
                self._counters.waits += 1
                short.append(state.req.kv.cache_protected_len)
                continue
            total += loaded
            staged += 1
            self._counters.stages += 1
            self._counters.staged_tokens += loaded
            share = loaded / state.req.kv.cache_protected_len
            self._loaded_share += LOADED_RATE * (share - self._loaded_share)
        # Who is staged now gives the room back; with nobody, SGLang must make some.
        cache.unstaged = 0 if staged else min(short, default=0)
        index = cache.ready_to_load_host_cache()
        ahead = [
            state.req
            for state, action in zip(states, actions, strict=True)
            if action is Action.DRAFT and state.serial in copying and cache.is_offloaded(state.req)
        ]
        if ahead:
            self._counters.copied_ahead += cache.copy_ahead(ahead)
        return arranged, total, index

    def link(self) -> Link:
        """What the planner is told about copies."""
        cache = self._cache
        allocator = cache.token_to_kv_pool_allocator
        staged = sum(r.kv.cache_protected_len for r, h in cache.holdings.items() if h.staged)
        room = allocator.available_size() + cache.evictable_size() + staged
        return Link(cache.token_seconds, room)

    def load(self, state: RequestState) -> float:
        """Tokens that the next verify pass of a request is expected to copy."""
        if state.req not in self._cache.holdings:
            return 0.0
        return self._loaded_share * state.req.kv.cache_protected_len

    def usage(self) -> dict[str, int]:
        """See ``TieredCache.usage``."""
        return self._cache.usage()

    def _gives_back(self, req: Req) -> int:
        asked = asked_by(req)
        if not asked.get("enabled", True) or asked.get("unverified") or req.session is not None:
            return 0
        length = len(req.origin_input_ids)
        budget = self._config.compressor_settings.narrowed(
            {"ratio": asked["ratio"]} if "ratio" in asked else {}
        ).budget
        return 0 if length < self._config.min_context else length - budget.tokens(length)

    def _wants(self, state: RequestState) -> bool:
        if state.unverified or state.limit == 0 or not self._cache.can_offload(state.req):
            return False
        if self._config.tier == "host":
            return True
        return state.req in self._cache.holdings or self._is_low()

    def _is_low(self) -> bool:
        allocator = self._cache.token_to_kv_pool_allocator
        left = allocator.available_size() + self._cache.evictable_size()
        return left < LOW_WATER * allocator.size

    def _offload(self, state: RequestState) -> None:
        store = self._chooser.store
        slots = self._cache.allocate(store.longest(state.row))
        if slots is None:
            return
        store.relocate(state.row, self._chooser.pool, slots)
        if self._cache.offload(state.req, slots):
            self._counters.offloads += 1
        else:
            # Its copy stays valid, but would belong to nobody.
            self._cache.token_to_kv_pool_allocator.free(slots)
            self._chooser.choose(state)

"""Which running requests leave their full KV to the host, and when they get it back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from sglang_vericache.compressors import Dropper
from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.core import Counters, DraftView
from sglang_vericache.mem_cache.tiered import TieredCache
from sglang_vericache.scheduler import Planner, Room
from sglang_vericache.speculative.staging import PATIENCE, Staging
from sglang_vericache.speculative.state import choices_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_vericache.speculative.state import RequestState
    from sglang_vericache.speculative.views import ViewChooser


def _gives_room(dropper: Dropper) -> bool:
    """Whether a request whose drafts read its view takes fewer slots of the KV pool."""
    return dropper.drops or dropper.codec is not None


class Tiers:
    """Decides whose full KV is where.

    Args:
        cache: holds both copies.
        chooser: files the views that drafts read.
        config: tier ``host`` offloads every request that drafts, the others under pressure, as far
            as the link can carry it.
        planner: knows what the link carries.
        counters: counts what is moved.
    """

    def __init__(
        self,
        cache: TieredCache,
        chooser: ViewChooser,
        config: VeriCacheConfig,
        planner: Planner,
        counters: Counters,
    ) -> None:
        self._cache, self._chooser, self._config = cache, chooser, config
        self._planner, self._counters = planner, counters
        # Residents that are to leave before their next round, and for how many iterations that
        # holds: one that turns out not to draft stays.
        self._leaving: dict[Hashable, int] = {}
        # Slots that running requests may take in one iteration.
        self._growth = 0
        cache.gives_back = self._gives_back
        in_place = config.staging == "in-place" or (
            config.staging is None and chooser.req_to_token.device.type == "cpu"
        )
        self.staging = Staging(cache, counters, in_place, self._may_leave)

    def choose_view(self, state: RequestState) -> None:
        """Choose a view of a request whose full KV is on the device, and offload it if due."""
        if self._cache.is_offloaded(state.req) and not self.staging.bring(state.req):
            state.has_view = True  # the view it has will do
            return
        self._cache.await_copy(state.req)  # one may have begun ahead
        offloads = self._wants(state)
        self._leaving.pop(state.serial, None)
        self._counters.returns += state.req in self._cache.holdings and not offloads
        self._cache.keep(state.req)  # the copy of its last view is not read any more
        if offloads:
            self._cache.publish(state.req)  # may move KV to slots the tree had
        view = self._chooser.choose(state)
        if view is not None:
            self._store_copy(state, view)
        if offloads and view is not None:
            self._offload(state, view)

    def recall_views(self, states: Sequence[RequestState]) -> None:
        """Have requests change their tier by choosing a view anew.

        Under pressure residents leave; once there is room again one request at a time comes back.
        """
        self._growth = len(states) * (self._config.reserved_draft_len + 1)
        self._leaving = {serial: left - 1 for serial, left in self._leaving.items() if left > 1}
        waits = self.staging.waited > 0 and self.staging.waited % PATIENCE == 0
        for state in states:
            drafting = state.drafts and not state.took_found
            if waits and not state.has_view and self._may_go(state):
                self._leaving[state.serial] = PATIENCE  # as soon as it has chosen a view
                waits = False
                continue
            between_rounds = state.has_view and state.view_length and not drafting
            if not between_rounds:
                continue
            if state.req in self._cache.holdings:
                if self._comes_back(state.req):
                    state.has_view = False
                    return
                continue
            if not self._may_go(state):
                continue
            if waits or self._should_leave(state.committed):
                self._planner.leaves(state.serial, self.staging.copied(state.committed))
                self._leaving[state.serial] = PATIENCE
                state.has_view = False
                waits = False

    def should_leave(self, state: RequestState) -> bool:
        """Whether a request on the device should leave it as soon as it has a view."""
        if state.has_view or state.req in self._cache.holdings or not self._may_leave(state):
            return False
        return self._wants(state)

    def usage(self) -> dict[str, int]:
        """See ``TieredCache.usage``."""
        return self._cache.usage()

    def _gives_back(self, req: Req) -> int:
        """Prompt tokens that a newcomer will leave to the host."""
        config, length = self._config, len(req.origin_input_ids)
        chosen = choices_of(req, config)
        drafts = chosen.limit > 0 and (config.draft_len is not None or length >= config.min_context)
        if not drafts or chosen.unverified or not _gives_room(chosen.dropper):
            return 0
        if req.session is not None:
            return 0
        if config.tier != "host" and not self._should_leave(length, newcomer=length):
            return 0
        if chosen.dropper.codec:
            return length
        heads, budget = self._chooser.num_kv_heads, chosen.settings.budget
        return length - chosen.dropper.longest(length, heads, budget)

    def _may_leave(self, state: RequestState) -> bool:
        """Whether a request can leave its full KV to the host, and room is won by it."""
        config, gated = self._config, state.barred > 0 or (state.has_view and not state.view_length)
        gated |= config.draft_len is None and state.committed < config.min_context
        return not gated and self._can_leave(state) and _gives_room(state.dropper)

    def _may_go(self, state: RequestState) -> bool:
        """Whether a resident can leave now."""
        if state.req in self._cache.holdings or not self._may_leave(state):
            return False
        return self._cache.host_has_room(state.committed)

    def _can_leave(self, state: RequestState) -> bool:
        """Whether a request drafts, and the tree may own its KV."""
        drafts = state.limit > 0 and not state.unverified
        return drafts and self._cache.can_offload(state.req)

    def _wants(self, state: RequestState) -> bool:
        """Whether a request about to draft should leave its full KV to the host."""
        if not self._can_leave(state):
            return False
        if self._config.tier == "host" or state.serial in self._leaving:
            return True
        if state.req in self._cache.holdings:
            return not self._comes_back(state.req)
        return self._should_leave(state.committed)

    def _should_leave(self, tokens: int, newcomer: int = 0) -> bool:
        """Whether requests with ``tokens`` in all should leave them to the host.

        Args:
            newcomer: slots that a request yet to start takes.
        """
        return self._room(newcomer).should_leave(self._planner.carries(self.staging.copied(tokens)))

    def _comes_back(self, req: Req) -> bool:
        """Whether an offloaded request has room to stay on the device."""
        if self._config.tier == "host":
            return False
        missing = 0 if self._cache.holdings[req].staged else req.kv.cache_protected_len
        return self._room().may_return(missing, self._planner.link_busy())

    def _room(self, newcomer: int = 0) -> Room:
        """What is left beside a newcomer that takes so many slots."""
        cache, allocator = self._cache, self._cache.token_to_kv_pool_allocator
        left = allocator.available_size() + cache.evictable_size() - newcomer
        return Room(allocator.size, left, self._growth, cache.refused)

    def _store_copy(self, state: RequestState, view: DraftView) -> None:
        """Have the compressed copy written beside the full KV that SGLang writes."""
        spans, req = self._cache.spans, state.req
        if spans is None or req.skip_radix_cache_insert:
            return
        # Copies in a store are all of the server's own kind.
        kind = self._config.compressor, self._config.compressor_settings
        if (state.compressor, state.settings) != kind:
            return
        tokens = [*req.origin_input_ids, *req.output_ids][: view.length]
        names = spans.names(tokens, req.extra_key, req.cache_salt)
        if names and spans.wants(names):
            spans.publish(names, view.cpu(), *self._chooser.listed(state, view))

    def _offload(self, state: RequestState, view: DraftView) -> None:
        store, packed = self._chooser.store, self._chooser.packed.holds(state)
        slots = self._cache.allocate(0 if packed else store.longest(state.row))
        if slots is None:
            return
        if not packed:
            store.relocate(state.row, self._chooser.pool, slots)
        if self._cache.offload(state.req, slots, None if packed else view):
            self._counters.offloads += 1
            self._planner.leaves(state.serial, self.staging.load(state.req))
            if self.staging.in_place:
                store.put_host(state.row, self._cache.host_slots(state.req))
        elif not packed:
            # Its copy stays valid, but would belong to nobody.
            self._cache.token_to_kv_pool_allocator.free(slots)
            self._chooser.choose(state)

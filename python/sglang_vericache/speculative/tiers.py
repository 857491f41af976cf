"""Which running requests leave their full KV to the host, and when they get it back."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_vericache.compressors import Dropper
from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.core import Action, Counters, DraftView
from sglang_vericache.mem_cache.tiered import TieredCache
from sglang_vericache.scheduler import Link
from sglang_vericache.speculative.state import choices_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_vericache.speculative.state import RequestState
    from sglang_vericache.speculative.views import ViewChooser

# Tiers but ``host`` offload while less than this share of device slots is free or evictable.
LOW_WATER = 0.25
# A request comes back to stay if more than this share is left with it.
HIGH_WATER = 0.5
LOADED_RATE = 0.1
# Iterations that somebody waits before a request that decodes plainly on its staged KV yields.
PATIENCE = 8


class Arranged(NamedTuple):
    """Where the full KV of a pass is.

    Attributes:
        actions: those planned, with ``WAIT`` for requests that found no room.
        loaded: tokens whose copies this pass waits for.
        copies: index of those copies for ``ScheduleBatch.hicache_consumer_index``.
        on_host: whose full KV is read in host memory.
    """

    actions: list[Action]
    loaded: int
    copies: int
    on_host: list[bool]


def _gives_room(dropper: Dropper) -> bool:
    """Whether a request whose drafts read its view takes fewer slots of the KV pool."""
    return dropper.drops or dropper.codec is not None


class Tiers:
    """Moves full KV between device and host around the passes of the decode loop.

    Args:
        cache: holds both copies.
        chooser: files the views that drafts read.
        config: tier ``host`` offloads every request that drafts, the others under pressure.
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
        # Serials of requests that found no room, longest wait first.
        self._waiting: list[Hashable] = []
        self._waited = 0
        cache.gives_back = self._gives_back
        self.in_place = config.staging == "in-place" or (
            config.staging is None and chooser.req_to_token.device.type == "cpu"
        )
        cache.reads_host = self.in_place

    def choose_view(self, state: RequestState) -> None:
        """Choose a view of a request whose full KV is on the device, and offload it if due."""
        if self._cache.is_offloaded(state.req) and not self._bring(state.req):
            state.has_view = True  # the view it has will do
            return
        self._cache.await_copy(state.req)  # one may have begun ahead
        offloads = self._wants(state.req, state.limit)
        self._counters.returns += state.req in self._cache.holdings and not offloads
        self._cache.keep(state.req)  # the copy of its last view is not read any more
        if offloads:
            self._cache.publish(state.req)  # may move KV to slots the tree had
        view = self._chooser.choose(state)
        if view is not None:
            self._store_copy(state, view)
        if offloads and state.view_length:
            self._offload(state)

    def recall_views(self, states: Sequence[RequestState]) -> None:
        """Have requests change their tier by choosing a view anew.

        Under pressure residents leave; once there is room again one request at a time comes back.
        """
        low = self._is_low()
        for state in states:
            between_rounds = state.has_view and state.view_length and not state.drafts
            if not between_rounds:
                continue
            if state.req in self._cache.holdings:
                if self._comes_back(state.req):
                    state.has_view = False
                    return
                continue
            leaves = low and self._cache.host_has_room(state.committed)
            if leaves and self._wants(state.req, state.limit):
                state.has_view = False

    def arrange(
        self,
        states: Sequence[RequestState],
        actions: Sequence[Action],
        copying: Collection[Hashable],
    ) -> Arranged:
        """Bring the full KV of verifying requests to the device, and that of some to come.

        Args:
            copying: serials of requests that verify soon and whose copies should run now.
        """
        cache, holdings = self._cache, self._cache.holdings
        cache.refused = False
        arranged = list(actions)
        ahead: list[Req] = []
        due: list[int] = []
        for i, (state, action) in enumerate(zip(states, actions, strict=True)):
            held = holdings.get(state.req)
            if held is None:
                continue
            if action is Action.VERIFY:
                due.append(i)
            elif state.serial in copying:
                ahead.append(state.req)
            elif held.staged:
                cache.release(state.req)
        due.sort(key=lambda i: self._turn(states[i].serial))
        on_host = [False] * len(states)
        for i in due:
            if cache.may_read_host(states[i].req):
                on_host[i] = True
                self._counters.host_reads += states[i].published
        due = [i for i in due if not on_host[i]]
        total = 0
        waiting = self._yielding(states, due)
        for i in waiting:
            cache.release(states[i].req)
            arranged[i] = Action.WAIT
        for i in due:
            if i in waiting:
                continue
            loaded = self._stage(states[i].req, may_finish_copies=not waiting)
            if loaded is None:
                arranged[i] = Action.WAIT
                waiting.append(i)
            else:
                total += loaded
        index = cache.start_copies()
        for i in due:
            if arranged[i] is Action.VERIFY:
                cache.await_copy(states[i].req)
        if not waiting and (begins := [req for req in ahead if cache.is_offloaded(req)]):
            self._counters.copied_ahead += cache.copy_ahead(begins)
        self._note_waiting([states[i] for i in waiting], states)
        return Arranged(arranged, total, index, on_host)

    def _yielding(self, states: Sequence[RequestState], due: Sequence[int]) -> list[int]:
        """Requests that would keep others from their verify pass for as long as they run.

        One without drafts gives up nothing but a turn; it verifies again when room comes.
        """
        if self._waited < PATIENCE:
            return []
        self._waited = 0
        holdings = self._cache.holdings
        return [i for i in due if holdings[states[i].req].staged and not states[i].drafts]

    def load(self, state: RequestState) -> float:
        """Tokens that the next verify pass of a request is expected to copy."""
        if self.in_place or state.req not in self._cache.holdings:
            return 0.0
        return self._loaded_share * state.req.kv.cache_protected_len

    def link(self) -> Link | None:
        """What the planner is told about copies; None if there are none."""
        if self.in_place:
            return None
        cache = self._cache
        allocator = cache.token_to_kv_pool_allocator
        staged = sum(r.kv.cache_protected_len for r, h in cache.holdings.items() if h.staged)
        room = allocator.available_size() + cache.evictable_size() + staged
        return Link(cache.token_seconds, room)

    def usage(self) -> dict[str, int]:
        """See ``TieredCache.usage``."""
        return self._cache.usage()

    def _stage(self, req: Req, may_finish_copies: bool) -> int | None:
        """Tokens to be copied for a request that verifies now; None without room."""
        if self._cache.holdings[req].staged:
            return 0
        loaded = self._cache.stage(req)
        if loaded is None and may_finish_copies:
            self._cache.finish_copies()
            loaded = self._cache.stage(req)
        if loaded is None:
            return None
        self._counters.stages += 1
        self._counters.staged_tokens += loaded
        share = loaded / req.kv.cache_protected_len
        self._loaded_share += LOADED_RATE * (share - self._loaded_share)
        return loaded

    def _bring(self, req: Req) -> bool:
        """Have all of a request's prefix on the device now; False without room."""
        if self._stage(req, may_finish_copies=True) is None:
            return False
        index = self._cache.start_copies()
        if index >= 0:
            self._cache.holdings[req].copied_by = index
        self._cache.await_copy(req)
        return True

    def _turn(self, serial: Hashable) -> int:
        return self._waiting.index(serial) if serial in self._waiting else len(self._waiting)

    def _note_waiting(
        self, waiting: Sequence[RequestState], states: Sequence[RequestState]
    ) -> None:
        """Remember who waits; tell the tree if nobody is going to give up room soon."""
        serials = [state.serial for state in waiting]
        self._waiting = [s for s in self._waiting if s in serials]
        self._waiting += [s for s in serials if s not in self._waiting]
        self._waited = self._waited + 1 if waiting else 0
        self._counters.waits += len(waiting)
        holdings = self._cache.holdings
        # A resident leaves before its next round, or ends.
        room_comes = any(held.staged for held in holdings.values()) or any(
            s.req not in holdings and _gives_room(s.dropper) and self._wants(s.req, s.limit)
            for s in states
        )
        self._cache.stuck = set() if room_comes else {state.req for state in waiting}

    def _gives_back(self, req: Req) -> int:
        """Prompt tokens that a newcomer will leave to the host."""
        config, length = self._config, len(req.origin_input_ids)
        chosen = choices_of(req, config)
        drafts = chosen.limit > 0 and (config.draft_len is not None or length >= config.min_context)
        if not drafts or chosen.unverified or not _gives_room(chosen.dropper):
            return 0
        if req.session is not None:
            return 0
        if config.tier != "host" and not self._is_low():
            return 0
        kept = 0 if chosen.dropper.codec else chosen.settings.budget.tokens(length)
        return length - kept

    def _wants(self, req: Req, limit: int) -> bool:
        """Whether a request that may draft ``limit`` tokens should leave its full KV."""
        if limit == 0 or not self._cache.can_offload(req):
            return False
        if self._config.tier == "host":
            return True
        if req in self._cache.holdings:
            return not self._comes_back(req)
        return self._is_low()

    def _comes_back(self, req: Req) -> bool:
        """Whether an offloaded request has room to stay on the device."""
        size, left = self._room()
        if self._config.tier == "host" or self._cache.refused:
            return False
        missing = 0 if self._cache.holdings[req].staged else req.kv.cache_protected_len
        return left - missing > HIGH_WATER * size

    def _is_low(self) -> bool:
        size, left = self._room()
        return self._cache.refused or left < LOW_WATER * size

    def _room(self) -> tuple[int, int]:
        """Device slots in all, and those that are free or evictable."""
        allocator = self._cache.token_to_kv_pool_allocator
        return allocator.size, allocator.available_size() + self._cache.evictable_size()

    def _store_copy(self, state: RequestState, view: DraftView) -> None:
        """Have the compressed copy written beside the full KV that SGLang writes."""
        spans, req = self._cache.spans, state.req
        own = (self._config.compressor_settings, self._config.compressor)
        if (
            spans is None
            or req.skip_radix_cache_insert
            or own
            != (
                state.settings,
                state.compressor,
            )
        ):
            return
        tokens = [*req.origin_input_ids, *req.output_ids][: view.length]
        names = spans.names(tokens, req.extra_key, req.cache_salt)
        if names and spans.wants(names):
            on_host = DraftView(tuple(lists.cpu() for lists in view.layers), view.length)
            spans.publish(names, on_host, *self._chooser.listed(state, view))

    def _offload(self, state: RequestState) -> None:
        store, packed = self._chooser.store, self._chooser.packed.holds(state)
        slots = self._cache.allocate(0 if packed else store.longest(state.row))
        if slots is None:
            return
        if not packed:
            store.relocate(state.row, self._chooser.pool, slots)
        if self._cache.offload(state.req, slots):
            self._counters.offloads += 1
            if self.in_place:
                store.put_host(state.row, self._cache.host_slots(state.req))
        elif not packed:
            # Its copy stays valid, but would belong to nobody.
            self._cache.token_to_kv_pool_allocator.free(slots)
            self._chooser.choose(state)

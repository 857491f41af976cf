"""Brings full KV that is on the host to where a verify pass can read it, in turn and on time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_vericache.core import Action, Counters
from sglang_vericache.mem_cache.tiered import TieredCache
from sglang_vericache.scheduler import Link

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_vericache.speculative.state import RequestState

# Iterations that somebody waits before a request that decodes plainly on its staged KV yields.
PATIENCE = 8


class Arranged(NamedTuple):
    """Where the full KV of a pass is.

    Attributes:
        actions: those planned, but for requests whose full KV is not there: they draft one more
            token, or ``WAIT`` if they may not.
        loaded: tokens whose copies begin with this pass, which waits for them; a mean over layers.
        copies: index of those copies for ``ScheduleBatch.hicache_consumer_index``.
        on_host: whose full KV is read in host memory.
    """

    actions: list[Action]
    loaded: float
    copies: int
    on_host: list[bool]


class Staging:
    """Stages the prefixes of offloaded requests around their verify passes.

    Args:
        cache: holds both copies.
        counters: counts what is moved.
        in_place: whether passes read full KV in host memory.
        may_leave: whether a resident request may give up room to others.
    """

    def __init__(
        self,
        cache: TieredCache,
        counters: Counters,
        in_place: bool,
        may_leave: Callable[[RequestState], bool],
    ) -> None:
        self._cache, self._counters = cache, counters
        self._may_leave = may_leave
        # Serials of requests that found no room, longest wait first.
        self._waiting: list[Hashable] = []
        self.waited = 0
        """For how many iterations somebody has found no room."""
        self.in_place = cache.reads_host = in_place

    def load(self, req: Req) -> float:
        """Tokens that the next verify pass of a request is expected to copy."""
        if req not in self._cache.holdings:
            return 0.0
        return self.copied(req.kv.cache_protected_len)

    def copied(self, tokens: int) -> float:
        """Of so many tokens on the host, how many a verify pass is expected to copy."""
        return 0.0 if self.in_place else self._cache.loaded_share * tokens

    def link(self) -> Link | None:
        """What the planner is told about copies; None if there are none."""
        if self.in_place:
            return None
        cache = self._cache
        allocator = cache.token_to_kv_pool_allocator
        staged = sum(r.kv.cache_protected_len for r, h in cache.holdings.items() if h.staged)
        room = allocator.available_size() + cache.evictable_size() + staged
        return Link(cache.token_seconds, room)

    def bring(self, req: Req) -> bool:
        """Have all of a request's prefix on the device now; False without room."""
        if self._stage(req, may_finish_copies=True) is None:
            return False
        self._cache.start_copies()
        self._cache.await_copy(req)
        return True

    def arrange(
        self,
        states: Sequence[RequestState],
        actions: Sequence[Action],
        copying: Collection[Hashable],
        extendable: Collection[Hashable] = (),
        seconds: float = 0.0,
    ) -> Arranged:
        """Bring the full KV of verifying requests to the device, and that of some to come.

        Args:
            copying: serials of requests that verify soon and whose copies should run now.
            extendable: serials of requests that may draft one more token instead of verifying.
            seconds: that an iteration takes. A pass waits for copies that end about then; a
                request whose copy takes longer verifies later.
        """
        cache, holdings = self._cache, self._cache.holdings
        cache.refused = False
        arranged = list(actions)
        ahead: list[Req] = []
        due: list[int] = []
        on_host = [False] * len(states)
        for i, (state, action) in enumerate(zip(states, actions, strict=True)):
            held = holdings.get(state.req)
            if held is None:
                continue
            if action is Action.VERIFY:
                if cache.may_read_host(state.req):
                    on_host[i] = True
                    self._counters.host_reads += state.published
                else:
                    due.append(i)
            elif state.serial in copying:
                ahead.append(state.req)
            elif held.staged:
                cache.release(state.req)
        waiting, loaded = self._stage_due(states, due)
        index = cache.start_copies()
        late = self._late(states, [i for i in due if i not in waiting], seconds)
        for i in (*waiting, *late):
            drafts = states[i].serial in extendable
            arranged[i] = Action.DRAFT if drafts else Action.WAIT
        if late and all(action is Action.WAIT for action in arranged):
            arranged[late.pop()] = Action.VERIFY  # nothing else to do
        self._counters.late += len(late)
        verified = [i for i in due if arranged[i] is Action.VERIFY]
        # The pass itself waits for copies that begin with it, layer by layer.
        with_pass = [i for i in verified if cache.comes_with(states[i].req, index)]
        for i in verified:
            if i in with_pass:
                holdings[states[i].req].copied_by = -1
            else:
                cache.await_copy(states[i].req)
        if not waiting and (begins := [req for req in ahead if cache.is_offloaded(req)]):
            self._counters.copied_ahead += round(cache.copy_ahead(begins))
        self._note_waiting([states[i] for i in waiting], states)
        total = sum(loaded.get(i, 0.0) for i in with_pass)
        return Arranged(arranged, total, index if with_pass else -1, on_host)

    def _stage_due(
        self, states: Sequence[RequestState], due: Sequence[int]
    ) -> tuple[list[int], dict[int, float]]:
        """Stage those due, longest wait first.

        Returns:
            Who found no room, and the tokens queued to be copied for the others.
        """
        waiting = self._yielding(states, due)
        for i in waiting:
            self._cache.release(states[i].req)
        loaded: dict[int, float] = {}
        for i in sorted(due, key=lambda i: self._turn(states[i].serial)):
            if i in waiting:
                continue
            tokens = self._stage(states[i].req, may_finish_copies=not waiting)
            if tokens is None:
                waiting.append(i)
            elif tokens > 0:
                loaded[i] = tokens
        return waiting, loaded

    def _late(
        self, states: Sequence[RequestState], due: Sequence[int], seconds: float
    ) -> list[int]:
        """Those whose copies take longer than the pass, the last to arrive first."""
        left = {i: self._cache.copy_seconds_left(states[i].req) for i in due}
        return sorted((i for i in due if left[i] > seconds), key=lambda i: -left[i])

    def _yielding(self, states: Sequence[RequestState], due: Sequence[int]) -> list[int]:
        """Requests that would keep others from their verify pass for as long as they run.

        One without drafts gives up nothing but a turn; it verifies again when room comes.
        """
        if self.waited == 0 or self.waited % PATIENCE:
            return []
        holdings = self._cache.holdings
        return [
            i
            for i in due
            if not states[i].drafts
            and holdings[states[i].req].staged
            and self._cache.copy_seconds_left(states[i].req) == 0
        ]

    def _stage(self, req: Req, may_finish_copies: bool) -> float | None:
        """Tokens to be copied for a request that verifies now; None without room."""
        if self._cache.holdings[req].staged:
            return 0.0
        loaded = self._cache.stage(req)
        room_comes = any(held.staged for held in self._cache.holdings.values())
        if loaded is None and may_finish_copies and not room_comes:
            self._cache.finish_copies()  # those that run hold locks
            loaded = self._cache.stage(req)
        if loaded is None:
            return None
        self._counters.stages += 1
        self._counters.staged_tokens += round(loaded)
        return loaded

    def _turn(self, serial: Hashable) -> int:
        return self._waiting.index(serial) if serial in self._waiting else len(self._waiting)

    def _note_waiting(
        self, waiting: Sequence[RequestState], states: Sequence[RequestState]
    ) -> None:
        """Remember who waits; tell the tree if nobody is going to give up room soon."""
        serials = [state.serial for state in waiting]
        self._waiting = [s for s in self._waiting if s in serials]
        self._waiting += [s for s in serials if s not in self._waiting]
        self.waited = self.waited + 1 if waiting else 0
        self._counters.waits += len(waiting)
        holdings = self._cache.holdings
        # A resident leaves before its next round, or ends.
        room_comes = any(held.staged for held in holdings.values()) or any(
            state.req not in holdings and self._may_leave(state) for state in states
        )
        self._cache.stuck = set() if room_comes else {state.req for state in waiting}

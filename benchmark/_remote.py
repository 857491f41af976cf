"""Prefixes in a remote store: one pair of servers, and a fleet that shares the store.

The far server gets a prefix over a slow link and decodes. With full KV it waits for all of it; else
it drafts as soon as the compressed part is there, and a near server, which reads the full KV over a
fast link, verifies (Pipeline 2 of VeriCache, arXiv 2605.17613). Its

    T_req = c*KV/BW_slow + (K/(x*g)) * T_cycle,  T_cycle = max(x*T_decode, KV/BW_fast) + T_fwd(x)

is the time of one request alone; here requests share both links and both servers.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from _hardware import Server
from _simulation import Request
from sglang_vericache.core import Action, DraftState
from sglang_vericache.scheduler import Planner


@dataclass
class _Remote:
    """A request at the far server; ``verdict`` is when the near one will have verified it."""

    request: Request
    loaded: float
    verdict: float | None = None


class RemotePair:
    """Decodes requests whose prefixes are remote.

    Args:
        server: far and near servers, alike.
        slow, fast: bytes/s of the far server's link to the store, and of the near one's.
        keep: bytes of the compressed KV over those of the full; 1 decodes plainly.
        drafts: of a round; 0 decodes plainly.
    """

    def __init__(
        self, server: Server, slow: float, fast: float, keep: float, drafts: int, seed: int = 0
    ) -> None:
        assert (drafts == 0) == (keep == 1), "full KV is not verified"
        self.server, self.slow, self.fast, self.keep = server, slow, fast, keep
        self._limit = drafts
        self._planner = Planner.fixed(drafts)
        self._random = random.Random(seed)
        self._now = self._link_free = self._near_free = 0.0
        self._running: list[_Remote] = []
        self.tokens = 0

    def run(self, requests: Iterable[Request]) -> float:
        """Tokens/s until all have ended."""
        queue = deque(requests)
        while queue or self._running:
            while queue and self._fits(queue[0]):
                self._fetch(queue.popleft())
            self._step()
        return self.tokens / self._now

    def _held(self, request: Request) -> int:
        return round(self.keep * request.prompt) + request.wanted + 1

    def _fits(self, newcomer: Request) -> bool:
        """Whether it has room; if so the link fetches it, in order."""
        held = sum(self._held(each.request) for each in self._running)
        return held + self._held(newcomer) <= self.server.capacity

    def _fetch(self, request: Request) -> None:
        size = self.keep * request.prompt * self.server.model.token_bytes
        self._link_free = max(self._now, self._link_free) + size / self.slow
        self._running.append(_Remote(request, self._link_free))

    def _step(self) -> None:
        for each in self._running:
            if each.verdict is not None and each.verdict <= self._now:
                self._settle(each)
        self._running = [each for each in self._running if each.request.left]
        there = [each for each in self._running if each.loaded <= self._now]
        actions = self._planner.plan([self._state(each.request) for each in there])
        rows, keys = 0, 0.0
        for each, action in zip(there, actions, strict=True):
            if action is Action.DRAFT:
                each.request.drafted += 1
            elif self._limit and each.verdict is None:
                self._verify(each)
                continue
            elif self._limit:
                continue  # until the verdict
            else:
                each.request.output += 1
                self.tokens += 1
                self._planner.settle(each.request.rid, 0, 0)
            rows += 1
            keys += self.keep * each.request.prompt + each.request.output + each.request.drafted
        if rows:
            seconds = self.server.seconds(rows, keys, keys)
            self._planner.observe(seconds)
            self._now += seconds
        elif self._running:
            events = [e.loaded if e.verdict is None else e.verdict for e in self._running]
            self._now = max(self._now, min(t for t in events if t > self._now))

    def _state(self, request: Request) -> DraftState:
        view = round(self.keep * request.prompt) + request.output + request.drafted
        limit = min(self._limit, request.left - 1)
        return DraftState(request.rid, request.context, view, request.drafted, limit)

    def _verify(self, each: _Remote) -> None:
        """The near server reads the full KV layer by layer while it computes."""
        request, server = each.request, self.server
        rows = request.drafted + 1
        read = request.context * server.model.token_bytes / self.fast
        computed = server.seconds(rows, request.context, rows * request.context)
        self._near_free = max(self._now, self._near_free) + max(read, computed)
        each.verdict = self._near_free

    def _settle(self, each: _Remote) -> None:
        request, accepted = each.request, 0
        while accepted < request.drafted and self._random.random() < request.agreement:
            accepted += 1
        self._planner.settle(request.rid, request.drafted, accepted)
        request.output += accepted + 1
        self.tokens += accepted + 1
        request.drafted, each.verdict = 0, None


@dataclass(frozen=True)
class Scheme:
    """How a server of a fleet gets its prefixes.

    Attributes:
        bytes_per_request: from the store, on average.
        rate: tokens/s of the server once its prefixes are there.
    """

    name: str
    bytes_per_request: float
    rate: float


@dataclass
class Fleet:
    """Servers that fetch prefixes from one store, each one ahead of those it decodes.

    Attributes:
        store: bytes/s of the store, shared evenly by the fetches that run.
        link: bytes/s of one server's link to it.
        tokens: generated for a request, on average.
    """

    store: float
    link: float
    tokens: int
    scheme: Scheme
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def bound(self, servers: int) -> float:
        """Tokens/s of all servers by arithmetic: compute, links or the store."""
        per_byte = self.tokens / self.scheme.bytes_per_request
        return min(servers * min(self.scheme.rate, self.link * per_byte), self.store * per_byte)

    @property
    def knee(self) -> float:
        """Servers from which on the store is the limit."""
        return self.bound(10**9) / self.bound(1)

    def run(self, servers: int, requests: int = 40) -> float:
        """Tokens/s of all servers, each of which serves ``requests`` one after the other.

        Fetches share the store: all progress at one speed, so the order in which they end is that
        of the work (bytes for each) at which they do.
        """
        now = work = 0.0
        total = 0
        fetches: list[tuple[float, int]] = []
        decodes: list[tuple[float, int]] = []
        left = [requests] * servers
        fetching, ready, decoding = ([False] * servers for _ in range(3))

        def proceed(server: int) -> int:
            tokens = 0
            if ready[server] and not decoding[server]:
                ready[server], decoding[server] = False, True
                tokens = round(self.tokens * self._random.uniform(0.5, 1.5))
                heapq.heappush(decodes, (now + tokens / self.scheme.rate, server))
            if left[server] and not fetching[server] and not ready[server]:
                left[server] -= 1
                fetching[server] = True
                size = self.scheme.bytes_per_request * self._random.uniform(0.75, 1.25)
                heapq.heappush(fetches, (work + size, server))
            return tokens

        for server in range(servers):
            proceed(server)
        while fetches or decodes:
            speed = min(self.link, self.store / len(fetches)) if fetches else 0.0
            fetched = now + (fetches[0][0] - work) / speed if fetches else math.inf
            decoded = decodes[0][0] if decodes else math.inf
            work += speed * (min(fetched, decoded) - now)
            now = min(fetched, decoded)
            if fetched <= decoded:
                _, server = heapq.heappop(fetches)
                fetching[server], ready[server] = False, True
            else:
                _, server = heapq.heappop(decodes)
                decoding[server] = False
            total += proceed(server)
        return total / now

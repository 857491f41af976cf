"""Policies that ``simulate.py`` compares: who drafts, how much, and whose KV leaves the device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from _hardware import Server, expected_accepted
from _simulation import Pool, Request
from sglang_vericache.scheduler import Planner, Room

# Largest --vericache-max-draft-len.
MAX_DRAFTS = 64


class Policy(ABC):
    """Decisions that are not the planner's.

    Attributes:
        name: column of the tables.
        limit: most drafts of a round.
        refused: whether admission has been refused since copies were last arranged.
    """

    name: str
    limit: int
    refused = False

    @abstractmethod
    def planner(self) -> Planner:
        """A fresh planner."""

    @abstractmethod
    def admits(self, pool: Pool, newcomer: Request, planner: Planner) -> bool:
        """Whether a request may start now; may mark it ``offloaded`` from the start."""

    def leaves(self, pool: Pool, request: Request, planner: Planner) -> bool:
        """Whether a resident request that is about to draft gives its full KV to the host."""
        return False

    def recall(self, pool: Pool, planner: Planner) -> None:  # noqa: B027
        """Have residents choose a view anew, and so perhaps leave."""


class Full(Policy):
    """Stock: full KV in device memory, one token a request and iteration."""

    name, limit = "full KV", 0

    def planner(self) -> Planner:
        return Planner.fixed(0)

    def admits(self, pool: Pool, newcomer: Request, planner: Planner) -> bool:
        return pool.unpromised >= newcomer.prompt + newcomer.wanted + 1


class Paper(Policy):
    """VeriCache's: fixed draft length, as many residents and offloaded as its model finds best.

    A resident request also holds its compressed copy, as the authors say theirs does, and a staged
    one only what its copy lacks beside it (the paper's byte-conserving bound).

    Args:
        server: model and device.
        prompt, keep, agreement: means of the workload, known beforehand.
        drafts: of every round.
        residents: largest number of residents to consider; 0 offloads every request.
    """

    def __init__(
        self,
        server: Server,
        prompt: int,
        keep: float,
        agreement: float,
        drafts: int = 25,
        residents: int | None = None,
    ) -> None:
        self.name = "paper, mixed" if residents is None else "paper, all offloaded"
        self.limit = drafts
        self.mix = best_mix(server, prompt, keep, agreement, drafts, residents)

    def planner(self) -> Planner:
        return Planner.fixed(self.limit)

    def admits(self, pool: Pool, newcomer: Request, planner: Planner) -> bool:
        residents, offloaded = self.mix
        now = len(pool.offloaded)
        newcomer.copied = newcomer.merges = True
        wanted = newcomer.wanted + 1
        if len(pool.running) - now < residents:
            size = newcomer.prompt + newcomer.kept + wanted
            return pool.unpromised >= size + self._reserve(pool, newcomer)
        if now >= offloaded:
            return False
        newcomer.offloaded = True
        fits = pool.unpromised >= newcomer.kept + wanted + self._reserve(pool, newcomer)
        newcomer.offloaded = fits
        return fits

    def _reserve(self, pool: Pool, newcomer: Request) -> int:
        """Room to stage the largest offloaded request, unless one is staged now."""
        sizes = [r.room for r in (*pool.offloaded, newcomer) if r.offloaded]
        staged = sum(r.room for r in pool.offloaded if r.staged)
        return max(max(sizes, default=0) - staged, 0)


def best_mix(
    server: Server,
    prompt: int,
    keep: float,
    agreement: float,
    drafts: int,
    residents: int | None = None,
) -> tuple[int, int]:
    """Resident and offloaded requests of greatest token rate, by VeriCache's model of a server.

    T_iter = max(T_gpu, T_link); an offloaded request holds its copy always and its full KV while
    that is copied and read. https://arxiv.org/abs/2605.17613
    """
    best, best_rate = (0, 0), 0.0
    per_pass = (expected_accepted(agreement, drafts) + 1) / (drafts + 1)
    copy = (1 - keep) * prompt * server.token_seconds
    room = server.capacity / prompt
    most = int(room / (1 + keep)) if residents is None else residents
    for b_g in range(most + 1):
        for b_c in range(257 - b_g):
            verifying = (b_g + b_c) / (drafts + 1)
            keys = (b_g + b_c - verifying) * keep * prompt + verifying * prompt
            gpu = server.seconds(round(b_g + b_c + verifying * drafts), keys, 0)
            seconds = max(gpu, b_c * copy / (drafts + 1))
            staged = min(b_c, math.ceil(b_c / (drafts + 1) * (copy / seconds + 1)))
            if b_g * (1 + keep) + b_c * keep + staged * (1 - keep) > room:
                break
            rate = (b_g + b_c) * per_pass / seconds
            if rate > best_rate:
                best, best_rate = (b_g, b_c), rate
    return best


class Ours(Policy):
    """``--vericache-tier auto --vericache-draft-len auto``: mixed by need, draft length by gain."""

    name, limit = "ours, auto", MAX_DRAFTS

    def planner(self) -> Planner:
        return Planner.adaptive(self.limit)

    def admits(self, pool: Pool, newcomer: Request, planner: Planner) -> bool:
        size = newcomer.prompt + newcomer.wanted + 1
        fits = pool.unpromised >= size + self._reserve(pool, newcomer, planner)
        self.refused |= not fits
        return fits

    def leaves(self, pool: Pool, request: Request, planner: Planner) -> bool:
        return self._may_leave(pool, request.reload, planner)

    def recall(self, pool: Pool, planner: Planner) -> None:
        leaving = 0
        for request in pool.running:
            between_rounds = request.has_view and not request.drafted
            if not between_rounds:
                continue
            if request.offloaded:
                if self._comes_back(pool, request, planner):
                    request.offloaded = request.staged = False
                    return
                continue
            if self._may_leave(pool, leaving + request.reload, planner):
                leaving += request.reload
                request.has_view = False

    def _may_leave(self, pool: Pool, tokens: int, planner: Planner, newcomer: int = 0) -> bool:
        return self._room(pool, newcomer).should_leave(planner.carries(tokens))

    def _comes_back(self, pool: Pool, request: Request, planner: Planner) -> bool:
        missing = 0 if request.staged else request.prompt
        return self._room(pool).may_return(missing, planner.link_busy())

    def _room(self, pool: Pool, newcomer: int = 0) -> Room:
        growth = (self.limit + 1) * len(pool.running)
        return Room(pool.capacity, pool.free - newcomer, growth, self.refused)

    def _reserve(self, pool: Pool, newcomer: Request, planner: Planner) -> int:
        offloaded = pool.offloaded
        if not offloaded:
            return 0
        leaves = self._may_leave(pool, newcomer.reload, planner, newcomer.prompt)
        gives_back = (newcomer.prompt - newcomer.kept) * leaves
        return max(0, max(newcomer.prompt, *(r.prompt for r in offloaded)) - gives_back)


class Resident(Policy):
    """``--vericache-tier resident``: views of KV that stays on the device, no copies at all.

    Args:
        drafts: of every round; None for ``auto``.
    """

    def __init__(self, drafts: int | None = None) -> None:
        self.name = f"ours, resident, k = {drafts or 'auto'}"
        self.limit, self._drafts = drafts or MAX_DRAFTS, drafts

    def planner(self) -> Planner:
        adaptive = self._drafts is None
        return Planner.adaptive(self.limit) if adaptive else Planner.fixed(self.limit)

    def admits(self, pool: Pool, newcomer: Request, planner: Planner) -> bool:
        return pool.unpromised >= newcomer.prompt + newcomer.wanted + 1

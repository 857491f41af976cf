"""What the worker remembers about running requests between iterations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from sglang_vericache.compressors import Dropper, Settings, create
from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.core import DraftState
from sglang_vericache.speculative.lookup import NOTHING, Found, Lookup
from sglang_vericache.speculative.queries import RecentQueries

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from torch import Tensor

# Keys of ``custom_params.vericache`` that are no compressor settings.
CHOICES = ("enabled", "unverified", "draft_len", "compressor")


@dataclass
class RequestState:
    """Draft and view of one request.

    Attributes:
        req: the request; ``req.kv.kv_committed_len`` tokens of it have exact KV.
        serial: names this state; a request id may come back while the planner still knows it.
        retractions: its retraction count when this state was made.
        compressor, dropper, settings: how its draft view is chosen.
        limit: most tokens it drafts in a round; 0 decodes plainly.
        unverified: commits what it reads from its view, token by token, as it is.
        queries: of the latest tokens, as many as ``dropper`` wants, for the next compression.
        view_length: tokens its filed view stands for; 0 when drafts read the full KV.
        chosen_at: committed tokens when the view was chosen.
        view_kept: tokens the filed view lists, averaged over layers.
        view_share: bytes of a listed token as a share of one in the KV pool; below 1 if packed.
        barred: slots of a packed copy that it found no room for; it decodes plainly until there is.
        has_view: whether a view was chosen, filed or found to be everything.
        rounds, view_drafted, view_accepted: verify passes since the view was chosen, their drafts,
            and how many of those were accepted.
        drafts: tokens drafted since the last verify pass.
        margins: of those drafts, in logits; empty with a fixed draft length.
        passes: that drafted them.
        drafted: tokens drafted in all finished rounds, those before a retraction included.
        proposals: what somebody else expects to follow the committed tokens; drafts of the next
            round.
        lookup: its text; None while nobody has looked anything up.
        found: what that says may follow the committed tokens.
        took_found: whether the drafts are those.
        probes: what it says may follow the drafts; rows of the next draft pass check them.
    """

    req: Req
    serial: int
    retractions: int
    compressor: str
    dropper: Dropper
    settings: Settings
    limit: int
    unverified: bool = False
    queries: RecentQueries = field(default_factory=RecentQueries)
    view_length: int = 0
    chosen_at: int = 0
    view_kept: float = 0.0
    view_share: float = 1.0
    barred: int = 0
    has_view: bool = False
    rounds: int = 0
    view_drafted: int = 0
    view_accepted: int = 0
    drafts: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    passes: int = 0
    drafted: int = 0
    proposals: list[int] = field(default_factory=list)
    lookup: Lookup | None = None
    found: Found = NOTHING
    took_found: bool = False
    probes: list[int] = field(default_factory=list)

    @property
    def row(self) -> int:
        """The request's row of ``req_to_token``."""
        return self.req.kv.req_pool_idx

    @property
    def committed(self) -> int:
        """Tokens with exact KV: all but the last one generated."""
        return self.req.kv.kv_committed_len

    def add_queries(self, queries: Tensor) -> None:
        """Remember the queries of tokens about to be committed, ``[L, n, HQ, D]``."""
        end = self.committed + queries.shape[1]
        self.queries.append(queries, end, self.dropper.query_rows)

    @property
    def published(self) -> int:
        """Tokens whose KV belongs to the radix tree."""
        return self.req.kv.cache_protected_len

    def follow(self, tokens: Sequence[int]) -> None:
        """Hear what was committed; proposals that it contradicts are worth nothing."""
        count = len(tokens)
        agrees = self.proposals[:count] == list(tokens)
        self.proposals = self.proposals[count:] if agrees else []

    def look_up(self, count: int, context_limit: int) -> Found:
        """Find up to ``count`` tokens that may follow, no more than the request may draft."""
        most = min(count, self._draft_limit(context_limit) - len(self.drafts))
        if most <= 0:
            return NOTHING
        prompt = self.req.origin_input_ids
        if self.lookup is None:
            self.lookup = Lookup(prompt)
        self.lookup.follow(len(prompt), self.req.output_ids, self.drafts)
        return self.lookup.find(most)

    def take_found(self, count: int) -> None:
        """Begin a round whose drafts are the first tokens found."""
        self.proposals, self.took_found = self.found.tokens[:count], True
        self.drafts = list(self.proposals)

    def take_proposals(self, context_limit: int) -> None:
        """Begin a round whose drafts are there already."""
        if self.proposals and not self.drafts:
            self.drafts = self.proposals[: self.draft_state(0, context_limit).limit]

    def draft_state(self, min_context: int, context_limit: int, load: float = 0) -> DraftState:
        """What the planner is told; ``load`` as in ``DraftState``."""
        context, limit = self.committed + 1, self._draft_limit(context_limit)
        if context < min_context or self.barred:
            limit = 0
        return DraftState(
            rid=self.serial,
            context=context,
            view=self.draft_keys,
            drafted=len(self.drafts),
            limit=max(limit, 0),
            load=load,
            margins=tuple(self.margins),
        )

    def _draft_limit(self, context_limit: int) -> int:
        """Most drafts that a round could use, if the request is to draft at all."""
        left = self.req.sampling_params.max_new_tokens - len(self.req.output_ids)
        return min(self.limit, left - 1, context_limit - self.committed - 1)

    @property
    def draft_keys(self) -> float:
        """Keys that its next drafting row attends to (an estimate before a view was chosen).

        Packed ones count as many as have their bytes.
        """
        committed = self.committed
        rows = 1 + len(self.drafts)
        if not self.has_view:
            return self.settings.budget.tokens(committed) + rows
        return self.view_kept * self.view_share + committed - self.view_length + rows


class Requests:
    """States of the running requests, by request id; a retracted request starts over."""

    def __init__(self, config: VeriCacheConfig):
        self._config = config
        self._states: dict[str, RequestState] = {}
        self._serials = itertools.count()
        # By request object: gone with a request that never decodes.
        self._prompt_queries: WeakKeyDictionary[Req, RecentQueries] = WeakKeyDictionary()
        self._proposals: WeakKeyDictionary[Req, list[int]] = WeakKeyDictionary()

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def query_rows(self, req: Req) -> int:
        """How many queries of its prompt's last tokens a request's method wants."""
        chosen = choices_of(req, self._config)
        return chosen.dropper.query_rows if chosen.limit else 0

    def keep_queries(self, req: Req, queries: Tensor, end: int, rows: int) -> None:
        """Remember queries ``[L, n, HQ, D]`` of a prompt's tokens before ``end``, until it decodes;
        of the latest ``rows``, as ``query_rows`` says."""
        if rows:
            self._prompt_queries.setdefault(req, RecentQueries()).append(queries, end, rows)

    def propose(self, req: Req, tokens: list[int]) -> None:
        """Offer the output expected of a request that has not started."""
        self._proposals[req] = tokens

    def running(self, reqs: Sequence[Req]) -> list[RequestState]:
        """States of a decode batch, in its order; forgets every other request."""
        states = []
        for req in reqs:
            state = self._states.get(req.rid)
            if state is None or state.req is not req or state.retractions != req.retraction_count:
                state = self._new(req)
            states.append(state)
        self._states = {state.req.rid: state for state in states}
        return states

    def _new(self, req: Req) -> RequestState:
        chosen = choices_of(req, self._config)
        state = RequestState(
            req=req,
            serial=next(self._serials),
            retractions=req.retraction_count,
            compressor=chosen.compressor,
            dropper=chosen.dropper,
            settings=chosen.settings,
            limit=chosen.limit,
            unverified=chosen.unverified,
            queries=self._prompt_queries.pop(req, RecentQueries()),
            drafted=req.spec_num_cap_tokens,
            proposals=self._proposals.pop(req, []),
        )
        state.follow(req.output_ids)
        return state


class Choices(NamedTuple):
    """How a request is decoded; see ``RequestState``."""

    compressor: str
    dropper: Dropper
    settings: Settings
    limit: int
    unverified: bool


def choices_of(req: Req, config: VeriCacheConfig) -> Choices:
    """The request's own ``custom_params.vericache``, validated at admission, over the server's."""
    asked: dict[str, Any] = (req.sampling_params.custom_params or {}).get("vericache") or {}
    narrowing = {key: value for key, value in asked.items() if key not in CHOICES}
    settings = config.compressor_settings.narrowed(narrowing)
    limit = min(asked.get("draft_len", config.reserved_draft_len), config.reserved_draft_len)
    compressor = asked.get("compressor", config.compressor)
    return Choices(
        compressor=compressor,
        dropper=create(compressor, settings),
        settings=settings,
        limit=limit if asked.get("enabled", True) else 0,
        unverified=bool(asked.get("unverified", False)),
    )

"""The decode loop: plan, one ragged forward pass, settle, commit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_vericache.config import config_of
from sglang_vericache.core import Action, Counters, DraftState
from sglang_vericache.sampling.settle import Settled, settle, write_logprobs
from sglang_vericache.scheduler import Planner
from sglang_vericache.speculative.lookup import NOTHING
from sglang_vericache.speculative.provisional import Provisional
from sglang_vericache.speculative.ragged_input import RaggedInput
from sglang_vericache.speculative.ragged_pass import RaggedPass
from sglang_vericache.speculative.state import Requests, RequestState
from sglang_vericache.speculative.tiers import Tiers
from sglang_vericache.speculative.views import ViewChooser

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

    from sglang_vericache.mem_cache.tiered import TieredCache

# Automatic refresh: after this many rounds, if fewer than this share of their drafts was accepted.
REFRESH_ROUNDS, REFRESH_BELOW = 8, 0.5
# Tokens generated since a view was chosen are all read; up to this many that is no reason to choose
# anew.
MIN_TAIL = 256


class VeriCacheWorker(BaseSpecWorker):
    """Drafts from compressed KV and verifies against full KV with one and the same model.

    SGLang's scheduler calls ``forward_batch_generation`` once per iteration.
    """

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ):
        super().__init__()
        config = config_of(server_args)
        assert config is not None and config.enabled
        self.config = config
        self._target_worker = target_worker
        self.slots = config.reserved_draft_len + 1
        self.looks_up = config.lookup == "auto" and config.draft_len is None
        self.requests = Requests(config)
        self.counters = Counters()
        self.tiers: Tiers | None = None
        self.provisional: Provisional | None = None
        self.planner = (
            Planner.adaptive(config.max_draft_len)
            if config.draft_len is None
            else Planner.fixed(config.draft_len)
        )

    @property
    def draft_worker(self) -> None:
        return None  # the target drafts for itself

    def init_attention_backends(self) -> None:
        runner = self.target_worker.model_runner
        self.chooser = ViewChooser(runner, self.config)
        self.attention = runner.attn_backend

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """One iteration: prefill as stock, or plan, forward, settle, commit."""
        if not batch.forward_mode.is_decode():
            return self._prefill(batch)
        if self.config.offloads and self.tiers is None:
            self.tiers = Tiers(
                batch.tree_cache, self.chooser, self.config, self.planner, self.counters
            )
            if self.tiers.staging.in_place:
                host = self.attention.add_view_pool(batch.tree_cache.host_buffers())
                self.chooser.store.host_pool = host
        step = self._plan(batch)
        started = time.perf_counter()
        output = self._forward(batch, step)
        settled = settle(
            output.next_token_logits, step.layout, batch, self.target_worker.model_runner.sampler
        )
        result = self._commit(batch, step, output, settled)
        if not any(state.unverified for state in step.states):  # the planner never saw those
            self.planner.observe(time.perf_counter() - started)
        return result

    def provisional_for(self, cache: TieredCache) -> Provisional:
        """What drafts for requests whose full KV a store has yet to deliver."""
        if self.provisional is None:
            self.provisional = Provisional(
                self.target_worker,
                cache,
                self.chooser.packed,
                self.requests,
                self.config,
                self.counters,
            )
        return self.provisional

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        wanted = [self.requests.query_rows(req) for req in batch.reqs]
        window = max(wanted, default=0)
        self.attention.query_window = window
        result = self.target_worker.forward_batch_generation(batch)
        if (queries := self.attention.take_queries()) is not None:
            chunks = queries.split([min(n, window) for n in batch.extend_lens], dim=1)
            ends = [a + n for a, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
            for req, chunk, end, rows in zip(batch.reqs, chunks, ends, wanted, strict=True):
                self.requests.keep_queries(req, chunk, end, rows)
        result.next_draft_input = RaggedInput(self.slots)
        result.new_seq_lens = batch.seq_lens
        result.speculative_num_draft_tokens = self.slots
        return result

    def _plan(self, batch: ScheduleBatch) -> RaggedPass:
        """Decide who drafts and who verifies; a request about to draft first gets a view."""
        states = self.requests.running(batch.reqs)
        self._free_packed(states)
        gate = self.config.min_context if self.config.draft_len is None else 0
        limit = self.target_worker.model_runner.model_config.context_len
        verified = [s for s in states if not s.unverified]
        for state in verified:
            state.take_proposals(limit)
        staging = None if self.tiers is None else self.tiers.staging
        told = [
            s.draft_state(gate, limit, 0.0 if staging is None else staging.load(s.req))
            for s in verified
        ]
        if self.looks_up:
            told = [
                self._look_up(s, d, limit, len(told)) for s, d in zip(verified, told, strict=True)
            ]
        planned = self.planner.plan(told, None if staging is None else staging.link())
        if self.tiers is not None:
            self.tiers.recall_views(states)
        actions = dict(zip((id(s) for s in verified), planned, strict=True))
        chosen = [actions.get(id(s), Action.DRAFT) for s in states]
        for state, action in zip(states, chosen, strict=True):
            if action is Action.DRAFT and not state.has_view:
                self._choose_view(state)
        on_host: Sequence[bool] = ()
        if staging is not None:
            # Proposals were never drafted: their KV is not there for another draft to read.
            longer = {d.rid for d, s in zip(told, verified, strict=True) if not s.proposals}
            longer &= {d.rid for d in told if d.drafted < d.limit}
            arranged = staging.arrange(
                states, chosen, self.planner.copying(), longer, self.planner.iteration_seconds
            )
            chosen, on_host = arranged.actions, arranged.on_host
            batch.hicache_consumer_index = arranged.copies
            planned = [a for s, a in zip(states, chosen, strict=True) if not s.unverified]
            self.planner.revise(planned, arranged.loaded)
        for state in states:
            state.probes = []
        if self.looks_up:
            drafting = [
                a is Action.DRAFT for s, a in zip(states, chosen, strict=True) if not s.unverified
            ]
            for state, before, drafts in zip(verified, told, drafting, strict=True):
                if drafts:
                    self._add_probes(state, before, limit, len(told))
        captures = [
            action is Action.VERIFY and bool(state.drafts) and self._wants_queries(state)
            for state, action in zip(states, chosen, strict=True)
        ]
        rows, store = batch.req_pool_indices, self.chooser.store
        return RaggedPass.build(states, chosen, captures, rows, store, on_host)

    def _look_up(self, state: RequestState, told: DraftState, limit: int, batch: int) -> DraftState:
        """Begin a round with tokens found in the request's own text, if that is best."""
        # One that is to leave the device drafts first, and so leaves; one whose KV must be copied
        # has time to draft.
        if state.drafts or told.load or (self.tiers is not None and self.tiers.should_leave(state)):
            return told
        found = state.found = state.look_up(self.config.max_draft_len, limit)
        told = replace(told, found=len(found.tokens), match=found.match)
        taken = self.planner.takes(told, batch) if found.tokens else 0
        if taken == 0:
            return told
        state.take_found(taken)
        return replace(told, drafted=taken)

    def _add_probes(self, state: RequestState, told: DraftState, limit: int, batch: int) -> None:
        """Have the draft pass check tokens that may follow, so that it drafts several at once."""
        most = told.limit - told.drafted - 1
        if most <= 0 or state.req.grammar is not None or state.proposals:
            return
        found = state.look_up(most, limit)
        count = self.planner.probes(
            replace(told, found=len(found.tokens), match=found.match), batch
        )
        state.probes = found.tokens[:count]

    def _free_packed(self, states: Sequence[RequestState]) -> None:
        """Free the packed copies of ended requests; who lacked room for one may draft again."""
        packed = self.chooser.packed
        packed.retain(states)
        for state in states:
            if state.barred and packed.has_room(state):
                state.barred, state.has_view = 0, False

    def _choose_view(self, state: RequestState) -> None:
        if self.tiers is None:
            self.chooser.choose(state)
        else:
            self.tiers.choose_view(state)
        self.counters.unpacked += state.barred > 0

    def _wants_queries(self, state: RequestState) -> bool:
        wanted = state.dropper.query_rows > 0
        return wanted and (self.config.refresh != 0 or not state.queries)

    def _forward(self, batch: ScheduleBatch, step: RaggedPass) -> LogitsProcessorOutput:
        """One pass of the target model over all rows; logits ``[R, V]``."""
        step.place(batch, self.slots)
        return self.target_worker.forward_batch_generation(batch, is_verify=True).logits_output

    def _commit(
        self,
        batch: ScheduleBatch,
        step: RaggedPass,
        output: LogitsProcessorOutput,
        settled: Settled,
    ) -> GenerationBatchResult:
        """Commit 0..k+1 tokens of each request through SGLang's own result path."""
        committed = [[0] * self.slots for _ in step.states]
        margins = self._margins(step, output.next_token_logits, settled.token_ids)
        queries = self.attention.take_queries()
        captured = 0
        for i, (state, action) in enumerate(zip(step.states, step.actions, strict=True)):
            run, accepted = settled.tokens[i], settled.accept_len[i]
            keys = state.committed + 1 if action is Action.VERIFY else state.draft_keys
            self.counters.kv_bytes_read += int(keys * self.chooser.bytes_per_key)
            if action is Action.WAIT:
                continue
            if accepted == 0:
                state.drafts += run
                state.passes += 1
                state.margins += margins.get(i, [])[: len(run)]
                self.counters.probed += len(state.probes)
                self.counters.probed_agreed += len(run) - 1
                continue
            committed[i][:accepted] = run
            if action is Action.DRAFT:  # unverified: its KV is not exact
                state.req.skip_radix_cache_insert = True
                continue
            drafted = len(state.drafts)
            if step.captures[i]:
                assert queries is not None
                fresh = queries[:, captured : captured + accepted]
                captured += drafted + 1
                state.add_queries(fresh)
            state.follow(run)
            if state.found.tokens:
                self._score_found(state, run)
            self._end_round(state, drafted, accepted - 1)
        if batch.return_logprob:
            write_logprobs(output, settled.logprobs, len(step.states), self.slots)
        accept_len = torch.tensor(settled.accept_len, dtype=torch.int32)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=torch.tensor(committed).view(-1),
            accept_lens=accept_len,
            new_seq_lens=batch.seq_lens + accept_len.to(batch.seq_lens.device),
            next_draft_input=RaggedInput(self.slots),
            speculative_num_draft_tokens=self.slots,
        )

    def _margins(
        self, step: RaggedPass, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> dict[int, list[float]]:
        """By drafting request, the logit of each new draft above the best other one.

        A draft whose runner-up is near is often rejected, and everything drafted after it with it.
        Nobody asks with a fixed draft length.
        """
        layout = step.layout
        drafting = [i for i, verifies in enumerate(layout.verifying) if not verifies]
        if self.config.draft_len is not None or not drafting:
            return {}
        spans = [layout.spans[i] for i in drafting]
        index = [row for start, stop in spans for row in range(start, stop)]
        first = index[0]
        rows, drafts = torch.tensor(index, device=logits.device), token_ids[index]
        chosen = logits[rows, drafts]
        logits[rows, drafts] = float("-inf")  # in place: a copy of the rows takes longer
        runner_up = logits[first : index[-1] + 1].amax(dim=1)[rows - first]
        logits[rows, drafts] = chosen
        margins = iter((chosen - runner_up).tolist())
        return {
            i: list(itertools.islice(margins, stop - start))
            for i, (start, stop) in zip(drafting, spans, strict=True)
        }

    def _score_found(self, state: RequestState, run: Sequence[int]) -> None:
        """Compare what was found with what came, whether or not it was taken."""
        pairs = list(zip(state.found.tokens, run, strict=False))
        agreed = next((i for i, (found, came) in enumerate(pairs) if found != came), len(pairs))
        self.planner.found(state.found.match, len(pairs), agreed)
        state.found = NOTHING

    def _end_round(self, state: RequestState, drafted: int, accepted: int) -> None:
        """Count a verify pass; forget a view that has grown stale."""
        self.planner.settle(
            state.serial, drafted, accepted, state.margins, state.passes, state.took_found
        )
        self.counters.record_verify(drafted, accepted)
        state.drafts, state.margins, state.passes = [], [], 0
        if drafted == 0:
            return
        state.drafted += drafted
        state.req.spec_num_cap_tokens = state.drafted
        if state.took_found:
            self.counters.looked_up += drafted
            self.counters.looked_up_accepted += accepted
            state.took_found = False
            if self._has_outgrown_view(state):
                state.has_view = False
            return
        state.rounds += 1
        state.view_drafted += drafted
        state.view_accepted += accepted
        if self._is_stale(state):
            state.has_view = False  # chosen anew before the next draft

    def _has_outgrown_view(self, state: RequestState) -> bool:
        return state.committed - state.chosen_at > max(state.view_kept, MIN_TAIL)

    def _is_stale(self, state: RequestState) -> bool:
        """Whether a view should be chosen anew: it drafts poorly, or its tail has outgrown it."""
        if self._has_outgrown_view(state):
            return True
        if not state.dropper.refreshable or self.config.refresh == 0:
            return False
        if self.config.refresh is not None:
            return state.rounds >= self.config.refresh
        poor = state.view_accepted < REFRESH_BELOW * state.view_drafted
        return poor and state.rounds >= REFRESH_ROUNDS

"""Drafts of requests whose full KV is still on its way from a remote store.

Such a request waits in SGLang's queue. Its compressed copy, a tenth of the bytes, arrives first:
on that the rest of its prompt is prefilled and tokens are drafted, all provisional. When its full
KV is there the request starts as any other, its prompt's rest is prefilled exactly, and what was
drafted meanwhile is verified like every draft. Nothing provisional is ever kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from sglang_vericache.attention.rows import Rows, ViewLists
from sglang_vericache.compressors import create
from sglang_vericache.core import Counters
from sglang_vericache.hooks import Hook
from sglang_vericache.mem_cache.spans import CompressedCopy
from sglang_vericache.mem_cache.tiered import TieredCache
from sglang_vericache.sampling.sampler import FILTERED, GREEDY, PLAIN, RowParams
from sglang_vericache.speculative.packed_views import PackedViews
from sglang_vericache.speculative.ragged_input import RaggedInput
from sglang_vericache.speculative.state import Requests, choices_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker

    from sglang_vericache.config import VeriCacheConfig

# Rows of one provisional pass, so that running requests wait little for it.
MAX_ROWS = 256
# Prompt tokens behind the compressed copy; with more, the exact prefill is most of the work anyway.
MAX_REST = 1024
# Drafts of one request.
MAX_PROPOSALS = 64


@dataclass
class _Job:
    """A waiting request that drafts.

    Attributes:
        req: the request.
        start: tokens that the compressed copy stands for.
        counts: ``[L, Hv]`` listed tokens of the copy.
        copy: slots of the copy, in the KV pool or a packed one.
        slots: int64, one for every later token: the rest of the prompt, then drafts.
        computed: of those tokens, how many have KV.
        proposals: tokens drafted so far.
    """

    req: Req
    start: int
    counts: Tensor
    copy: Tensor
    slots: Tensor
    computed: int = 0
    proposals: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All tokens behind the copy."""
        return [*self.req.origin_input_ids[self.start :], *self.proposals]

    @property
    def is_done(self) -> bool:
        return len(self.proposals) >= _most_proposals(self.req)


class Provisional:
    """Runs the provisional passes of all waiting requests, one pass an iteration.

    Args:
        worker: runs the target model.
        cache: lends device slots; its ``spans`` bring compressed copies.
        packed: lends slots for those of a quantizing compressor.
        requests: takes the proposals of a request that starts.
    """

    def __init__(
        self,
        worker: TpModelWorker,
        cache: TieredCache,
        packed: PackedViews,
        requests: Requests,
        config: VeriCacheConfig,
        counters: Counters,
    ) -> None:
        assert cache.spans is not None
        self._worker, self._cache, self._store = worker, cache, cache.spans
        self._requests, self._config, self._counters = requests, config, counters
        self._packed = packed
        self._asked: set[Req] = set()
        self._jobs: dict[Req, _Job] = {}
        # Where copies are put: of the codec that the store's copies have, or the KV pool.
        self._codec = create(config.compressor, config.compressor_settings).codec
        if self._codec:
            pool = packed.pool(self._codec).layers
            self._buffers = [(layer.keys, layer.values) for layer in pool]
        else:
            pool = worker.model_runner.token_to_kv_pool
            layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
            self._buffers = [pool.get_kv_buffer(layer) for layer in layers]
        self._device = self._buffers[0][0].device
        cache.give_up_room = packed.give_up_room = self.stop_all
        cache.starting = self.stop

    def ask(self, req: Req) -> None:
        """Begin to read the copy for a request that has just begun to wait for a store."""
        choices = choices_of(req, self._config)
        gate = self._config.min_context if self._config.draft_len is None else 0
        prompt = req.origin_input_ids
        if choices.limit == 0 or choices.unverified or req.output_ids or len(prompt) < gate:
            return
        if req in self._asked or _most_proposals(req) == 0:
            return
        names = self._store.names(prompt[: len(prompt) - 1], req.extra_key, req.cache_salt)
        if names:
            self._asked.add(req)
            self._store.request(req, req.cache_request_handle, names)

    def step(self, waiting: Sequence[Req]) -> None:
        """Take what arrived, end jobs whose full KV is there, and run one pass for the others."""
        arrived = self._store.arrived()
        if not self._asked:
            return
        loading = {
            req for req in waiting if self._cache.has_ongoing_prefetch(req.cache_request_handle)
        }
        for req in self._asked - loading:
            self.stop(req)
        for req, copy in arrived:
            if req in self._asked:
                self._start(req, copy)
        self._run([job for job in self._jobs.values() if not job.is_done])

    def stop(self, req: Req) -> None:
        """End the job of a request, if it has one; proposals made so far stay."""
        if req in self._asked:
            self._asked.remove(req)
            self._store.cancel(req)
        job = self._jobs.pop(req, None)
        if job is not None:
            self._cache.take_back(req)
            if self._codec:
                self._packed.take_back(req)
            self._requests.propose(req, job.proposals)

    def stop_all(self) -> None:
        """Give back all slots."""
        for req in list(self._jobs):
            self.stop(req)

    def _start(self, req: Req, copy: CompressedCopy) -> None:
        rest = len(req.origin_input_ids) - copy.length
        if not 0 < rest <= MAX_REST:
            return
        kept = 0 if self._codec else copy.longest
        slots = self._cache.lend(req, kept + rest + _most_proposals(req))
        if slots is None:
            return
        own, later = slots[:kept], slots[kept:]
        if self._codec:
            packed = self._packed.lend(req, self._codec, copy.longest)
            if packed is None:
                self._cache.take_back(req)
                return
            own = packed
        copy.write(self._buffers, own.long())
        self._jobs[req] = _Job(req, copy.length, copy.counts, own, later)
        self._counters.provisional += 1

    def _run(self, jobs: Sequence[_Job]) -> None:
        """One pass: the next rows of every job; the last row of a complete prompt drafts."""
        parts: list[tuple[_Job, list[int]]] = []
        room = MAX_ROWS
        for job in jobs:
            tokens = job.tokens[job.computed :][:room]
            if tokens:
                parts.append((job, tokens))
                room -= len(tokens)
        if not parts:
            return
        logits = self._forward(parts)
        ends = np.cumsum([len(tokens) for _, tokens in parts]) - 1
        for job, tokens in parts:
            job.computed += len(tokens)
        drafting = [i for i, (job, _) in enumerate(parts) if job.computed == len(job.tokens)]
        if not drafting:
            return
        rows = torch.from_numpy(ends[drafting]).to(self._device)
        drafters = [parts[i][0] for i in drafting]
        positions = [job.start + job.computed - 1 for job in drafters]
        found = self._worker.model_runner.sampler.sample_rows(
            logits[rows],
            _row_params([job.req for job in drafters], self._device),
            torch.tensor(positions, device=self._device),
        )
        for job, token in zip(drafters, found.tolist(), strict=True):
            job.proposals.append(token)
            self._counters.proposed += 1

    def _forward(self, parts: Sequence[tuple[_Job, list[int]]]) -> Tensor:
        """Logits ``[R, V]`` of the given tokens."""
        ids = [token for _, tokens in parts for token in tokens]
        spans = [(job.computed, job.computed + len(tokens)) for job, tokens in parts]
        positions = [
            job.start + i
            for (job, _), (begin, end) in zip(parts, spans, strict=True)
            for i in range(begin, end)
        ]
        written = [
            job.slots[begin:end] for (job, _), (begin, end) in zip(parts, spans, strict=True)
        ]
        table = torch.nn.utils.rnn.pad_sequence([job.slots for job, _ in parts], batch_first=True)
        heads = np.cumsum([0, *(len(tokens) for _, tokens in parts)])
        tensor = self._tensor
        lengths = tensor([end for _, end in spans], torch.int32)
        rows = Rows(
            q_indptr=tensor(heads, torch.int32),
            req_row=torch.arange(len(parts), dtype=torch.int32, device=self._device),
            tail_start=torch.zeros_like(lengths),
            tail_end=lengths,
            views=self._views([job for job, _ in parts]),
            table=table.to(torch.int32),
            longest=max(end for _, end in spans),
        )
        where = tensor(positions, torch.int64)
        seq_lens = [job.start + end for (job, _), (_, end) in zip(parts, spans, strict=True)]
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(parts),
            input_ids=tensor(ids, torch.int64),
            req_pool_indices=tensor([0] * len(parts)),
            seq_lens=tensor(seq_lens),
            out_cache_loc=torch.cat(written),
            seq_lens_sum=sum(seq_lens),
            seq_lens_cpu=torch.tensor(seq_lens),
            positions=where,
            spec_info=RaggedInput(1, where, rows),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        self._worker.model_runner.kv_index_translator.bind_own_plan(batch)
        result = self._worker.forward_batch_generation(None, forward_batch=batch, is_verify=True)
        logits: Tensor = result.logits_output.next_token_logits
        return logits

    def _views(self, jobs: Sequence[_Job]) -> ViewLists:
        widest = max(job.counts.shape[1] for job in jobs)
        lengths = torch.stack([job.counts.expand(-1, widest) for job in jobs], dim=1)
        offsets = np.cumsum([0, *(len(job.copy) for job in jobs)])[:-1]
        starts = self._tensor(offsets).view(1, -1, 1).expand_as(lengths).contiguous()
        return ViewLists(
            indices=torch.cat([job.copy for job in jobs]).to(torch.int32),
            start=starts,
            length=lengths.to(self._device, torch.int32),
            longest=max(len(job.copy) for job in jobs),
            pool=self._tensor([self._packed.number(self._codec)] * len(jobs), torch.int32)
            if self._codec
            else None,
        )

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self._device)


def _most_proposals(req: Req) -> int:
    """Drafts worth having: the first token of an answer comes from its prefill anyway."""
    wanted: int = req.sampling_params.max_new_tokens
    return 0 if wanted <= 1 else min(MAX_PROPOSALS, wanted)


def _row_params(reqs: Sequence[Req], device: torch.device) -> RowParams:
    """Sampling parameters of requests that are in no batch yet."""

    def column(get: Callable[[Any], float], dtype: torch.dtype) -> Tensor:
        return torch.tensor([get(req.sampling_params) for req in reqs], dtype=dtype).to(device)

    def kind(params: Any) -> int:
        if params.top_k <= 1:
            return GREEDY
        filters = params.top_k != TOP_K_ALL or params.top_p != 1.0 or params.min_p > 0
        return FILTERED if filters else PLAIN

    return RowParams(
        kinds=np.array([kind(req.sampling_params) for req in reqs], dtype=np.uint8),
        temperatures=column(lambda p: p.temperature, torch.float32)[:, None],
        top_ks=column(lambda p: p.top_k, torch.int32),
        top_ps=column(lambda p: p.top_p, torch.float32),
        min_ps=column(lambda p: p.min_p, torch.float32),
        seeds=column(lambda p: p.sampling_seed or 0, torch.int64),
    )


def after_prefetch(
    result: Any, self: Scheduler, req: Req, storage_hit_end: int | None = None
) -> None:
    """``Scheduler._prefetch_kvcache`` after: the compressed copy comes before the full KV."""
    provisional = _of(self)
    if provisional and self.tree_cache.has_ongoing_prefetch(req.cache_request_handle):
        provisional.ask(req)


def after_events(result: None, self: Scheduler, should_retry_storage_prefetch: bool = True) -> None:
    """``Scheduler._process_hicache_events`` after: use the time until full KV arrives."""
    if provisional := _of(self):
        provisional.step(self.waiting_queue)


def _of(scheduler: Scheduler) -> Provisional | None:
    cache = scheduler.tree_cache
    if getattr(cache, "spans", None) is None:
        return None
    found: Provisional = scheduler.draft_worker.provisional_for(cache)
    return found


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache",
        ("self", "req", "storage_hit_end"),
        "after",
        after_prefetch,
        "knows of no second, smaller copy",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler._process_hicache_events",
        ("self", "should_retry_storage_prefetch"),
        "after",
        after_events,
        "runs nothing for a request that waits for a store",
    ),
)

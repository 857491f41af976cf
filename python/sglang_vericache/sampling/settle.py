"""Rows of one forward pass -> the tokens that plain decoding would have emitted.

A verifying request brings its drafts' rows and gets back the longest prefix of drafts that its own
sampling confirms, plus one token. A drafting request brings one row and gets its next draft, or
further rows of tokens that may follow, and as many drafts as agree with those and one more. All are
sampled by the same rule with the noise of their position, so a draft differs from the token
verified later only where the compressed view changed the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_vericache.sampling.grammar import mask_rows
from sglang_vericache.sampling.logprobs import CommittedLogprobs, gather_logprobs, write_logprobs
from sglang_vericache.sampling.penalties import apply_penalties
from sglang_vericache.sampling.processors import processed_requests, settle_stepwise

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_vericache.sampling.sampler import RowParams, RowSampler

__all__ = ["RowLayout", "Settled", "settle", "write_logprobs"]


@dataclass(frozen=True)
class RowLayout:
    """Which row of a forward pass belongs to whom. Rows go by request, then by depth.

    A verifying request with k drafts owns k + 1 rows of depth 0..k; a drafting request with m
    drafts and n probes, tokens that may follow them, owns rows of depth m..m + n. The row of depth
    d sees the request's committed output and the first d of its drafts and probes; its input token
    sits at ``positions``.

    Shapes: ``req_index``, ``positions`` ``[rows]`` int64 on the device of the logits; ``drafts``
    (with probes), ``verifying`` and ``first`` (depth) have one entry per request of the batch.
    """

    req_index: torch.Tensor
    positions: torch.Tensor
    drafts: list[list[int]]
    verifying: list[bool]
    first: list[int]

    @classmethod
    def build(
        cls,
        drafts: list[list[int]],
        verifying: list[bool],
        committed_lens: list[int],
        device: torch.device | str,
        probes: Sequence[list[int]] = (),
    ) -> RowLayout:
        """Lay out a batch.

        Args:
            drafts, verifying: per request.
            probes: per request, empty for one that verifies or has a grammar; () if nobody has any.
            committed_lens: per request, length of its committed KV; equals the position of the
                last committed token, which is the input of depth 0.
        """
        req_index, positions = [], []
        first = [0 if v else len(d) for d, v in zip(drafts, verifying, strict=True)]
        if probes:
            drafts = [[*own, *more] for own, more in zip(drafts, probes, strict=True)]
        for request, (tokens, start, length) in enumerate(
            zip(drafts, first, committed_lens, strict=True)
        ):
            for row_depth in range(start, len(tokens) + 1):
                req_index.append(request)
                positions.append(length + row_depth)
        stacked = torch.tensor([req_index, positions], dtype=torch.int64)
        stacked = stacked.to(device, non_blocking=True)
        return cls(stacked[0], stacked[1], drafts, verifying, first)

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First row and end of the rows of every request."""
        spans, start = [], 0
        for drafts, first in zip(self.drafts, self.first, strict=True):
            stop = start + len(drafts) + 1 - first
            spans.append((start, stop))
            start = stop
        return spans

    @functools.cached_property
    def host_req_index(self) -> np.ndarray:
        """``req_index`` on the host, without waiting for the device."""
        sizes = [stop - start for start, stop in self.spans]
        return np.repeat(np.arange(len(sizes)), sizes)


@dataclass(frozen=True)
class Settled:
    """Result of ``settle``.

    Attributes:
        token_ids: ``[rows]`` int64; behind a request's accepted run meaningless.
        accept_len: committed tokens per request, 0 for a drafting one.
        tokens: per request the committed run, or what it drafts.
        logprobs: of the committed tokens of requests that asked for them.
    """

    token_ids: torch.Tensor
    accept_len: list[int]
    tokens: list[list[int]]
    logprobs: CommittedLogprobs | None


def settle(
    logits: torch.Tensor, layout: RowLayout, batch: ScheduleBatch, sampler: RowSampler
) -> Settled:
    """Sample every row with the state it has in plain decoding and accept what agrees.

    Args:
        logits: ``[rows, vocab]`` as the model gave them; modified in place.
        layout: rows of this pass.
        batch: its requests hold exactly their committed output, and their grammars have accepted
            exactly that. Neither is changed.
        sampler: the sampler of the target worker.
    """
    reqs, info = batch.reqs, batch.sampling_info
    index, host_index = layout.req_index, layout.host_req_index
    params = sampler.row_params(info)
    if len(host_index) != len(reqs):  # else one row each, in the order of the requests
        params = params.take(index, host_index)

    apply_penalties(logits, layout, reqs)
    limits = mask_rows(logits, layout, reqs)
    if info.logit_bias is not None:
        for req, (start, stop), bias in zip(reqs, layout.spans, info.logit_bias, strict=True):
            if req.sampling_params.logit_bias:  # the bias of others is zero
                logits[start:stop].add_(bias)
    stepwise = processed_requests(layout, info)
    token_ids = _sample_at_once(logits, layout, params, sampler, stepwise, batch)
    counts = {}
    if stepwise:
        counts = settle_stepwise(
            logits, layout, stepwise, limits, reqs, info, params, sampler, token_ids
        )

    accept_len, tokens = [], []
    sampled = token_ids.tolist()
    for request, (start, stop) in enumerate(layout.spans):
        expected = layout.drafts[request][layout.first[request] :]
        length = counts.get(request) or _agreeing(
            sampled[start:stop], expected, min(limits[request], stop - start)
        )
        accept_len.append(length if layout.verifying[request] else 0)
        tokens.append(sampled[start : start + length])
    logprobs = _committed_logprobs(logits, layout, batch, params, sampler, token_ids, accept_len)
    return Settled(token_ids, accept_len, tokens, logprobs)


def _sample_at_once(
    logits: torch.Tensor,
    layout: RowLayout,
    params: RowParams,
    sampler: RowSampler,
    stepwise: list[int],
    batch: ScheduleBatch,
) -> torch.Tensor:
    """Sample all rows but those of ``stepwise`` requests; ``[rows]`` int64."""
    if not stepwise:
        sanitize_nan_logits(logits, "vericache: logits")
        token_ids = sampler.sample_rows(logits, params, layout.positions)
        sampler.sync_rows(token_ids, batch.reqs)
        return token_ids
    host_index = np.flatnonzero(~np.isin(layout.host_req_index, stepwise))
    token_ids = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    if host_index.size:
        index = torch.from_numpy(host_index).to(logits.device)
        rows = logits[index]
        sanitize_nan_logits(rows, "vericache: logits")
        logits[index] = rows
        sampled = sampler.sample_rows(rows, params.take(index, host_index), layout.positions[index])
        sampler.sync_rows(sampled, batch.reqs)
        token_ids[index] = sampled
    return token_ids


def _agreeing(sampled: list[int], drafts: list[int], limit: int) -> int:
    """Length of the longest prefix of ``drafts`` that was sampled, plus one, at most ``limit``."""
    length = 1
    while length < limit and drafts[length - 1] == sampled[length - 1]:
        length += 1
    return length


def _committed_logprobs(
    logits: torch.Tensor,
    layout: RowLayout,
    batch: ScheduleBatch,
    params: RowParams,
    sampler: RowSampler,
    token_ids: torch.Tensor,
    accept_len: list[int],
) -> CommittedLogprobs | None:
    if not batch.return_logprob:
        return None
    slots = [
        (request, offset)
        for request, (req, length) in enumerate(zip(batch.reqs, accept_len, strict=True))
        if req.return_logprob
        for offset in range(length)
    ]
    if not slots:
        return None
    host_index = np.array([layout.spans[request][0] + offset for request, offset in slots])
    index = torch.from_numpy(host_index).to(logits.device)
    logprobs = sampler.row_logprobs(logits[index], params.take(index, host_index))
    result = gather_logprobs(
        logprobs,
        token_ids[index],
        [batch.top_logprobs_nums[request] for request, _ in slots],
        [batch.token_ids_logprobs[request] for request, _ in slots],
    )
    return CommittedLogprobs(slots, result)

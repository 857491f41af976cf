"""Penalties and min_new_tokens of a row, counted over exactly the tokens in front of it.

The stock penalizers hold dense sums per request and are advanced once per step, by one token. A
verify row needs the sums over committed tokens plus the drafts before it, and rejected drafts must
leave no trace. So nothing is advanced here: counts follow from ``req.output_ids`` and the drafts,
and only the tokens that were generated are touched. Every float operation is that of the stock
penalizers in their order, so a row gets the same bits as in plain decoding:

    additive = 0 - frequency * count (count repeated additions) - presence * (count > 0) [- inf]
    logit = (logit + additive) * or / repetition where count > 0
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

from sglang_vericache.sampling.requests import stop_tokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_vericache.sampling.settle import RowLayout


def apply_penalties(logits: torch.Tensor, layout: RowLayout, reqs: list[Req]) -> None:
    """Apply every request's own penalties to its rows of ``logits`` ``[rows, vocab]``, in place."""
    for req, (start, stop), drafts in zip(reqs, layout.spans, layout.drafts, strict=True):
        if _is_penalised(req):
            first_depth = len(drafts) + 1 - (stop - start)
            _apply_to_request(logits[start:stop], req, drafts, first_depth)


def restore_penalizers(info: SamplingBatchInfo, reqs: list[Req]) -> None:
    """Make the stock penalizers of a new batch count the tokens its requests already have.

    A retracted request is prefilled again with a new ``SamplingBatchInfo`` whose sums start at
    zero; stock forgets its penalties there. A request without output is left as it is.
    """
    if not info.penalizer_orchestrator.is_required:
        return
    for row, req in enumerate(reqs):
        if len(req.output_ids):
            for penalizer in info.penalizer_orchestrator.penalizers.values():
                if penalizer.is_prepared():
                    _restore(penalizer, row, req)


class _Tally:
    """Counts of the output tokens of a request, kept up to date incrementally."""

    def __init__(self) -> None:
        self.seen = 0
        self.counts: dict[int, int] = {}

    def follow(self, output_ids: Sequence[int]) -> dict[int, int]:
        if len(output_ids) < self.seen:  # the output was discarded: count again
            self.seen, self.counts = 0, {}
        for token in output_ids[self.seen :]:
            self.counts[token] = self.counts.get(token, 0) + 1
        self.seen = len(output_ids)
        return self.counts


_TALLIES: weakref.WeakKeyDictionary[Req, _Tally] = weakref.WeakKeyDictionary()


def counts_of(req: Req) -> dict[int, int]:
    """How often each token occurs in the committed output of a request."""
    tally = _TALLIES.get(req)
    if tally is None:
        tally = _TALLIES[req] = _Tally()
    return tally.follow(req.output_ids)


def _is_penalised(req: Req) -> bool:
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or len(req.output_ids) < params.min_new_tokens
    )


def _apply_to_request(logits: torch.Tensor, req: Req, drafts: list[int], first_depth: int) -> None:
    """Apply to the rows of one request; row r follows ``drafts[: first_depth + r]``."""
    params = req.sampling_params
    depths = range(first_depth, first_depth + logits.shape[0])
    committed = counts_of(req)
    suppressed = sorted(stop_tokens(req)) if len(req.output_ids) < params.min_new_tokens else []
    tokens = list(dict.fromkeys((*committed, *drafts, *suppressed)))
    column = {token: at for at, token in enumerate(tokens)}
    counts = np.zeros((len(depths), len(tokens)), dtype=np.int64)
    counts[:, : len(committed)] = list(committed.values())
    for row, depth in enumerate(depths):
        for token in drafts[:depth]:
            counts[row, column[token]] += 1

    additive = -_repeated_sums(params.frequency_penalty, int(counts.max(initial=0)))[counts]
    additive -= np.where(counts > 0, np.float32(params.presence_penalty), np.float32(0))
    for row, depth in enumerate(depths):
        if len(req.output_ids) + depth < params.min_new_tokens:
            additive[row, [column[token] for token in suppressed]] = -np.inf
    scaling = np.where(counts > 0, np.float32(params.repetition_penalty), np.float32(1))

    index = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    values = logits[:, index]
    values.add_(torch.from_numpy(additive).to(logits.device))
    if params.repetition_penalty != 1.0:
        _scale(values, torch.from_numpy(scaling).to(logits.device))
    logits[:, index] = values


def _repeated_sums(penalty: float, count: int) -> np.ndarray:
    """``penalty`` added 0, 1, ... ``count`` times, float32, as ``scatter_add_`` accumulates it."""
    steps = np.full(count + 1, penalty, dtype=np.float32)
    steps[0] = 0
    return np.add.accumulate(steps)


def _scale(values: torch.Tensor, scaling: torch.Tensor) -> None:
    # On a GPU the compiled function divides differently from eager code; on a CPU both round
    # correctly and compiling would take half a minute.
    if values.is_cuda:
        apply_scaling_penalties(values, scaling)
    else:
        values[:] = torch.where(values < 0, values * scaling, values / scaling)


def _restore(penalizer: object, row: int, req: Req) -> None:
    params = req.sampling_params
    counts = counts_of(req)
    tokens = list(counts)
    if isinstance(penalizer, penaltylib.BatchedFrequencyPenalizer):
        sums = _repeated_sums(params.frequency_penalty, max(counts.values()))
        row_sums = torch.from_numpy(sums[list(counts.values())])
        state = penalizer.cumulated_frequency_penalties
        state[row, tokens] = row_sums.to(state.device)
    elif isinstance(penalizer, penaltylib.BatchedPresencePenalizer):
        penalizer.cumulated_presence_penalties[row, tokens] = params.presence_penalty
    elif isinstance(penalizer, penaltylib.BatchedRepetitionPenalizer):
        penalizer.cumulated_repetition_penalties[row, tokens] = params.repetition_penalty
    elif isinstance(penalizer, penaltylib.BatchedMinNewTokensPenalizer):
        penalizer.len_output_tokens[row] = len(req.output_ids)
    else:
        raise TypeError(f"unknown penalizer {type(penalizer).__name__}")

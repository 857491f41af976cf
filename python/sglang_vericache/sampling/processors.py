"""Custom logit processors: called once for every committed position, in order.

A processor may keep state and reads its request through ``custom_params["__req__"]``, so row d can
only be processed when the tokens before it are known to be committed. Requests that have one are
settled row by row, all of them together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_vericache.sampling.requests import stop_tokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_vericache.sampling.sampler import RowParams, RowSampler
    from sglang_vericache.sampling.settle import RowLayout


def processed_requests(layout: RowLayout, info: SamplingBatchInfo) -> list[int]:
    """Verifying requests that have a custom logit processor.

    Drafting requests skip theirs: a call for a token that may be rejected is one too many.
    """
    if not info.has_custom_logit_processor:
        return []
    rows = {row for entry in info.custom_logit_processor.values() for row in entry.rows}
    return [request for request in sorted(rows) if layout.verifying[request]]


def settle_stepwise(
    logits: torch.Tensor,
    layout: RowLayout,
    requests: list[int],
    limits: list[int],
    reqs: list[Req],
    info: SamplingBatchInfo,
    params: RowParams,
    sampler: RowSampler,
    token_ids: torch.Tensor,
) -> dict[int, int]:
    """Settle ``requests``, one depth at a time for all that are still alive.

    Args:
        logits: ``[rows, vocab]``; processed in place where a row is reached.
        limits: per request of the batch, how many rows its grammar lets commit.
        params: one entry a row.
        token_ids: ``[rows]`` int64, filled for the rows reached.

    Returns:
        Committed tokens per request. A run ends early at a token that ends its request, so that
        the processor is not called behind it.
    """
    counts: dict[int, int] = {}
    alive = list(requests)
    depth = 0
    with _restored_outputs([reqs[request] for request in requests]):
        while alive:
            rows = {request: layout.spans[request][0] + depth for request in alive}
            host_index = np.fromiter(rows.values(), dtype=np.int64)
            index = torch.from_numpy(host_index).to(logits.device)
            _process(logits, rows, info)
            reached = logits[index]
            sanitize_nan_logits(reached, "vericache: processed logits")
            logits[index] = reached
            sampled = sampler.sample_rows(
                reached, params.take(index, host_index), layout.positions[index]
            )
            sampler.sync_rows(sampled, [reqs[request] for request in alive])
            token_ids[index] = sampled
            depth += 1
            survivors = []
            for request, token in zip(alive, sampled.tolist(), strict=True):
                counts[request] = depth
                drafts, req = layout.drafts[request], reqs[request]
                req.output_ids.append(token)
                if depth < limits[request] and drafts[depth - 1] == token and not _ends(req, token):
                    survivors.append(request)
            alive = survivors
    return counts


def _process(logits: torch.Tensor, rows: dict[int, int], info: SamplingBatchInfo) -> None:
    """Run the processors of the requests in ``rows`` (request -> row of ``logits``), in place."""
    for entry in info.custom_logit_processor.values():
        requests = [request for request in entry.rows if request in rows]
        if not requests:
            continue
        index = torch.tensor([rows[request] for request in requests], device=logits.device)
        result = entry.processor(logits[index], [info.custom_params[i] for i in requests])
        logits.index_copy_(0, index, result.to(logits.dtype))


def _ends(req: Req, token: int) -> bool:
    """Whether ``token``, last of ``req.output_ids``, ends the request by length or token id."""
    params = req.sampling_params
    if len(req.output_ids) >= params.max_new_tokens:
        return True
    return not params.ignore_eos and token in stop_tokens(req)


@contextlib.contextmanager
def _restored_outputs(reqs: list[Req]) -> Iterator[None]:
    lengths = [len(req.output_ids) for req in reqs]
    try:
        yield
    finally:
        for req, length in zip(reqs, lengths, strict=True):
            del req.output_ids[length:]

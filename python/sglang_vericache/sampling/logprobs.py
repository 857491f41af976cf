"""Output logprobs of sampled rows, in the layouts SGLang's result path reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logprob_processor import LogprobResult, get_token_ids_logprobs

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput


def gather_logprobs(
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int] | None],
) -> LogprobResult:
    """What the requests of these rows asked for.

    Stock takes the top tokens of all rows with the largest number any of them wants, and the order
    of equal values may depend on that number. Here equal values come by token id.

    Args:
        logprobs: ``[rows, vocab]``; clamped in place to finite values.
        token_ids: ``[rows]`` sampled tokens.
        top_logprobs_nums, token_ids_logprobs: one entry a row.
    """
    logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)
    result = LogprobResult(token_logprobs=logprobs.gather(1, token_ids[:, None]).view(-1))
    if any(num > 0 for num in top_logprobs_nums):
        result.top_logprobs_val, result.top_logprobs_idx = _top(logprobs, top_logprobs_nums)
    if any(ids is not None for ids in token_ids_logprobs):
        result.token_ids_logprobs_val, result.token_ids_logprobs_idx = get_token_ids_logprobs(
            logprobs, token_ids_logprobs, no_copy_to_cpu=True
        )
    return result


def _top(logprobs: torch.Tensor, nums: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    values = [logprobs.new_empty(0)] * len(nums)
    token_ids = [torch.empty(0, dtype=torch.int64, device=logprobs.device)] * len(nums)
    wanted = [row for row, num in enumerate(nums) if num > 0]
    ranked = _rank_by_value_then_id(logprobs[wanted], max(nums))
    picked = logprobs[wanted].gather(1, ranked)
    for at, row in enumerate(wanted):
        values[row] = picked[at, : nums[row]]
        token_ids[row] = ranked[at, : nums[row]]
    return values, token_ids


def _rank_by_value_then_id(values: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the ``count`` largest values of each row, ``[rows, count]`` int64."""
    # Finite float32 bit patterns order like integers once the negative ones are flipped; adding
    # 0.0 turns -0.0 into 0.0. The low half of the key then decides between equal values.
    bits = (values.float() + 0.0).view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    columns = values.shape[-1]
    falling_ids = torch.arange(columns - 1, -1, -1, device=values.device)
    return ((bits << 32) + falling_ids).topk(min(count, columns), dim=-1).indices


@dataclass(frozen=True)
class CommittedLogprobs:
    """Logprobs of committed rows: ``slots[n] = (request, offset in its run)`` of row n."""

    slots: list[tuple[int, int]]
    result: LogprobResult


def write_logprobs(
    logits_output: LogitsProcessorOutput,
    committed: CommittedLogprobs | None,
    num_requests: int,
    stride: int,
) -> None:
    """Store logprobs as the result path of speculative decoding reads them.

    Writes ``next_token_logprobs`` ``[requests, stride]`` and, where asked for, flat lists of
    ``requests * stride`` entries; slot ``request * stride + offset``. Slots without a committed
    token hold 0.0 or an empty entry and are never read.
    """
    if committed is None:
        logits_output.next_token_logprobs = torch.zeros(num_requests, stride)
        return
    flat = [request * stride + offset for request, offset in committed.slots]
    total = num_requests * stride
    result = committed.result
    tokens = result.token_logprobs.new_zeros(total)
    tokens[torch.tensor(flat, device=tokens.device)] = result.token_logprobs
    logits_output.next_token_logprobs = tokens.view(num_requests, stride)
    nothing = tokens.new_empty(0)
    if result.top_logprobs_val is not None:
        logits_output.next_token_top_logprobs_val = _spread(
            result.top_logprobs_val, flat, total, nothing
        )
        logits_output.next_token_top_logprobs_idx = _spread(
            result.top_logprobs_idx, flat, total, nothing
        )
    if result.token_ids_logprobs_val is not None:
        logits_output.next_token_token_ids_logprobs_val = _spread(
            result.token_ids_logprobs_val, flat, total, nothing
        )
        logits_output.next_token_token_ids_logprobs_idx = _spread(
            result.token_ids_logprobs_idx, flat, total, []
        )


def _spread(entries: list, flat: list[int], total: int, nothing: object) -> list:
    spread = [nothing] * total
    for slot, entry in zip(flat, entries, strict=True):
        spread[slot] = entry
    return spread

"""Room on the device for the full KV of one verify pass, where SGLang plans without it."""

from __future__ import annotations

from typing import Any

from sglang_vericache.hooks import Hook
from sglang_vericache.mem_cache.tiered import TieredCache


def admit(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """``PrefillAdder.__init__`` after: new requests leave room to stage any running one."""
    if isinstance(self.tree_cache, TieredCache):
        self.memory_budget.total_offset += self.tree_cache.staging_reserve()


def decode(result: int, self: Any, *args: Any, **kwargs: Any) -> int:
    """``ScheduleBatch.new_tokens_required_next_decode`` after: add what could not be staged.

    SGLang then evicts for it and, with nothing left to evict, retracts a request.
    """
    if isinstance(self.tree_cache, TieredCache):
        return result + self.tree_cache.unstaged
    return result


def reopen(self: Any, batch: Any) -> None:
    """``Scheduler.update_running_batch`` before: ask again who may start.

    Stock asks again only when a request has ended; offloading makes room in between.
    """
    if isinstance(self.tree_cache, TieredCache) and self.tree_cache.holdings:
        batch.batch_is_full = False


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        ("self", "batch"),
        "before",
        reopen,
        "admits nobody before a request has ended",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
        (
            *("self", "page_size", "tree_cache", "token_to_kv_pool_allocator", "running_batch"),
            *("new_token_ratio", "rem_input_tokens", "rem_chunk_tokens"),
            *("num_mixed_decode_tokens", "priority_scheduling_preemption_threshold"),
            *("max_prefill_bs", "max_running_requests", "prefill_max_requests"),
            *("prefill_delayer_single_pass", "dllm_config", "waiting_queue_len"),
            "prefill_tile_block_m",
        ),
        "after",
        admit,
        "takes all that can be evicted for new requests",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
        ("self", "selected_indices"),
        "after",
        decode,
        "knows of no request whose KV must come back",
    ),
)

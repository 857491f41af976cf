"""Room on the device for the full KV of one verify pass, where SGLang plans without it."""

from __future__ import annotations

from typing import Any

from sglang_vericache.hooks import Hook
from sglang_vericache.mem_cache.tiered import TieredCache


def admit(original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """``PrefillAdder.add_one_req`` around: leave room to stage every offloaded request."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    if not isinstance(self.tree_cache, TieredCache):
        return original(self, req, *args, **kwargs)
    self.tree_cache.starting(req)
    reserve = self.tree_cache.staging_reserve(req)
    self.memory_budget.total_offset += reserve
    try:
        result = original(self, req, *args, **kwargs)
    finally:
        self.memory_budget.total_offset -= reserve
    if result is AddReqResult.NO_TOKEN:
        self.tree_cache.refused = True
        self.tree_cache.give_up_room()
    return result


def decode(original: Any, self: Any, selected_indices: Any = None) -> int:
    """``ScheduleBatch.new_tokens_required_next_decode`` around: add what a stuck request lacks.

    SGLang then evicts for it and, with nothing left to evict, retracts a request.
    """
    result: int = original(self, selected_indices)
    if not isinstance(self.tree_cache, TieredCache):
        return result
    chosen = range(len(self.reqs)) if selected_indices is None else selected_indices
    return result + self.tree_cache.missing([self.reqs[i] for i in chosen])


def reopen(self: Any, batch: Any) -> None:
    """``Scheduler.update_running_batch`` before: ask again who may start.

    Stock asks again only when a request has ended; offloading makes room in between.
    """
    if isinstance(self.tree_cache, TieredCache) and self.tree_cache.made_room:
        self.tree_cache.made_room = False
        batch.batch_is_full = False


def retract(original: Any, self: Any) -> Any:
    """``ScheduleBatch.retract_decode`` around: mark what happens meanwhile."""
    if not isinstance(self.tree_cache, TieredCache):
        return original(self)
    self.tree_cache.retracting = True
    try:
        return original(self)
    finally:
        self.tree_cache.retracting = False


def release(*, req: Any, tree_cache: Any, **kwargs: Any) -> None:
    """``release_req`` before: what a retracted request computed is not thrown away."""
    if isinstance(tree_cache, TieredCache) and tree_cache.retracting:
        tree_cache.demote(req)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        ("self", "batch"),
        "before",
        reopen,
        "admits nobody before a request has ended",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        "around",
        admit,
        "takes all that can be evicted for new requests",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode",
        ("self", "selected_indices"),
        "around",
        decode,
        "knows of no request whose KV must come back",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        ("self",),
        "around",
        retract,
        "tells nobody why a request is released",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.release_req",
        (
            *("req", "remaing_req_count", "req_to_token_pool", "token_to_kv_pool_allocator"),
            *("tree_cache", "hisparse_coordinator", "offload_kv"),
        ),
        "before",
        release,
        "frees the KV of a retracted request, which then has to be computed again",
    ),
)

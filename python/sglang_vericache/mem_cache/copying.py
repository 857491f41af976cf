"""SGLang's radix tree, with copies from the host that start when asked and are known to arrive.

Copies run one after the other on a stream of their own. Each has an index; SGLang's counters tell
which of its layers have arrived.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.managers.cache_controller import HiCacheAck, LayerLoadingEvent
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_vericache.mem_cache.parts import PartTransferEngine, Way, merged, whole

# Copies to the device that may run at once; stock allows three.
COPIES = 8
# Weight of the latest copy in the means that the speed of the link is a ratio of.
LINK_RATE = 0.2


class CopyingCache(UnifiedRadixCache):
    """The tree, and when what was loaded back from the host is there."""

    def __init__(self, params: Any):
        super().__init__(params)
        # Means over copies.
        self._copied_tokens = self._copied_seconds = 0.0
        # What queued copies move, by operation and layer, where it is not all of their tokens.
        self._ways: dict[int, list[Way]] = {}
        # When the copy of each index should be complete, and all of them.
        self._arrivals: dict[int, float] = {}
        self._link_free = 0.0

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """Also allow more copies at once."""
        super().init_hicache(server_args, params)
        counter = self.cache_controller.layer_done_counter
        while len(counter.events) < COPIES:
            counter.events.append(LayerLoadingEvent(counter.num_layers))
        counter.num_counters = len(counter.events)
        self.cache_controller.l2_transfer_engine = PartTransferEngine(
            self.cache_controller.io_backend
        )

    @property
    def token_seconds(self) -> float:
        """Time to copy one token's KV to the device; 0 before it was measured.

        Of all tokens copied lately, so that what a copy costs whatever its size, or one that was
        held up, does not count as the price of a few tokens.
        """
        return self._copied_seconds / self._copied_tokens if self._copied_tokens else 0.0

    @property
    def copies_parts(self) -> bool:
        """Whether a copy may leave out tokens of a layer: with SGLang's usual host pool."""
        host = self.cache_controller.mem_pool_host.anchor_entry.host_pool
        return type(host) is MHATokenToKVPoolHost

    @property
    def latest_copy(self) -> int:
        """Index of the copy that was started last."""
        return int(self.cache_controller.layer_done_counter.producer_index)

    def may_start_copy(self) -> bool:
        """Whether fewer than ``COPIES`` run."""
        return bool(self._following_event().query())

    def start_copies(self) -> int:
        """Start the queued copies to the device, as one; its index, -1 if there are none."""
        controller = self.cache_controller
        if not controller.load_queue:
            return -1
        self._following_event().synchronize()  # stock only asserts that it is free
        tokens = float(sum(len(op.device_indices) for op in controller.load_queue))
        ways = self._queued_ways()
        # Also if there are none: a load that raised may have left some.
        controller.l2_transfer_engine.ways = ways
        index = int(super().ready_to_load_host_cache())
        if ways:
            share = sum(len(way.source) for way in ways) / len(ways) / tokens
            tokens *= share
            controller.ack_load_queue[-1] = _less(controller.ack_load_queue[-1], share)
        self._link_free = max(self._link_free, time.monotonic()) + tokens * self.token_seconds
        self._arrivals[index] = self._link_free
        return index

    def ready_to_load_host_cache(self) -> int:
        """Start the queued copies to the device; SGLang calls it for a prefill batch.

        Returns:
            Index of the latest copy that may still run, -1 if there is none: a prefix that the
            batch found on the device may be one that a copy ahead is still writing.
        """
        index = self.start_copies()
        if index < 0 and self.cache_controller.ack_load_queue:
            index = self.latest_copy
        return index

    def await_index(self, index: int) -> None:
        """Hold the current stream until a copy is complete, and so all before it."""
        counter = self.cache_controller.layer_done_counter
        counter.events[index].wait(counter.num_layers - 1)

    def seconds_left(self, index: int) -> float:
        """How long a copy should still take; 0 for index -1."""
        if index < 0:
            return 0.0
        if self.cache_controller.layer_done_counter.events[index].finish_event.query():
            return 0.0
        return max(self._arrivals[index] - time.monotonic(), 0.0)

    def shares_copies(self, node: int) -> bool:
        """Whether a copy to the device that is queued or runs may bring a part of this prefix."""
        ends = [node, *(ongoing.node_id for ongoing in self.ongoing_load_back.values())]
        own, *others = self.tree_core.collect_path_info(ends)
        ids = {each.node_id for each in own}
        return any(each.node_id in ids for path in others for each in path)

    def loading_check(self, finish_count: int | None = None) -> None:
        """Also measure the link."""
        for ack in self.cache_controller.ack_load_queue[:finish_count]:
            if ack.timing_enabled and ack.num_tokens and ack.finish_event.query():
                seconds = ack.start_event.elapsed_time(ack.finish_event) / 1e3
                weight = LINK_RATE if self._copied_tokens else 1.0
                self._copied_tokens += weight * (ack.num_tokens - self._copied_tokens)
                self._copied_seconds += weight * (seconds - self._copied_seconds)
        super().loading_check(finish_count)

    def finish_copies(self) -> None:
        """Wait for all copies, both ways, which hold locks, and give those up."""
        controller = self.cache_controller
        if controller is None:
            return
        self.flush_pending_backups()
        for ack in (*controller.ack_write_queue, *controller.ack_load_queue):
            ack.finish_event.synchronize()
        self.check_hicache_events()

    def leave_out(self, ways: list[Way]) -> None:
        """Have the copy that was queued last move these tokens only."""
        self._ways[self.cache_controller.load_queue[-1].id] = ways

    def _queued_ways(self) -> list[Way]:
        """What all queued copies move, by layer, where SGLang's transfers want the slots.

        Empty if nothing is left out: SGLang's own way then.
        """
        controller = self.cache_controller
        if not any(op.id in self._ways for op in controller.load_queue):
            return []
        layers = controller.transfer_layer_id_max
        each = [
            self._ways.pop(op.id, []) or whole(op.host_indices, op.device_indices, layers)
            for op in controller.load_queue
        ]
        return merged(each, controller.device if controller.io_backend == "kernel" else "cpu")

    def _following_event(self) -> Any:
        """When the copy that had the index of the next one is complete."""
        counter = self.cache_controller.layer_done_counter
        return counter.events[(counter.producer_index + 1) % counter.num_counters].finish_event


def _less(ack: HiCacheAck, share: float) -> HiCacheAck:
    """An acknowledgement of a copy that moves this share of its tokens."""
    by_pool = {pool: round(share * n) for pool, n in (ack.num_tokens_by_pool or {}).items()}
    return ack._replace(
        num_tokens=max(round(share * ack.num_tokens), 0),
        num_tokens_by_pool=by_pool or ack.num_tokens_by_pool,
        num_bytes=round(share * ack.num_bytes) if ack.num_bytes else ack.num_bytes,
    )

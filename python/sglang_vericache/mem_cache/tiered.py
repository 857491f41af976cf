"""SGLang's radix tree, with the full KV of running requests on the host between verify passes.

A request that drafts from a compressed copy reads its full KV only when it verifies. Stock requests
lock their nodes on the device while they run; here such a request may hold its nodes on the host
only (``offload``), get them back for one pass (``stage``) and give the device slots up again
(``release``). Slots given up stay where they are until somebody needs them, as any cached prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_unified_radix_cache,
    get_radix_cache_factory,
    register_radix_cache_backend,
)
from torch import Tensor

from sgl_kernel_ext import ViewPool
from sglang_vericache.config import config_of
from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.lending import LendingCache
from sglang_vericache.mem_cache.parts import Parts, copy_held
from sglang_vericache.mem_cache.span_store import SpanStore, namespace_of
from sglang_vericache.mem_cache.storage_hooks import storage_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

NAME = "vericache"
# Weight of the latest pass in the share of full KV that has to be copied for one.
LOADED_RATE = 0.1


@dataclass
class Holding:
    """What a request with an offloaded prefix holds.

    Attributes:
        slots: int64, device slots of its compressed copy.
        node: end of the prefix whose host copy it locks.
        host_lock: receipt of that lock.
        staged: whether the prefix is locked on the device now.
        parts: what the compressed copy has of the prefix; None: nothing that a copy may leave out.
        copied_by: index of a copy to wait for before the prefix is read: the one that brings it, or
            the latest one that may bring a part of it for somebody else; -1 if all of it is there.
    """

    slots: Tensor
    node: int
    host_lock: DecLockRefParams
    staged: bool
    parts: Parts | None = None
    copied_by: int = -1


class TieredCache(LendingCache):
    """The tree and, for each request with an offloaded prefix, its ``Holding``."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.holdings: dict[Req, Holding] = {}
        # Of the full KV that is staged, how much had left the device lately.
        self.loaded_share = 1.0
        # Whose prefix, or a part of it, comes with the copies that are queued.
        self._queued: list[Holding] = []
        # How many slots of its prompt a request will leave to the host.
        self.gives_back: Callable[[Req], int] = lambda req: 0
        # Requests that no verify pass can run for until somebody gives up room.
        self.stuck: set[Req] = set()
        # Whether verify passes read full KV in host memory.
        self.reads_host = False
        # Called when a request is about to be admitted.
        self.starting: Callable[[Req], None] = lambda req: None
        # Whether requests are being retracted for want of room.
        self.retracting = False
        # Compressed copies in a store, with ``--vericache-tier remote``.
        self.spans: SpanStore | None = None

    def reset(self) -> None:
        """Forget everything, once no copy runs any more."""
        if getattr(self, "holdings", None) is not None:
            self.finish_copies()
            self.give_up_room()
            self.holdings.clear()
            self.stuck.clear()
            self._queued.clear()
            self._ways.clear()
            if self.spans is not None:
                self.spans.cache.clear()
        super().reset()

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """Set up the host pool; prefixes of any length come back from it."""
        super().init_hicache(server_args, params)
        self.load_back_threshold = 1
        config = config_of(server_args)
        if config is not None and config.tier == "remote":
            controller = self.cache_controller
            self.spans = SpanStore(
                lambda: storage_of(self),
                self.page_size,
                namespace_of(config),
                config.span_cache_bytes,
            )
            controller.vericache_spans = self.spans

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """As stock, but for a write policy that cannot work with tiers."""
        if hicache_write_policy == "write_back":
            return False, "hicache_write_policy write_back cannot be combined with --vericache-tier"
        attached: tuple[bool, str] = super().attach_storage_backend(
            storage_backend,
            storage_backend_extra_config_json,
            served_model_name,
            hicache_storage_prefetch_policy,
            hicache_write_policy,
        )
        return attached

    def can_offload(self, req: Req) -> bool:
        """Whether the tree owns a prefix of the request, and the request may enter it."""
        return (
            req.session is None
            and not req.skip_radix_cache_insert
            and req.kv.cache_protected_len > 0
        )

    def publish(self, req: Req) -> None:
        """Insert all committed KV of a request whose prefix is locked on the device.

        Where the tree has the same tokens already the request reads those slots from now on, so
        what may still be on its way to them is waited for.
        """
        req.refresh_fill_ids()
        self.checkpoint(req, up_to=req.kv.kv_committed_len)
        if self.shares_copies(req.last_node):
            self.start_copies()
            self.await_index(self.latest_copy)

    def offload(self, req: Req, slots: Tensor, view: DraftView | None = None) -> bool:
        """Leave the prefix of a request that is on the device to its host copy.

        Args:
            req: a request for which ``can_offload`` holds.
            slots: of its compressed copy, from ``allocate``; freed when the request ends.
            view: what the copy was made from, if entry ``j`` is the j-th listed token of every
                layer and head as it was: copies to the device leave out what it has.

        Returns:
            Whether it is done; if the host pool has no room everything stays as it is, and
            ``slots`` are the caller's.
        """
        if not self._back_up(req.last_node):
            return False
        assert req not in self.holdings
        lock = self.inc_host_lock_ref(req.last_node).to_dec_params()
        parts = None
        if view is not None and self.copies_parts and not self.reads_host:
            parts = Parts(view, req.kv.cache_protected_len, self.page_size)
        self.holdings[req] = Holding(slots, req.last_node, lock, True, parts)
        self.release(req)
        return True

    def demote(self, req: Req) -> None:
        """Have all committed KV of a request that is about to be retracted on the host.

        When it starts again it finds that there instead of computing it.
        """
        owned = req.session is None and not req.skip_radix_cache_insert
        lives = req.output_ids and not req.finished() and req.to_finish is None
        if self.is_offloaded(req) or not owned or not lives:
            return
        if not self.host_has_room(req.kv.kv_committed_len):
            return
        self.publish(req)
        if req.kv.cache_protected_len > 0 and self._back_up(req.last_node):
            self.finish_copies()  # a copy that runs locks what has to go

    def keep(self, req: Req) -> None:
        """Leave the prefix of a staged request on the device: it is offloaded no more."""
        assert not self.is_offloaded(req)
        self._drop(req)

    def release(self, req: Req) -> None:
        """Give up the device slots of an offloaded prefix."""
        self.holdings[req].staged = False
        self.holdings[req].copied_by = -1
        self.made_room = True
        self.unlock(req.lock)
        req.lock = None
        # Its row names no slots of the prefix now, so it can enter the tree only when staged.
        req.skip_radix_cache_insert = True
        self._row(req).zero_()

    def stage(self, req: Req) -> float | None:
        """Bring an offloaded prefix to the device and lock it there.

        The copy is queued; ``ready_to_load_host_cache`` starts it.

        Returns:
            Tokens to be copied, a mean over layers; 0 if all are still on the device; None without
            room for them, or while ``COPIES`` run.
        """
        holding, controller = self.holdings[req], self.cache_controller
        loaded = 0.0
        if self.tree_core.is_full_device_evicted(holding.node):
            if not self.may_start_copy() or not self.load_back(holding.node):
                return None
            loaded = self._leave_out_held(holding)
        share = loaded / req.kv.cache_protected_len
        self.loaded_share += LOADED_RATE * (share - self.loaded_share)
        # Somebody else's copy may be on its way to these slots, or queued; copies arrive in order.
        if loaded or self.shares_copies(holding.node):
            if controller.load_queue:
                self._queued.append(holding)
            else:
                holding.copied_by = self.latest_copy
        req.lock = self.lock(holding.node)
        req.skip_radix_cache_insert = False
        holding.staged = True
        row = self._row(req)
        row.copy_(self.path_device_indices(holding.node)[: row.shape[0]])
        return loaded

    def may_read_host(self, req: Req) -> bool:
        """Whether a verify pass should read the prefix of this request in host memory."""
        if not self.reads_host or not self.is_offloaded(req):
            return False
        # What has left the device is complete on the host.
        evicted = self.tree_core.is_full_device_evicted(self.holdings[req].node)
        return evicted or not self.ongoing_write_through

    def host_buffers(self) -> list[ViewPool]:
        """Keys and values of each layer in host memory, ``[host slots, HKV, D]``."""
        pool = self.cache_controller.mem_pool_host.anchor_entry.host_pool
        return list(map(ViewPool, pool.k_data_refs, pool.v_data_refs))

    def host_slots(self, req: Req) -> Tensor:
        """Where the host copy of an offloaded prefix is, int64 host slots."""
        core = self.tree_core
        (path,) = core.collect_path_info([self.holdings[req].node])
        values = [core.build_storage_backup_spec(node.node_id, False).host_value for node in path]
        return torch.cat(values)[: req.kv.cache_protected_len]

    def staging_reserve(self, newcomer: Req) -> int:
        """Slots to leave when a request starts, so that every offloaded one can be staged later.

        The newcomer may use them for a while if it gives back as many.
        """
        if not self.holdings or self.reads_host:
            return 0
        sizes = [req.kv.cache_protected_len for req in self.holdings]
        largest = max(*sizes, len(newcomer.origin_input_ids))
        return max(0, largest - self.gives_back(newcomer))

    def copy_ahead(self, reqs: Sequence[Req]) -> float:
        """Begin to stage requests that verify in a later iteration, as far as there is room.

        Returns:
            Tokens to be copied.
        """
        controller, total = self.cache_controller, 0.0
        if len(controller.ack_load_queue) + 1 >= controller.layer_done_counter.num_counters:
            return 0  # one is kept for passes that are due
        for req in reqs:
            total += self.stage(req) or 0.0
        self.start_copies()
        return total

    def await_copy(self, req: Req) -> None:
        """Hold the current stream until the copy that brings a request's prefix is complete."""
        holding = self.holdings.get(req)
        if holding is not None and holding.copied_by >= 0:
            self.await_index(holding.copied_by)
            holding.copied_by = -1

    def start_copies(self) -> int:
        """Also tell those whose prefix comes with them."""
        index = super().start_copies()
        if index >= 0:
            for holding in self._queued:
                if holding.staged:
                    holding.copied_by = index
            self._queued.clear()
        return index

    def copy_seconds_left(self, req: Req) -> float:
        """How long the copy that brings a request's prefix should still take."""
        return self.seconds_left(self.holdings[req].copied_by)

    def comes_with(self, req: Req, index: int) -> bool:
        """Whether a request's prefix, or a part of it, is brought by that copy."""
        return 0 <= index == self.holdings[req].copied_by

    def missing(self, reqs: Sequence[Req]) -> int:
        """Slots that the smallest stuck one of ``reqs`` lacks; 0 if none is."""
        sizes = [r.kv.cache_protected_len for r in reqs if r in self.stuck and self.is_offloaded(r)]
        return min(sizes, default=0)

    def host_has_room(self, tokens: int) -> bool:
        """Whether the host pool takes as many tokens without evicting anything."""
        return bool(self.cache_controller.mem_pool_host.available_size() >= tokens)

    def is_offloaded(self, req: Req) -> bool:
        """Whether the request's full KV may be missing on the device."""
        holding = self.holdings.get(req)
        return holding is not None and not holding.staged

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """Also free what an ended or retracted request held."""
        super().on_release(req, checkpointed=checkpointed)
        self.stuck.discard(req)
        if self._drop(req):
            req.skip_radix_cache_insert = False

    def protected_size(self) -> int:
        """Slots that cannot be evicted: locked nodes and compressed copies."""
        return int(super().protected_size()) + self.compressed_size()

    def compressed_size(self) -> int:
        """Slots of compressed copies and of drafts made before full KV arrived."""
        held = sum(len(holding.slots) for holding in self.holdings.values())
        return held + sum(len(slots) for slots in self.lent.values())

    def usage(self) -> dict[str, int]:
        """What is where now, in tokens of full KV (a compressed copy of n slots counts n).

        ``device``: all slots, of which ``device_free`` hold nothing, ``device_evictable`` a cached
        prefix nobody reads, ``compressed`` copies; the others are read by requests. ``host``: all
        slots of the host pool, of which ``host_free`` hold nothing. ``offloaded`` requests have
        their full KV on the host, ``staged`` ones have it on the device for a pass.
        ``span_cache_bytes`` of compressed copies from a store are in host memory too, where
        ``span_cache_hits`` spans have been found.
        """
        allocator, host = self.token_to_kv_pool_allocator, self.cache_controller.mem_pool_host
        cached = self.spans.cache if self.spans else None
        return {
            "device": allocator.size,
            "device_free": allocator.available_size(),
            "device_evictable": self.evictable_size(),
            "compressed": self.compressed_size(),
            "host": host.logical_size,
            "host_free": host.available_size(),
            "offloaded": sum(not held.staged for held in self.holdings.values()),
            "staged": sum(held.staged for held in self.holdings.values()),
            "span_cache_bytes": cached.used if cached else 0,
            "span_cache_hits": cached.hits if cached else 0,
        }

    def _leave_out_held(self, holding: Holding) -> float:
        """Have the copy that was queued last leave out what is in a compressed copy.

        Returns:
            Tokens that are left, a mean over layers.
        """
        operation, parts = self.cache_controller.load_queue[-1], holding.parts
        host, target = operation.host_indices, operation.device_indices
        if parts is None:
            return float(len(target))
        copy_held(self.token_to_kv_pool_allocator.get_kvcache(), parts.held(holding.slots, target))
        lacking = parts.lacking(host, target)
        self.leave_out(lacking)
        return sum(len(way.source) for way in lacking) / len(lacking)

    def _row(self, req: Req) -> Tensor:
        table = self.req_to_token_pool.req_to_token
        row: Tensor = table[req.kv.req_pool_idx, : req.kv.cache_protected_len]
        return row

    def _back_up(self, node: int) -> bool:
        """Copy a node and its ancestors to the host, unless they are there; False without room."""
        (path,) = self.tree_core.collect_path_info([node])

        def there() -> bool:
            return all(self.is_backuped(each.node_id) for each in path)

        if not there():
            self._execute_and_commit_kv_backup(self.tree_core.build_backup_kv_action(node))
            self.flush_pending_backups()
        return there()

    def _drop(self, req: Req) -> bool:
        holding = self.holdings.pop(req, None)
        if holding is None:
            return False
        self.dec_host_lock_ref(holding.node, holding.host_lock)
        self.token_to_kv_pool_allocator.free(holding.slots)
        return True


def build(ctx: TreeCacheBuildContext) -> Any:
    """Factory for ``--radix-cache-backend vericache``."""
    return create_unified_radix_cache(ctx, cache_class=TieredCache)


def register() -> None:
    if get_radix_cache_factory(NAME) is None:
        register_radix_cache_backend(NAME, build)

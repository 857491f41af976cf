"""Where SGLang's storage (HiCache L3) gets ``SafeStorage``; inert on a server without VeriCache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_server_args

from sglang_vericache.config import config_of
from sglang_vericache.hooks import Hook
from sglang_vericache.mem_cache import storage_identity
from sglang_vericache.mem_cache.storage import SafeStorage
from sglang_vericache.mem_cache.storage_guard import Options
from sglang_vericache.mem_cache.storage_stores import STORES

KEY = "vericache"
# On a prefix cache: weights were updated since it was flushed.
OLD_KV = "_vericache_old_kv"
CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


# Whether this process runs other weights than those of its checkpoint.
_updated = False


def storage_of(tree_cache: Any) -> SafeStorage | None:
    """The store that a prefix cache backs up to, if it is ours."""
    backend = getattr(getattr(tree_cache, "cache_controller", None), "storage_backend", None)
    # SGLang's fault injector wraps it.
    backend = getattr(backend, "_backend", backend)
    return backend if isinstance(backend, SafeStorage) else None


def keep_layout(original: Any, server_args: Any) -> None:
    """``resolve_storage_layout_compatibility`` around: any layout will do."""
    if config_of(server_args) is None:
        original(server_args)


def create(
    original: Any,
    cls: type,
    backend_name: str,
    storage_config: Any,
    mem_pool_host: Any,
    **rest: Any,
) -> Any:
    """``StorageBackendFactory._do_create_backend`` around: put ``SafeStorage`` before the backend.

    Raises:
        ValueError: a backend that VeriCache has not been tried with, or a bad ``KEY``.
    """
    server_args = get_server_args()
    if config_of(server_args) is None:
        return original(cls, backend_name, storage_config, mem_pool_host, **rest)
    if backend_name not in STORES:
        raise ValueError(
            f"--hicache-storage-backend {backend_name}: VeriCache supports {', '.join(STORES)}"
        )
    extra = dict(storage_config.extra_config or {})
    options = Options.parse(extra.pop(KEY, {}))
    identity = storage_identity.digest(server_args, storage_config, mem_pool_host)
    # For people who look into the store; objects carry the identity.
    label = Path(str(storage_config.model_name or "")).name[:64]
    inner = dataclasses.replace(storage_config, extra_config=extra, model_name=label)
    backend = original(cls, backend_name, inner, mem_pool_host, **rest)
    storage = SafeStorage(STORES[backend_name](backend), identity, mem_pool_host, options)
    if _updated:
        storage.renew_identity()
    return storage


def attached(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """``HybridCacheController.attach_storage_backend`` after: let the storage copy pages itself."""
    if config_of(get_server_args()) is not None:
        self.page_get_func = self._page_get_zero_copy
        self.page_set_func = self._page_set_zero_copy


def stop_threads(original: Any, self: Any) -> None:
    """``HybridCacheController._stop_storage_threads`` around: end calls that they wait for."""
    backend = getattr(self.storage_backend, "_backend", self.storage_backend)
    if not isinstance(backend, SafeStorage):
        original(self)
        return
    with backend.interrupted():
        original(self)


def weights_updated(result: Any, self: Any, recv_req: Any) -> None:
    """``update_weights_from_*`` after, failed or not: stored KV is not that of these weights.

    KV of the old weights that is cached still may be stored under the new identity too, which
    therefore ends when the cache is flushed.
    """
    global _updated
    _updated = True
    setattr(self.scheduler.tree_cache, OLD_KV, True)
    storage = storage_of(self.scheduler.tree_cache)
    if storage is not None:
        storage.renew_identity()


def flushed(result: None, self: Any) -> None:
    """``UnifiedRadixCache.reset`` after: from now on only KV of the present weights is stored."""
    storage = storage_of(self)
    if getattr(self, OLD_KV, False) and storage is not None:
        setattr(self, OLD_KV, False)
        storage.renew_identity()


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.reset",
        ("self",),
        "after",
        flushed,
        "stores KV of old weights until it is flushed",
    ),
    Hook(
        "sglang.srt.arg_groups.hicache_hook.resolve_storage_layout_compatibility",
        ("server_args",),
        "around",
        keep_layout,
        "lays host memory out as Mooncake reads it, which cannot be copied on a CPU",
    ),
    Hook(
        "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory._do_create_backend",
        ("backend_name", "storage_config", "mem_pool_host", "kwargs"),
        "around",
        create,
        "backends do not check what they read, and name it by model path and token hash alone",
    ),
    Hook(
        f"{CONTROLLER}.attach_storage_backend",
        (
            *("self", "storage_backend", "prefetch_threshold", "model_name"),
            *("storage_backend_extra_config", "host_pools"),
        ),
        "after",
        attached,
        "some backends get copies of pages, in memory that is pinned for CUDA",
    ),
    Hook(
        f"{CONTROLLER}._stop_storage_threads",
        ("self",),
        "around",
        stop_threads,
        "flushing the cache ends the server when a store takes more than ten seconds",
    ),
    *(
        Hook(
            f"{UPDATER}.update_weights_from_{source}",
            ("self", "recv_req"),
            "after",
            weights_updated,
            "KV of other weights stays in the store under the same names",
        )
        for source in ("disk", "distributed", "tensor", "ipc")
    ),
)

"""SGLang settings that a VeriCache server runs with."""

from __future__ import annotations

import logging
from typing import Any

from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.platform import shims

logger = logging.getLogger(__name__)

# The lists of draft views are allocated for that many; stock takes 2,048 or more.
MAX_RUNNING_REQUESTS = 64
# On a CPU the stock default takes a share of all memory for the KV pool.
CPU_MAX_TOTAL_TOKENS = 98_304
CPU_CHUNKED_PREFILL = 2048


def apply(server_args: Any, config: VeriCacheConfig) -> None:
    """Fill in fields of the record that the user left open, and those VeriCache decides.

    Raises:
        ValueError: a flag asks for what VeriCache does not support.
    """
    from sglang_vericache.attention.backend import NAME
    from sglang_vericache.speculative import algorithm

    algorithm.refuse_unsupported(server_args)
    for flag in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        if getattr(server_args, flag) not in (None, NAME):
            name = flag.replace("_", "-")
            raise ValueError(f"--{name}: VeriCache needs its own attention backend, {NAME}")
    decided = {"attention_backend": NAME, "disable_overlap_schedule": True}
    if config.enabled:
        decided |= algorithm.server_arguments(config)
    for field, value in decided.items():
        setattr(server_args, field, value)
    if config.offloads:
        use_host_tier(server_args, config.tier)
        if config.staging == "in-place" and not shims.needed():
            raise ValueError("--vericache-staging in-place: only a CPU reads host memory in place")
    if shims.needed() and server_args.enable_hierarchical_cache:
        server_args.hicache_io_backend = "direct"
        server_args.hicache_mem_layout = "layer_first"
    open_fields: dict[str, Any] = {"max_running_requests": MAX_RUNNING_REQUESTS}
    if shims.needed():
        if server_args.enable_deterministic_inference:
            raise ValueError(
                "--enable-deterministic-inference needs an accelerator; on a CPU the results of "
                "VeriCache never depend on the batch, so leave it out"
            )
        open_fields |= {
            "device": "cpu",
            "max_total_tokens": CPU_MAX_TOTAL_TOKENS,
            "chunked_prefill_size": CPU_CHUNKED_PREFILL,
        }
        # Polling while idle would take a core from the model's other processes.
        server_args.sleep_on_idle = True
    else:
        server_args.disable_cuda_graph = True
    for field, value in open_fields.items():
        if getattr(server_args, field) is None:
            setattr(server_args, field, value)


def use_host_tier(server_args: Any, tier: str) -> None:
    """Fields of SGLang's HiCache, which keeps full KV in host memory and remote stores.

    Raises:
        ValueError: a flag contradicts ``--vericache-tier``.
    """
    from sglang_vericache.mem_cache.tiered import NAME

    wrong = {
        "--disable-radix-cache": server_args.disable_radix_cache,
        f"--radix-cache-backend {server_args.radix_cache_backend}": server_args.radix_cache_backend
        not in (None, NAME),
        # Every rank would measure its own link.
        "--tp-size above 1": (server_args.tp_size or 1) > 1,
        # The tree would hold less of a request than its compressed copy stands for.
        "--strip-thinking-cache": server_args.strip_thinking_cache,
        "--hicache-host-memory-mode buffer_only": server_args.hicache_host_memory_mode
        == "buffer_only",
        # It frees host copies of what is on the device too, which a verify pass may be reading.
        "--hicache-write-policy write_back": server_args.hicache_write_policy == "write_back",
        "--enable-lmcache": server_args.enable_lmcache,
        "--enable-flexkv": server_args.enable_flexkv,
        # It would start before its prefix is there, and compute what is on its way.
        "--hicache-storage-prefetch-policy best_effort": tier == "remote"
        and server_args.hicache_storage_prefetch_policy == "best_effort",
    }
    for flag, given in wrong.items():
        if given:
            raise ValueError(f"--vericache-tier {tier} cannot be combined with {flag}")
    server_args.radix_cache_backend = NAME
    server_args.enable_hierarchical_cache = True
    if tier == "remote":
        server_args.hicache_storage_backend = server_args.hicache_storage_backend or "file"
        # A request that drafts meanwhile loses nothing by waiting for all of its prefix.
        server_args.hicache_storage_prefetch_policy = "wait_complete"

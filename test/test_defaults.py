"""Flags that contradict each other are refused by name, before anything starts."""

from types import SimpleNamespace

import pytest

from sglang_vericache import defaults
from sglang_vericache.config import VeriCacheConfig, attach, from_options

PLAIN = {
    **{"disable_radix_cache": False, "radix_cache_backend": None, "tp_size": 1},
    **{"strip_thinking_cache": False, "hicache_host_memory_mode": "cache"},
    **{"enable_lmcache": False, "enable_flexkv": False, "enable_hierarchical_cache": False},
    **{"hicache_write_policy": "write_through", "hicache_storage_backend": None},
    **{"hicache_storage_prefetch_policy": "timeout"},
}


def test_a_tier_turns_the_host_pool_and_our_tree_on():
    record = SimpleNamespace(**PLAIN)
    defaults.use_host_tier(record, "host")
    assert record.enable_hierarchical_cache and record.radix_cache_backend == "vericache"
    assert record.hicache_storage_backend is None


@pytest.mark.parametrize("backend", [None, "mooncake"])
def test_the_remote_tier_turns_a_store_on(backend):
    record = SimpleNamespace(**PLAIN | {"hicache_storage_backend": backend})
    defaults.use_host_tier(record, "remote")
    assert record.hicache_storage_backend == (backend or "file")
    assert record.hicache_storage_prefetch_policy == "wait_complete"


def test_the_remote_tier_waits_for_all_of_a_prefix():
    record = SimpleNamespace(**PLAIN | {"hicache_storage_prefetch_policy": "best_effort"})
    with pytest.raises(ValueError, match="--hicache-storage-prefetch-policy best_effort"):
        defaults.use_host_tier(record, "remote")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("disable_radix_cache", True, "--disable-radix-cache"),
        ("radix_cache_backend", "other", "--radix-cache-backend other"),
        ("tp_size", 2, "--tp-size"),
        ("strip_thinking_cache", True, "--strip-thinking-cache"),
        ("hicache_host_memory_mode", "buffer_only", "buffer_only"),
        ("enable_lmcache", True, "--enable-lmcache"),
        ("hicache_write_policy", "write_back", "--hicache-write-policy write_back"),
        ("enable_flexkv", True, "--enable-flexkv"),
    ],
)
def test_what_a_tier_cannot_work_with(field, value, words):
    record = SimpleNamespace(**PLAIN | {field: value})
    with pytest.raises(ValueError, match="--vericache-tier") as refused:
        defaults.use_host_tier(record, "auto")
    assert words in str(refused.value)
    assert record.enable_hierarchical_cache is False


def test_an_unknown_tier_lists_the_known_ones():
    with pytest.raises(ValueError, match="supported: resident, host, auto, remote"):
        from_options({"vericache_tier": "disk"})


def test_a_tier_without_drafts_is_refused():
    with pytest.raises(ValueError, match="--vericache-tier host does nothing with --vericache off"):
        VeriCacheConfig(mode="off", tier="host")
    assert not VeriCacheConfig(mode="off").offloads
    assert VeriCacheConfig(tier="auto").offloads


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("is_embedding", True, "--is-embedding"),
        ("attn_dp_size", 2, "--attn-dp-size above 1"),
        ("attn_cp_size", 2, "--attn-cp-size above 1"),
        ("dcp_size", 2, "--dcp-size above 1"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("enable_torch_compile", True, "--enable-torch-compile"),
        ("cuda_graph_backend_decode", "full", "--cuda-graph-backend-decode"),
        ("cuda_graph_backend_prefill", "breakable", "--cuda-graph-backend-prefill"),
        ("cuda_graph_config", {"decode": {"backend": "full"}}, "--cuda-graph-config"),
    ],
)
@pytest.mark.parametrize("mode", ["on", "off"])
def test_what_no_pass_of_ours_has_run_with(field, value, flag, mode):
    from sglang.srt.server_args import ServerArgs

    from sglang_vericache.speculative.algorithm import refuse_unsupported

    record = ServerArgs(model_path="m")
    refuse_unsupported(record)
    attach(record, VeriCacheConfig(mode=mode))
    refuse_unsupported(record)
    record.cuda_graph_backend_decode = "disabled"
    refuse_unsupported(record)
    setattr(record, field, value)
    with pytest.raises(ValueError, match=f"does not support .*{flag}"):
        refuse_unsupported(record)

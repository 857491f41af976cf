"""What ``custom_params.vericache`` of a request may hold."""

import pytest

from sglang_vericache.config import VeriCacheConfig, from_options
from sglang_vericache.entrypoints.admission import OPTIONS, check_options

SERVER = VeriCacheConfig(ratio=0.25, draft_len=8, settings={"window": 16})
LOSSY = VeriCacheConfig(allow_unverified=True)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"enabled": False},
        {"enabled": True, "unverified": False},
        {"draft_len": 0},
        {"compressor": "random-kv"},
        {"compressor": "snapkv+int4", "ratio": 0.1},
        {"compressor": "snapkv-per-head+adakv+pyramidkv+int4"},
        {"draft_len": 8, "ratio": 0.25, "window": 16, "sinks": 0},
    ],
)
def test_accepted(asked):
    check_options(asked, SERVER)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"enabeld": False}, ["enabeld", *OPTIONS]),
        ({"seed": 1}, ["seed", "ratio"]),
        ({"enabled": "no"}, ["enabled", "true or false", "'no'"]),
        ({"enabled": 0}, ["enabled", "0"]),
        ({"unverified": True}, ["unverified", "--vericache-allow-unverified"]),
        ({"draft_len": 9}, ["draft_len", "0..8", "9"]),
        ({"draft_len": -1}, ["draft_len", "-1"]),
        ({"draft_len": True}, ["draft_len", "True"]),
        ({"draft_len": 2.0}, ["draft_len", "2.0"]),
        ({"draft_len": None}, ["draft_len", "None"]),
        ({"ratio": 0.5}, ["ratio", "0.25", "0.5"]),
        ({"ratio": 0}, ["ratio", "0"]),
        ({"ratio": -0.1}, ["ratio", "-0.1"]),
        ({"ratio": "0.1"}, ["ratio", "0.1"]),
        ({"ratio": float("nan")}, ["ratio", "nan"]),
        ({"ratio": True}, ["ratio", "True"]),
        ({"window": 32}, ["window", "16", "32"]),
        ({"window": 0}, ["window", "0"]),
        ({"kernel": 4}, ["kernel", "odd"]),
        ({"compressor": "zip"}, ["compressor", "'zip'", "snapkv", "streaming"]),
        ({"compressor": "snapkv+int3"}, ["compressor", "'snapkv+int3'", "+int4"]),
        ({"compressor": "snapkv+adakv"}, ["'snapkv+adakv'", "+adakv where every KV head"]),
        ({"compressor": "compresskv"}, ["'compresskv'", "vericache calibrate --model-path"]),
        ({"compressor": "kvpress:KnormPress"}, ["--vericache-compressor kvpress:PRESS"]),
        ({"compressor": "kvpress"}, ["--vericache-compressor kvpress:PRESS"]),
        ({"compressor": "kvpress+int4"}, ["--vericache-compressor kvpress:PRESS"]),
        ({"compressor": 3}, ["compressor", "3", "snapkv"]),
        ({"compressor": ["snapkv"]}, ["compressor", "supported"]),
        ([], ["object", "[]"]),
        (False, ["object", "False"]),
    ],
)
def test_refused_with_reason(asked, words):
    with pytest.raises(ValueError) as error:
        check_options(asked, SERVER)
    for word in ("custom_params.vericache", *words):
        assert word in str(error.value)


def test_unverified_needs_the_flag_and_drafts():
    check_options({"unverified": True}, LOSSY)
    with pytest.raises(ValueError, match="enabled"):
        check_options({"unverified": True, "enabled": False}, LOSSY)


def test_checked_alike_when_off():
    off = VeriCacheConfig(mode="off", draft_len=8)
    check_options({"draft_len": 8}, off)
    with pytest.raises(ValueError, match="draft_len"):
        check_options({"draft_len": 9}, off)


@pytest.mark.parametrize("given", [-1.0, float("nan"), float("inf")])
def test_the_span_cache_has_a_size(given):
    assert VeriCacheConfig(span_cache_gb=0.5).span_cache_bytes == 1 << 29
    with pytest.raises(ValueError, match="--vericache-span-cache-gb"):
        VeriCacheConfig(span_cache_gb=given)


def test_a_packed_pool_has_slots():
    assert VeriCacheConfig(packed_tokens=1).packed_tokens == 1
    with pytest.raises(ValueError, match=r"--vericache-packed-tokens.* 0"):
        VeriCacheConfig(packed_tokens=0)


def test_copies_that_cannot_be_read_in_parts_are_for_no_store():
    assert VeriCacheConfig(compressor="kivi2", tier="host").compressor == "kivi2"
    assert VeriCacheConfig(compressor="turbo2", tier="remote").compressor == "turbo2"
    for name in ("kivi2", "snapkv+kivi4"):
        with pytest.raises(ValueError, match=r"--vericache-compressor: copies of .*remote"):
            VeriCacheConfig(compressor=name, tier="remote")


@pytest.mark.parametrize("given", [0, 65, -3, "foo", "3.5", 3.5, True, []])
def test_a_bad_draft_length_is_blamed_on_its_flag(given):
    assert from_options({"vericache_draft_len": "8"}).draft_len == 8
    assert from_options({"vericache_draft_len": "auto"}).draft_len is None
    with pytest.raises(ValueError, match="--vericache-draft-len must be auto or") as error:
        from_options({"vericache_draft_len": given})
    assert str(given) in str(error.value) and "max-draft-len" not in str(error.value)


@pytest.mark.parametrize("given", [0, 65])
def test_a_bad_upper_limit_is_blamed_on_its_flag(given):
    with pytest.raises(
        ValueError, match=f"--vericache-max-draft-len must be in 1..64, not {given}"
    ):
        from_options({"vericache_max_draft_len": given})


@pytest.mark.parametrize("settings", [{"window": 0}, {"kernel": 4}, {"sinks": "x"}, {"recent": 2}])
def test_a_bad_setting_is_blamed_on_its_flag(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"--vericache-settings: {name} must be"):
        VeriCacheConfig(settings=settings)
    with pytest.raises(ValueError, match="--vericache-ratio: ratio must be"):
        VeriCacheConfig(ratio=2)
    with pytest.raises(ValueError, match="--vericache-compressor: unknown"):
        VeriCacheConfig(compressor="zip", settings=settings)

"""The servers of the exactness tests: few, and each unlike the others in several ways."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from server.harness import ServerSpec

MAX_DRAFT_LEN = 32
RATIO = 0.1
WINDOW = 16
MIN_TOKENS = 4
# Small limits, so that views drop tokens of short contexts too.
VIEWS = (
    *("--vericache-compressor", "snapkv", "--vericache-ratio", str(RATIO)),
    *("--vericache-settings", json.dumps({"window": WINDOW, "min_tokens": MIN_TOKENS})),
)
FIXED = (*VIEWS, "--vericache-draft-len", str(MAX_DRAFT_LEN), "--vericache-refresh", "1")
AUTO = (*VIEWS, "--vericache-draft-len", "auto", "--vericache-min-context", "64")
FP32 = ("--dtype", "float32")

# With a fixed draft length (every shorter one and every compressor by request), by dtype.
DRAFTING = {
    "bfloat16": ServerSpec((*FIXED, "--vericache-allow-unverified")),
    "float32": ServerSpec((*FIXED, *FP32, "--page-size", "16", "--chunked-prefill-size", "512")),
}
# With adaptive draft lengths.
ADAPTIVE = {
    "bfloat16": ServerSpec((*AUTO, "--page-size", "16", "--chunked-prefill-size", "128")),
    "float32": ServerSpec((*AUTO, *FP32)),
}
# The reference: page size 1, the default chunk size.
OFF = {
    "bfloat16": ServerSpec(("--vericache", "off")),
    "float32": ServerSpec(("--vericache", "off", *FP32)),
}
PAGE_SIZES = {
    1: DRAFTING["bfloat16"],
    16: ADAPTIVE["bfloat16"],
    64: ServerSpec((*FIXED, "--page-size", "64")),
}
# A pool smaller than one long request.
POOL_TOKENS = 512
CROWDED = ServerSpec((*FIXED, "--max-total-tokens", str(POOL_TOKENS)))
# Somebody is retracted every 25 passes (SGLang's fault injector), besides when the pool is full.
RETRACTING = ServerSpec(
    (*FIXED, "--max-total-tokens", "1024"),
    env=(("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "25")),
)
# Full KV on the host between verify passes. The device holds the contexts of two or three requests,
# the host those of many.
TIER_TOKENS = 1536
_TIER = (*FIXED, "--max-total-tokens", str(TIER_TOKENS), "--hicache-ratio", "12")
# A pass copies full KV to the device, as on a GPU, or reads it in host memory (the CPU's default).
COPIES = ("--vericache-staging", "copy")
TIERED = {
    "bfloat16": ServerSpec(
        (*_TIER, *COPIES, "--vericache-tier", "host", "--tool-call-parser", "qwen25")
    ),
    # Its packed pools hold the copies of two requests of 420 tokens.
    "float32": ServerSpec(
        (*_TIER, "--vericache-tier", "host", *FP32, "--page-size", "16")
        + ("--vericache-packed-tokens", "960")
    ),
}
# Only under pressure.
TIERED_AUTO = ServerSpec((*_TIER, "--vericache-tier", "auto"))
# A host pool of little more than one prompt, in large pages.
TIERED_TIGHT = ServerSpec(
    (
        *(*FIXED, "--max-total-tokens", str(TIER_TOKENS), "--hicache-ratio", "0.32"),
        *("--vericache-tier", "host", "--page-size", "64"),
    )
)
# Copies that start up to 5 ms late, layer by layer.
SABOTEUR_PATH = str(Path(__file__).parent / "saboteur")
TIERED_LATE = ServerSpec(
    (*_TIER, *COPIES, "--vericache-tier", "host", *FP32),
    env=(("PYTHONPATH", SABOTEUR_PATH), ("SABOTEUR_COPY_DELAY", "0.005")),
)
# A store of files at the end of a slow link, so that there is time to draft meanwhile.
STORE_PAGE = 16
STORE_DIRECTORY = str(Path(tempfile.gettempdir()) / f"vericache-store-{os.getpid()}")
_LINK = json.dumps({"vericache": {"link_gb_per_s": 0.05}})
_STORE = (
    *("--vericache-tier", "remote", "--page-size", str(STORE_PAGE), "--hicache-ratio", "2"),
    *("--hicache-write-policy", "write_through", "--hicache-storage-backend", "file"),
    *("--hicache-storage-backend-extra-config", _LINK, "--admin-api-key", "test"),
)
_STORE_ENV = (("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", STORE_DIRECTORY),)
REMOTE = ServerSpec((*FIXED, *_STORE, "--max-total-tokens", "4096"), env=_STORE_ENV)
# The same with a compressed copy of all tokens, which are more than may be lent of the KV pool.
REMOTE_PACKED = ServerSpec(
    (*FIXED, *_STORE, "--vericache-compressor", "int4", "--max-total-tokens", "2048"),
    env=_STORE_ENV,
)
# As RETRACTING, with full KV on the host.
TIERED_RETRACTING = ServerSpec(
    (
        *(*FIXED, "--max-total-tokens", "1024", "--hicache-ratio", "12"),
        *(*COPIES, "--vericache-tier", "host", "--page-size", "16"),
    ),
    env=RETRACTING.env,
)


def _auto(*flags: str) -> ServerSpec:
    return ServerSpec((*_TIER, "--vericache-tier", "auto", *flags))


def _remote(*flags: str) -> ServerSpec:
    return ServerSpec((*FIXED, *_STORE, *_TIER, *flags), env=_STORE_ENV)


# Every tier that moves KV, with every dtype and page size; some copy, some read in place.
TIERS = {
    ("host", "bfloat16", 1): TIERED["bfloat16"],
    ("host", "bfloat16", 16): TIERED_RETRACTING,
    ("host", "float32", 1): TIERED_LATE,
    ("host", "float32", 16): TIERED["float32"],
    ("auto", "bfloat16", 1): TIERED_AUTO,
    ("auto", "bfloat16", 16): _auto("--page-size", "16", *COPIES),
    ("auto", "float32", 1): _auto(*FP32),
    ("auto", "float32", 16): _auto("--page-size", "16", *FP32, *COPIES),
    ("remote", "bfloat16", 1): _remote("--page-size", "1", *COPIES),
    ("remote", "bfloat16", 16): REMOTE,
    ("remote", "float32", 1): _remote("--page-size", "1", *FP32),
    ("remote", "float32", 16): _remote(*FP32, *COPIES),
}
# Stock SGLang on this CPU.
STOCK = ServerSpec(
    ("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", *FP32),
    stock=True,
)
COMPRESSORS = ("identity", "streaming", "snapkv", "snapkv-per-head", "random-kv")

"""The servers that ``decode.py`` compares: how each is started and spoken to."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The same limits for every server; VeriCache's are its defaults on a CPU.
KV_TOKENS = 98_304
RUNNING_REQUESTS = 64
CHUNKED_PREFILL = 2048


@dataclass(frozen=True)
class Engine:
    """One server under test.

    Attributes:
        name: column of the result table.
        command: command line without host and port.
        api: ``sglang`` (native ``/generate``) or ``openai`` (``/v1/completions``).
        env: added to the environment.
    """

    name: str
    command: tuple[str, ...]
    api: str = "sglang"
    env: Mapping[str, str] = field(default_factory=dict)


def stock(model: Path, dtype: str) -> Engine:
    """Stock SGLang with its own attention backend for CPUs without AMX."""
    backend = ("--attention-backend", "torch_native", "--disable-overlap-schedule")
    return Engine(
        "stock",
        (sys.executable, "-m", "sglang.launch_server", *_common(model, dtype), *backend),
    )


def vericache(mode: str, model: Path, dtype: str, flags: tuple[str, ...] = ()) -> Engine:
    """This project's server; ``mode`` is ``on`` or ``off``, ``flags`` further ones."""
    return Engine(
        mode,
        (
            *(sys.executable, "-m", "sglang_vericache.launch_server"),
            *_common(model, dtype),
            *("--vericache", mode),
            *flags,
        ),
    )


def vllm_cpu(python: Path, model: Path, dtype: str) -> Engine:
    """vLLM's CPU backend (0.32) from the environment of ``python``, on all cores."""
    cores = sorted(os.sched_getaffinity(0))
    return Engine(
        "vllm",
        (
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--dtype", dtype, "--max-model-len", "8192"),
            *("--max-num-seqs", str(RUNNING_REQUESTS)),
            *("--max-num-batched-tokens", str(CHUNKED_PREFILL)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        ),
        api="openai",
        env={
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; 98,304 tokens of the default model take 2.1
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def _common(model: Path, dtype: str) -> tuple[str, ...]:
    return (
        *("--model-path", str(model), "--dtype", dtype, "--device", "cpu"),
        *("--max-total-tokens", str(KV_TOKENS)),
        *("--max-running-requests", str(RUNNING_REQUESTS)),
        *("--chunked-prefill-size", str(CHUNKED_PREFILL)),
        "--sleep-on-idle",
    )

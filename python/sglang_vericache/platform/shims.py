"""The list of shims for a CPU without AMX, each with its reason and state.

Everything here works around stock SGLang, none of it is needed on CUDA. ``apply_all`` runs in every
process when the plugin registers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from sglang_vericache.platform.bootstrap import needed


@dataclass(frozen=True)
class Shim:
    """One workaround: ``apply`` puts it in place, ``applied`` tells whether it is."""

    name: str
    why: str
    applied: Callable[[], bool]
    apply: Callable[[], None] = lambda: None


def _standin_loaded() -> bool:
    module = sys.modules.get("sgl_kernel")
    return module is None or str(module.__file__).endswith("standin_sgl_kernel.py")


def _dynamo_disabled() -> bool:
    import torch._dynamo.config

    return bool(torch._dynamo.config.disable)


def _disable_dynamo() -> None:
    import torch._dynamo.config

    torch._dynamo.config.disable = True


# Read once by libraries when a process loads them, so the launcher sets them for the processes it
# spawns: huge pages for the KV pool (its reads are bound by address translation without), OpenMP
# threads that sleep between torch's loops instead of spinning on the cores the kernels use, and
# passes that read their inputs in place instead of from a copy for CUDA graphs.
ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_WAIT_POLICY": "passive",
    "SGLANG_EAGER_INPUT_NO_COPY": "1",
}


def _environment_set() -> bool:
    return all(name in os.environ for name in ENVIRONMENT)


def _set_environment() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _host_tier_ready() -> bool:
    from sglang_vericache.platform import hicache

    return hicache.installed()


def _prepare_host_tier() -> None:
    from sglang_vericache.platform import hicache

    hicache.install()


SHIMS = (
    Shim(
        "cpu engine",
        "the model build takes the vLLM path without SGLANG_USE_CPU_ENGINE=1",
        lambda: os.environ.get("SGLANG_USE_CPU_ENGINE") == "1",
        lambda: os.environ.update(SGLANG_USE_CPU_ENGINE="1"),
    ),
    Shim(
        "sgl_kernel stand-in",
        "the sgl_kernel wheel needs libcuda.so.1 to be imported",
        _standin_loaded,
    ),
    Shim(
        "process environment",
        "defaults of torch, OpenMP and SGLang suit machines with a GPU",
        _environment_set,
        _set_environment,
    ),
    Shim(
        "host tier",
        "HiCache registers memory with CUDA and copies with its kernels and streams",
        _host_tier_ready,
        _prepare_host_tier,
    ),
    Shim(
        "eager sampling helpers",
        "torch.compile around two small sampling functions costs a compiler run at first use",
        _dynamo_disabled,
        _disable_dynamo,
    ),
)


def apply_all() -> None:
    """Apply every shim once; does nothing where an NVIDIA driver is present."""
    if not needed():
        return
    for shim in SHIMS:
        if not shim.applied():
            shim.apply()


def report() -> dict[str, str]:
    """State of each shim: ``applied``, ``missing`` or ``not needed``."""
    if not needed():
        return {shim.name: "not needed" for shim in SHIMS}
    return {shim.name: "applied" if shim.applied() else "missing" for shim in SHIMS}

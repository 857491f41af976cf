"""Chooses the CPU extension module for this machine, once a process.

The build makes one module per instruction set from the same sources; this file picks the best one
that was built and that the CPU runs. Environment:

- ``SGL_KERNEL_EXT_ISA=generic|avx2|avx512|avx512_bf16`` forces one of them;
- ``SGL_KERNEL_EXT_FORCE=reference`` runs the torch references instead of any kernel.
"""

import importlib
import importlib.util
import logging
import os
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

_V3_FLAGS = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4_FLAGS = _V3_FLAGS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

# Instruction set -> /proc/cpuinfo flags its compiler options assume (setup.py), best first.
ISA_CPU_FLAGS: dict[str, frozenset[str]] = {
    "avx512_bf16": _V4_FLAGS | {"avx512_bf16", "avx512_vnni"},
    "avx512": _V4_FLAGS,
    "avx2": _V3_FLAGS,
    "generic": frozenset(),
}


def force_reference() -> bool:
    """Whether ``SGL_KERNEL_EXT_FORCE`` asks for the torch references.

    Raises:
        ValueError: the variable is set to anything but ``reference``.
    """
    value = os.environ.get("SGL_KERNEL_EXT_FORCE", "")
    if value not in ("", "reference"):
        raise ValueError(f"SGL_KERNEL_EXT_FORCE={value!r}: the only supported value is 'reference'")
    return value == "reference"


@lru_cache(maxsize=1)
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def supported_isas() -> list[str]:
    """Instruction sets this CPU runs, best first; ``generic`` is always the last."""
    return [isa for isa, needed in ISA_CPU_FLAGS.items() if needed <= _cpu_flags()]


def _is_built(isa: str) -> bool:
    return importlib.util.find_spec(f"{__package__}._C_{isa}") is not None


def load_isa(isa: str) -> ModuleType:
    """The module built for ``isa``.

    Raises:
        ValueError: not a known instruction set, or this CPU does not run it.
        ImportError: not built, or built against another torch.
    """
    if isa not in ISA_CPU_FLAGS:
        raise ValueError(
            f"SGL_KERNEL_EXT_ISA={isa!r}: supported values are {', '.join(ISA_CPU_FLAGS)}"
        )
    if isa not in supported_isas():
        missing = ", ".join(sorted(ISA_CPU_FLAGS[isa] - _cpu_flags()))
        raise ValueError(
            f"SGL_KERNEL_EXT_ISA={isa!r}: this CPU lacks {missing}; "
            f"it runs {', '.join(supported_isas())}"
        )
    return importlib.import_module(f"{__package__}._C_{isa}")


@lru_cache(maxsize=1)
def cpu_module() -> ModuleType | None:
    """The extension module in use, or None where the torch references are.

    None when ``SGL_KERNEL_EXT_FORCE=reference`` is set, and, after one warning, when no module was
    built or none loads.

    Raises:
        ValueError, ImportError: ``SGL_KERNEL_EXT_ISA`` names a module that cannot be used.
    """
    if force_reference():
        return None
    if forced := os.environ.get("SGL_KERNEL_EXT_ISA"):
        return load_isa(forced)
    failures = []
    for isa in supported_isas():
        if not _is_built(isa):
            continue
        try:
            return load_isa(isa)
        except ImportError as error:
            failures.append(f"{isa}: {error}")
    reason = "; ".join(failures) or f"no module for {', '.join(supported_isas())} was built"
    logger.warning(
        "sgl_kernel_ext has no C++ kernels (%s): CPU ops run their torch references, which give "
        "the same kind of result many times slower. Build them with "
        "`pip install --no-build-isolation -e sgl-kernel-ext` (needs g++ and ninja), with the "
        "torch that will run them.",
        reason,
    )
    return None


def active() -> dict[str, object]:
    """What runs here: ``cpu_backend``, ``isa``, ``module``, ``threads``, ``cuda_backend``."""
    module = cpu_module()
    return {
        "cpu_backend": "reference" if module is None else "cpp",
        "isa": None if module is None else module.__name__.rpartition("._C_")[2],
        "module": None if module is None else Path(module.__file__ or "").name,
        "threads": torch.get_num_threads(),
        "cuda_backend": "reference" if force_reference() else "triton",
    }

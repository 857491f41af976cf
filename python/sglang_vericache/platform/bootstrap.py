"""Import-time preparation of a machine without an NVIDIA driver.

Runs at every interpreter start of the environment (through ``sglang_vericache.pth``), in the
launcher as in every process SGLang spawns, so it imports nothing but the standard library and
only installs an import hook:

- on the first ``import sglang``: ``SGLANG_USE_CPU_ENGINE=1`` unless the user set it;
- on ``import sgl_kernel``: the wheel on PyPI is CUDA-only and its ``__init__`` fails without
  ``libcuda.so.1``. ``standin_sgl_kernel.py`` takes its name and keeps the wheel's pure-Python
  submodules importable.

With an NVIDIA driver present the hook does nothing. Whoever starts any Python in this environment
pays for this module, so even ``ctypes`` is imported only when SGLang is.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing costs a millisecond of every start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_STANDIN = os.path.join(os.path.dirname(__file__), "standin_sgl_kernel.py")


def has_nvidia_driver() -> bool:
    """Whether ``libcuda.so.1`` can be loaded (a GPU may still be absent)."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _PlainCpuFinder:
    """Meta path finder; see the module docstring."""

    @classmethod
    def find_spec(
        cls,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name not in ("sglang", "sgl_kernel") or not needed():
            return None
        if name == "sglang":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            return None
        import importlib.machinery
        import importlib.util

        real = importlib.machinery.PathFinder.find_spec(name)
        locations = list(real.submodule_search_locations or []) if real else []
        return importlib.util.spec_from_file_location(
            name, _STANDIN, submodule_search_locations=locations
        )


def needed() -> bool:
    """Whether this process runs SGLang on a CPU."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not has_nvidia_driver()


def install() -> None:
    """Install the import hook once; it looks for a driver when SGLang is first imported."""
    if not any(finder is _PlainCpuFinder for finder in sys.meta_path):
        sys.meta_path.insert(0, _PlainCpuFinder)  # type: ignore[arg-type]

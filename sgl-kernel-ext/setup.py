"""Builds the CPU kernels once per instruction set; the package picks one at import time.

``SGL_KERNEL_EXT_BUILD=avx512,generic`` limits the build to the sets named.
"""

import os
import platform
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.cpp"))

# Name -> compiler flags. Same sources: vector extensions lower to each set, and the bf16 dot
# product is used where the set has it. What a CPU needs to run them: sgl_kernel_ext/_loader.py.
ISA_FLAGS = {
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    "avx512": ["-march=x86-64-v4"],
    "avx2": ["-march=x86-64-v3"],
    "generic": [],
}


def isas_to_build() -> list[str]:
    known = list(ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["generic"]
    wanted = [isa for isa in os.environ.get("SGL_KERNEL_EXT_BUILD", "").split(",") if isa]
    if unknown := set(wanted) - set(known):
        raise SystemExit(
            f"SGL_KERNEL_EXT_BUILD names {', '.join(sorted(unknown))}; "
            f"this machine's compiler builds {', '.join(known)}"
        )
    return wanted or known


def extension(isa: str) -> CppExtension:
    return CppExtension(
        name=f"sgl_kernel_ext._C_{isa}",
        sources=SOURCES,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=[
            "-O3",
            "-std=c++20",
            # Keeps a row's arithmetic independent of how loops were unrolled.
            "-ffp-contract=off",
            # Several of the modules, with equal symbols, may live in one process.
            "-fvisibility=hidden",
            "-g0",
            # gcc 12 warns about its own AVX-512 headers.
            "-Wno-maybe-uninitialized",
            *ISA_FLAGS[isa],
        ],
    )


setup(
    ext_modules=[extension(isa) for isa in isas_to_build()],
    cmdclass={"build_ext": BuildExtension},
)

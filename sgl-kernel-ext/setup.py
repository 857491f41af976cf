"""Builds the CPU kernels once per instruction set; the package picks one at import time."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.cpp"))

# Name -> compiler flags. Same sources: vector extensions lower to each set, and the bf16 dot
# product is used where the set has it.
ISA_FLAGS = {
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    "avx512": ["-march=x86-64-v4"],
    "avx2": ["-march=x86-64-v3"],
    "generic": [],
}


def extension(isa: str, flags: list[str]) -> CppExtension:
    return CppExtension(
        name=f"sgl_kernel_ext._C_{isa}",
        sources=SOURCES,
        include_dirs=[str(ROOT / "csrc")],
        # -fopenmp at compile time only: linking it would load a second libgomp beside torch's.
        # -ffp-contract=off keeps a row's arithmetic independent of how loops were unrolled.
        extra_compile_args=["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", *flags],
    )


setup(
    ext_modules=[extension(isa, flags) for isa, flags in ISA_FLAGS.items()],
    cmdclass={"build_ext": BuildExtension},
)

"""What Triton's interpreter does otherwise than a GPU, mended for tests."""

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def dot_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``tl.dot`` compute each element alike wherever it lies in its tile.

    numpy's matmul leaves that to a BLAS, whose edge kernels round otherwise on some CPUs (OpenBLAS
    on Zen 5). And the interpreter keeps bf16 as uint16 and multiplies the bit patterns
    (https://github.com/triton-lang/triton/issues/11584).
    """

    def widen(x: interpreter.TensorHandle) -> np.ndarray:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype("uint32") << 16).view("float32")
        return x.data

    def dot(_, a, b, accumulator, *_args):
        dtype = accumulator.data.dtype
        product = np.einsum("...ik,...kj->...ij", widen(a).astype(dtype), widen(b).astype(dtype))
        return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)

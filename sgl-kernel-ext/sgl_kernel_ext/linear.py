"""Row-invariant linear: the bits of a row never depend on which or how many rows are with it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext._loader import cpu_module, force_reference
from sgl_kernel_ext.reference import linear as reference

_cpu = cpu_module()
_use_triton = not force_reference()
_BLOCK = 32  # kBlock of csrc/linear_tile.h


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear's weight in the layout its kernel reads; make one with :func:`pack_weight`.

    Attributes:
        data: the weight; flat blocks of 32 output columns where ``tiled``, else ``[n, k]``.
        n: output features.
        k: input features.
        bias: ``[n]`` added by :func:`linear` unless the call brings its own, or None.
        tiled: whether ``data`` is in the layout of the C++ kernel (csrc/linear_tile.h).
    """

    data: Tensor
    n: int
    k: int
    bias: Tensor | None
    tiled: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``, the shape of the weight that was packed."""
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        """Bytes held, padding to whole blocks included."""
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def overwrite(self, weight: Tensor) -> None:
        """Pack another weight ``[n, k]`` of the same dtype in place."""
        packed = pack_weight(weight).data
        if packed.data_ptr() != self.data.data_ptr():
            self.data.copy_(packed)

    def unpack(self) -> Tensor:
        """The weight ``[n, k]`` that was packed."""
        if not self.tiled:
            return self.data
        pair = 2 if self.dtype == torch.bfloat16 else 1
        blocks = self.data.view(-(-self.n // _BLOCK), -(-self.k // pair), _BLOCK, pair)
        columns = blocks.transpose(1, 2).flatten(2).flatten(0, 1)
        return columns[: self.n, : self.k].contiguous()


def pack_weight(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Copies ``weight [N, K]`` (bf16, fp16 or fp32) into the layout of the kernel of its device.

    ``bias [N]`` is kept by reference. On CUDA and for the reference the weight is not copied.

    Raises:
        ValueError: not 2-D, rows not contiguous, or another dtype.
    """
    n, k = weight.shape
    if _cpu is not None and weight.is_cpu:
        return PackedWeight(_cpu.pack_weight(weight), n, k, bias, tiled=True)
    return PackedWeight(weight, n, k, bias, tiled=False)


def linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias``: each output one fp32 sum over k in a fixed order, rounded once.

    Bit-identical for a given row whatever M, the row's position, the other rows and the number of
    threads. Instruction sets and devices differ from each other in the last bits.

    Args:
        x: ``[M, K]`` in the weight's dtype; rows contiguous, any distance apart; M may be 0.
        packed: the weight ``[N, K]``.
        bias: ``[N]`` in x's dtype, in place of ``packed.bias``.
        out: ``[M, N]`` to write to, rows contiguous.

    Returns:
        ``[M, N]`` in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if bias is None:
        bias = packed.bias
    if packed.tiled:
        assert _cpu is not None  # it packed the weight
        return _cpu.linear(x, packed.data, packed.n, bias, out)
    if x.is_cuda and _use_triton:
        from sgl_kernel_ext.triton import linear as triton_linear

        return triton_linear.linear(x, packed.data, bias, out)
    return reference.linear(x, packed.data, bias, out)

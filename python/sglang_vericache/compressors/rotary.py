"""Rotary position embedding as a method may undo and apply it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """RoPE of a model (https://arxiv.org/abs/2104.09864): pairs of channels turn with position.

    Seen as complex numbers, pair f of a vector at position p is multiplied by
    ``table[p, f] + i table[p, R/2 + f]``. Channels from R on do not turn. All results are float32.

    Attributes:
        table: ``[P, R]``, cosines then sines of R/2 frequencies; its length may exceed 1, as with
            YaRN. Positions from P on count as P - 1.
        neox: pairs are (f, f + R/2); else (2 f, 2 f + 1).
    """

    table: Tensor
    neox: bool = True

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` ``[n, H, D]`` as it was before it was turned by ``positions`` ``[n]``."""
        cos, sin = self._at(positions)
        length = cos.square() + sin.square()
        return self._turn(x, (cos / length)[:, None], (-sin / length)[:, None])

    def average(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` ``[n, H, D]`` turned by each of ``positions`` ``[m]``, averaged over those."""
        cos, sin = self._at(positions)
        return self._turn(x, cos.mean(dim=0), sin.mean(dim=0))

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table[positions.clamp(max=len(self.table) - 1)].float()
        cos, sin = rows.chunk(2, dim=-1)
        return cos, sin

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = self.table.shape[1]
        turning, still = x[..., :width].float(), x[..., width:].float()
        pairs = turning.unflatten(-1, (2, -1) if self.neox else (-1, 2))
        axis = -2 if self.neox else -1
        a, b = pairs.unbind(axis)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=axis)
        return torch.cat((turned.flatten(-2), still), dim=-1)

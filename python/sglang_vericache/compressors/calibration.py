"""What a calibration knows about a model, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Retrieval heads and layer weights of one model, from ``vericache calibrate``.

    Attributes:
        heads: per layer, the query heads that look semantic content up; none empty.
        weights: per layer, its share of the error that compression causes; they sum to 1.

    Raises:
        ValueError: the two disagree about the number of layers, or a value is impossible.
    """

    heads: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.heads) != len(self.weights) or not self.heads:
            raise ValueError(f"heads of {len(self.heads)} layers, {len(self.weights)} weights")
        if not all(self.heads) or min(map(min, self.heads)) < 0:
            raise ValueError("every layer needs at least one head, counted from 0")
        if min(self.weights) < 0 or abs(sum(self.weights) - 1) > 1e-3:
            raise ValueError(f"layer weights must be shares of 1, not {self.weights}")

    def check(self, num_layers: int, num_heads: int) -> None:
        """Raise ``ValueError`` unless a model of so many layers and query heads may be meant."""
        if len(self.heads) != num_layers or max(map(max, self.heads)) >= num_heads:
            raise ValueError(
                f"the calibration file is of another model: it has {len(self.heads)} layers, this "
                f"model {num_layers} of {num_heads} query heads"
            )

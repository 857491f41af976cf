"""Settings shared by all methods, and how a request may narrow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sglang_vericache.compressors.calibration import Calibration
from sglang_vericache.core import Budget


@dataclass(frozen=True)
class Settings:
    """What the command line sets for every method; a method takes the fields it declares.

    Attributes:
        ratio: kept share of the context, in (0, 1].
        min_tokens: contexts are never compressed below this many tokens.
        sinks: first tokens that are always kept.
        window: last tokens that are always kept, and whose queries score the others.
        recent: share of the budget that goes to the latest tokens, in [0, 1]; at least ``window``.
        kernel: width of the average pooling over scores, in tokens; odd.
        seed: of the random control.
        calibration: of the server's model, if there is one; found at start, not set by hand.
    """

    ratio: float = 0.1
    min_tokens: int = 128
    sinks: int = 4
    window: int = 16
    recent: float = 0.4
    kernel: int = 5
    seed: int = 0
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            share = name in ("ratio", "recent")
            if isinstance(value, bool) or not isinstance(value, (int, float) if share else int):
                kind = "number" if share else "whole number"
                raise ValueError(f"{name} must be a {kind}, not {value!r}")
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"ratio must be in (0, 1], not {self.ratio}")
        if not 0.0 <= self.recent <= 1.0:
            raise ValueError(f"recent must be in [0, 1], not {self.recent}")
        for name, least in (("min_tokens", 0), ("sinks", 0), ("window", 1), ("kernel", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, not {self.kernel}")

    @property
    def budget(self) -> Budget:
        return Budget(self.ratio, self.min_tokens)

    def narrowed(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with a request's own, none above what the server was started with.

        Raises:
            ValueError: an unknown key, an invalid value, or one above the server's; it names the
                key and what is supported.
        """
        for key in changes:
            if key not in NARROWABLE:
                raise ValueError(f"unknown setting {key!r}; supported: {', '.join(NARROWABLE)}")
        result = replace(self, **changes)
        for key, value in changes.items():
            if value > getattr(self, key):
                raise ValueError(f"{key} may be at most {getattr(self, key)} here, not {value}")
        return result


NUMBERS = tuple(field.name for field in fields(Settings) if field.name != "calibration")
"""Settings that a user may set."""
NARROWABLE = tuple(name for name in NUMBERS if name != "seed")
"""Settings that a request may narrow."""

"""Codes of rotated heads."""

from __future__ import annotations

from typing import ClassVar

from sglang_vericache.compressors.identity import Identity


class Turbo4(Identity):
    """Keep every token as 4-bit codes of its rotated heads.

    TurboQuant (https://arxiv.org/abs/2504.19874): y = H (s * x) / sqrt(D), with random signs s that
    are always the same and a Hadamard matrix H, is close to Gaussian whatever the outliers of x.
    code_d is that of the level nearest to y_d / rms(y) in the best quantizer of a Gaussian
    (Lloyd-Max), and y is kept as scale * level[code], scale being that of the least squared error:
    the paper's, the norm, loses more at the same two bytes. Squared error 0.0095 of the squared
    norm.

    A draft reads D / 2 + 2 bytes a head instead of 2 D (bf16): 0.27 at D = 64.
    Limits: where D is no power of two, fewer channels are mixed: at D = 80, 16 of them.
    """

    name: ClassVar[str] = "turbo4"
    codec: ClassVar[str | None] = "turbo4"


class Turbo2(Identity):
    """As ``turbo4`` with 2 bits: squared error 0.1175 of the squared norm.

    A draft reads D / 4 + 2 bytes a head instead of 2 D (bf16): 0.14 at D = 64.
    Limits: keys lose too much.
    """

    name: ClassVar[str] = "turbo2"
    codec: ClassVar[str | None] = "turbo2"


class Turbo4V2(Identity):
    """``turbo4`` for keys, ``turbo2`` for values, which lose less by it
    (https://arxiv.org/abs/2502.15075).

    A draft reads 3/4 D + 4 bytes of K and V a head instead of 4 D (bf16): 0.20 at D = 64.
    Limits: as ``turbo4``.
    """

    name: ClassVar[str] = "turbo4v2"
    codec: ClassVar[str | None] = "turbo4v2"

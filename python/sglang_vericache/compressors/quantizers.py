"""Methods whose drafts read a packed copy of few bits, and any dropper with such a copy."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from sglang_vericache.compressors.base import Dropper
from sglang_vericache.compressors.identity import Identity


class Int8(Identity):
    """Keep every token as 8-bit codes: uniform over the range of a token's head.

    code_d = round((x_d - min x) / scale), scale = (max x - min x) / 255, for K and V alike.

    A draft reads D + 4 bytes a head instead of 2 D (bf16): 0.53 at D = 64.
    Limits: saves too little for long drafts; the negligible error makes it the control of ``int4``.
    """

    name: ClassVar[str] = "int8"
    codec: ClassVar[str | None] = "int8"


class Int4(Identity):
    """Keep every token as 4-bit codes: uniform over the range of 32 channels of a token's head.

    code_d = round((x_d - min x) / scale), scale = (max x - min x) / 15, for K and V alike: per
    token, so that a slot can be decoded alone.

    A draft reads 5/8 D bytes a head instead of 2 D (bf16): 0.31.
    Limits: outlier channels widen the range of their group.
    """

    name: ClassVar[str] = "int4"
    codec: ClassVar[str | None] = "int4"


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


class Kivi4(Identity):
    """Keep every token as 4-bit codes: K per channel, V per token, the latest 32 as they are.

    KIVI (https://arxiv.org/abs/2402.02750): keys have channels that are large in all tokens, so
    their codes are uniform over the range of a channel in 32 listed tokens; those of V over the
    range of 32 channels of a token, as in ``int4``. The last ``residual`` tokens of the context are
    not packed, nor is what was generated since.

    A draft reads 5/8 D bytes a head instead of 2 D (bf16), 0.31, and the latest tokens.
    Limits: 32 tokens share slots, so a copy takes up to 31 more; no copies in a store, since those
    are read in parts; with full KV on the host nothing is left unpacked.
    """

    name: ClassVar[str] = "kivi4"
    codec: ClassVar[str | None] = "kivi4"
    residual: ClassVar[int] = 32
    divisible: ClassVar[bool] = False


class Kivi2(Kivi4):
    """As ``kivi4`` with 2 bits, the paper's.

    A draft reads 3/8 D bytes a head instead of 2 D (bf16), 0.19, and the latest tokens.
    Limits: as ``kivi4``.
    """

    name: ClassVar[str] = "kivi2"
    codec: ClassVar[str | None] = "kivi2"


METHODS: tuple[type[Dropper], ...] = (Int8, Int4, Turbo4, Turbo4V2, Turbo2, Kivi4, Kivi2)
CODECS: dict[str, type[Dropper]] = {str(cls.codec): cls for cls in METHODS}


@cache
def quantized(cls: type[Dropper], codec: str) -> type[Dropper]:
    """The method ``cls`` with drafts that read a packed copy of what it keeps."""
    name = f"{cls.name}+{codec}"
    doc = f"{cls.__doc__}\n\n    What is kept is packed as {codec}."
    members = {"name": name, "codec": codec, "__doc__": doc, "__module__": cls.__module__}
    members |= {key: getattr(CODECS[codec], key) for key in ("residual", "divisible")}
    return type(f"{cls.__name__}{codec.title()}", (cls,), members)

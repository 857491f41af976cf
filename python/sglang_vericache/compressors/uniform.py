"""Codes that are uniform over the range of a token's head, or of some channels of it."""

from __future__ import annotations

from typing import ClassVar

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

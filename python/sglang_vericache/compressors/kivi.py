"""Codes of K that are uniform over the range of a channel."""

from __future__ import annotations

from typing import ClassVar

from sglang_vericache.compressors.identity import Identity


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

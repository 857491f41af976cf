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
    token, so that a slot can be decoded alone (KIVI, https://arxiv.org/abs/2402.02750, has groups
    of tokens for K, which are more exact at 2 bits).

    A draft reads 5/8 D bytes a head instead of 2 D (bf16): 0.31.
    Limits: outlier channels widen the range of their group. SmolLM2-135M at 2,048 tokens: relative
    error of K 0.099, of V 0.083, agreement on the next token 0.955. A random Hadamard rotation of
    the head changes these to 0.075, 0.077 and 0.957 (groups of 32): not worth its transform.
    """

    name: ClassVar[str] = "int4"
    codec: ClassVar[str | None] = "int4"


CODECS = tuple(str(cls.codec) for cls in (Int8, Int4))


@cache
def quantized(cls: type[Dropper], codec: str) -> type[Dropper]:
    """The method ``cls`` with drafts that read a packed copy of what it keeps."""
    name = f"{cls.name}+{codec}"
    doc = f"{cls.__doc__}\n\n    What is kept is packed as {codec}."
    members = {"name": name, "codec": codec, "__doc__": doc, "__module__": cls.__module__}
    return type(f"{cls.__name__}{codec.title()}", (cls,), members)

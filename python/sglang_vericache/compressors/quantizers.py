"""Methods whose drafts read a packed copy of few bits, and any dropper with such a copy."""

from __future__ import annotations

from functools import cache

from sglang_vericache.compressors.base import Dropper
from sglang_vericache.compressors.kivi import Kivi2, Kivi4
from sglang_vericache.compressors.turbo import Turbo2, Turbo4, Turbo4V2
from sglang_vericache.compressors.uniform import Int4, Int8

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

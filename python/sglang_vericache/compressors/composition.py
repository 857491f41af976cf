"""Methods made of a registered one, budgets that wrap it and a codec: ``snapkv+pyramidkv+int4``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from sglang_vericache.compressors.adakv import AdaKV
from sglang_vericache.compressors.base import Dropper
from sglang_vericache.compressors.calibrated import Calibrated
from sglang_vericache.compressors.chunkkv import ChunkKV
from sglang_vericache.compressors.pyramidkv import PyramidKV
from sglang_vericache.compressors.quantizers import CODECS, quantized

BUDGETS: dict[str, type[Dropper]] = {
    str(cls.name): cls for cls in (AdaKV, Calibrated, ChunkKV, PyramidKV)
}
BY_LAYER = (Calibrated, PyramidKV)


def suffixes() -> str:
    """What may follow the name of a method, in words."""
    budgets = ", ".join(f"+{name}" for name in BUDGETS)
    codecs = ", ".join(f"+{codec}" for codec in CODECS)
    return (
        f"a method that drops tokens also with budgets ({budgets}; +adakv where every KV head has "
        f"its own list; one of {' and '.join('+' + str(cls.name) for cls in BY_LAYER)}) and, last, "
        f"with one of {codecs}"
    )


def composed(base: type[Dropper], parts: Sequence[str]) -> type[Dropper] | None:
    """The class of ``base`` with the budgets and the codec that ``parts`` name.

    Budgets may come in any order. None if they do not go together.
    """
    *budgets, last = parts or [""]
    codec = last if last in CODECS else None
    if parts and codec is None:
        budgets.append(last)
    known = set(budgets) <= BUDGETS.keys() and len(set(budgets)) == len(budgets)
    if not known or (budgets and not base.drops) or (codec and base.codec):
        return None
    if "adakv" in budgets and not base.per_head:
        return None
    by_layer = [issubclass(cls, BY_LAYER) for cls in (base, *(BUDGETS[name] for name in budgets))]
    if sum(by_layer) > 1:
        return None
    cls = _budgeted(base, tuple(sorted(budgets))) if budgets else base
    return quantized(cls, codec) if codec else cls


@cache
def _budgeted(base: type[Dropper], budgets: tuple[str, ...]) -> type[Dropper]:
    """``base`` with budgets around it, its fields and theirs."""
    bases = tuple(BUDGETS[name] for name in budgets)
    doc = "\n\n    ".join(str(cls.__doc__) for cls in (base, *bases))
    name = "+".join([base.name, *budgets])
    members = {"name": name, "__doc__": doc, "__module__": base.__module__}
    title = base.__name__ + "".join(cls.__name__ for cls in bases)
    return dataclass(frozen=True)(type(title, (*bases, base), members))

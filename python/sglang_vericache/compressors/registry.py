"""Compressors by the name users select them with."""

from __future__ import annotations

from dataclasses import fields

from sglang_vericache.compressors.base import Dropper
from sglang_vericache.compressors.composition import composed, suffixes
from sglang_vericache.compressors.compresskv import CompressKV
from sglang_vericache.compressors.expected_attention import ExpectedAttention
from sglang_vericache.compressors.h2o import H2O
from sglang_vericache.compressors.identity import Identity
from sglang_vericache.compressors.keydiff import KeyDiff
from sglang_vericache.compressors.knorm import Knorm
from sglang_vericache.compressors.kvpress import FAMILY, press_method
from sglang_vericache.compressors.lagkv import LagKV
from sglang_vericache.compressors.quantizers import METHODS as QUANTIZERS
from sglang_vericache.compressors.quest import Quest
from sglang_vericache.compressors.random_kv import RandomKV
from sglang_vericache.compressors.settings import Settings
from sglang_vericache.compressors.snapkv import SnapKV
from sglang_vericache.compressors.snapkv_per_head import SnapKVPerHead
from sglang_vericache.compressors.streaming import StreamingLLM
from sglang_vericache.compressors.tova import TOVA

_CLASSES: dict[str, type[Dropper]] = {}


def register(cls: type[Dropper]) -> type[Dropper]:
    """Make a method selectable by its ``name``; usable as a decorator.

    Raises:
        ValueError: the name belongs to another class.
    """
    if _CLASSES.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"compressor {cls.name!r} is already registered")
    return cls


def names() -> list[str]:
    """Names of all registered methods, sorted."""
    return sorted(_CLASSES)


def supported() -> str:
    """What ``create`` takes, in words."""
    listed = f"{', '.join(names())}, {FAMILY}:PRESS with a scorer of kvpress"
    return f"{listed}; {suffixes()}"


def find(name: str) -> type[Dropper]:
    """The class of ``name``: of a registered method, or of one with budgets and a codec.

    Args:
        name: a registered one, or ``kvpress:`` and a class of that package; budgets and a codec may
            follow: ``snapkv+int4``, ``snapkv+pyramidkv+int4``.

    Raises:
        ValueError: no such method; the message lists the supported ones. A press that cannot be
            used here; the message says why.
    """
    base, *parts = name.split("+")
    family, _, press = base.partition(":")
    method = press_method(press) if family == FAMILY else _CLASSES.get(base)
    cls = composed(method, parts) if method else None
    if cls is None:
        raise ValueError(f"unknown compressor {name!r}; supported: {supported()}")
    return cls


def create(name: str, settings: Settings) -> Dropper:
    """Build the method ``name``, as ``find`` takes it, from those settings it declares as fields.

    Raises:
        ValueError: no such method, or the settings lack what it needs.
    """
    cls = find(name)
    known = {field.name for field in fields(Settings)}
    chosen = {f.name: getattr(settings, f.name) for f in fields(cls) if f.name in known}  # type: ignore[arg-type]
    return cls(**chosen)


_DROPPERS: tuple[type[Dropper], ...] = (
    *(CompressKV, ExpectedAttention, H2O, Identity, KeyDiff, Knorm, LagKV, Quest, RandomKV),
    *(SnapKV, SnapKVPerHead, StreamingLLM, TOVA),
)
for _cls in (*_DROPPERS, *QUANTIZERS):
    register(_cls)

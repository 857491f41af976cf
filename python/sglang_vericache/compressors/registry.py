"""Compressors by the name users select them with."""

from __future__ import annotations

from dataclasses import fields

from sglang_vericache.compressors.base import Dropper
from sglang_vericache.compressors.calibrated import Calibrated
from sglang_vericache.compressors.composition import composed, suffixes
from sglang_vericache.compressors.compresskv import CompressKV
from sglang_vericache.compressors.identity import Identity
from sglang_vericache.compressors.quantizers import Int4, Int8
from sglang_vericache.compressors.random_kv import RandomKV
from sglang_vericache.compressors.settings import Settings
from sglang_vericache.compressors.snapkv import SnapKV
from sglang_vericache.compressors.snapkv_per_head import SnapKVPerHead
from sglang_vericache.compressors.streaming import StreamingLLM

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
    return f"{', '.join(names())}; {suffixes()}"


def find(name: str) -> type[Dropper]:
    """The class of ``name``: of a registered method, or of one with budgets and a codec.

    Args:
        name: ``snapkv``, ``snapkv+int4``, ``snapkv+pyramidkv+int4``.

    Raises:
        ValueError: no such method; the message lists the supported ones.
    """
    base, *parts = name.split("+")
    cls = composed(_CLASSES[base], parts) if base in _CLASSES else None
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


def query_rows(settings: Settings) -> int:
    """Queries of the last prompt tokens that any of the registered methods wants."""
    usable = [name for name in names() if settings.calibration or not needs_calibration(name)]
    return max(create(name, settings).query_rows for name in usable)


def needs_calibration(name: str) -> bool:
    """Whether a method works only with ``Settings.calibration``."""
    return issubclass(find(name), Calibrated)


for _cls in (CompressKV, Identity, Int4, Int8, RandomKV, SnapKV, SnapKVPerHead, StreamingLLM):
    register(_cls)

"""Compressors by the name users select them with."""

from __future__ import annotations

from dataclasses import fields

from sglang_vericache.compressors.base import Dropper
from sglang_vericache.compressors.identity import Identity
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


def create(name: str, settings: Settings) -> Dropper:
    """Build the method ``name`` from those settings it declares as fields.

    Raises:
        ValueError: no such method; the message lists the supported ones.
    """
    if name not in _CLASSES:
        raise ValueError(f"unknown compressor {name!r}; supported: {', '.join(names())}")
    cls = _CLASSES[name]
    known = {field.name for field in fields(Settings)}
    chosen = {f.name: getattr(settings, f.name) for f in fields(cls) if f.name in known}  # type: ignore[arg-type]
    return cls(**chosen)


for _cls in (Identity, RandomKV, SnapKV, SnapKVPerHead, StreamingLLM):
    register(_cls)

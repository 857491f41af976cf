"""Compressors by the name users select them with."""

from __future__ import annotations

from dataclasses import fields

from sglang_vericache.compressors.base import Dropper
from sglang_vericache.compressors.identity import Identity
from sglang_vericache.compressors.quantizers import CODECS, Int4, Int8, quantized
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
    suffixes = " or ".join(f"+{codec}" for codec in CODECS)
    return f"{', '.join(names())}; a method that drops tokens also with {suffixes}"


def create(name: str, settings: Settings) -> Dropper:
    """Build the method ``name`` from those settings it declares as fields.

    Args:
        name: a registered one, or such a one and a codec: ``snapkv+int4``.

    Raises:
        ValueError: no such method; the message lists the supported ones.
    """
    base, _, codec = name.partition("+")
    known_codec = codec in CODECS if "+" in name else True
    if base not in _CLASSES or not known_codec or (codec and _CLASSES[base].codec):
        raise ValueError(f"unknown compressor {name!r}; supported: {supported()}")
    cls = quantized(_CLASSES[base], codec) if codec else _CLASSES[base]
    known = {field.name for field in fields(Settings)}
    chosen = {f.name: getattr(settings, f.name) for f in fields(cls) if f.name in known}  # type: ignore[arg-type]
    return cls(**chosen)


for _cls in (Identity, Int4, Int8, RandomKV, SnapKV, SnapKVPerHead, StreamingLLM):
    register(_cls)

"""Compression methods: they know tensors only, no engine and no server."""

from sglang_vericache.compressors.base import (
    Dropper,
    KeepsEnds,
    LayerContext,
    Protected,
    summed_attention,
)
from sglang_vericache.compressors.calibration import Calibration
from sglang_vericache.compressors.kvpress import FAMILY
from sglang_vericache.compressors.registry import create, find, names, register, supported
from sglang_vericache.compressors.rotary import Rotary
from sglang_vericache.compressors.select import before, compress, keep_best
from sglang_vericache.compressors.settings import Settings

__all__ = [
    "FAMILY",
    "Calibration",
    "Dropper",
    "KeepsEnds",
    "LayerContext",
    "Protected",
    "Rotary",
    "Settings",
    "before",
    "compress",
    "create",
    "find",
    "keep_best",
    "names",
    "register",
    "summed_attention",
    "supported",
]

"""Compression methods: they know tensors only, no engine and no server."""

from sglang_vericache.compressors.base import Dropper, LayerContext, Protected, summed_attention
from sglang_vericache.compressors.calibration import Calibration
from sglang_vericache.compressors.registry import (
    create,
    find,
    names,
    needs_calibration,
    query_rows,
    register,
    supported,
)
from sglang_vericache.compressors.select import compress, keep_best
from sglang_vericache.compressors.settings import Settings

__all__ = [
    "Calibration",
    "Dropper",
    "LayerContext",
    "Protected",
    "Settings",
    "compress",
    "create",
    "find",
    "keep_best",
    "names",
    "needs_calibration",
    "query_rows",
    "register",
    "summed_attention",
    "supported",
]

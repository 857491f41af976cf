"""Format of one stored object: a payload, then what proves that it is the one asked for.

All objects of a store have one size. A KV page fills one; other bytes are cut into as many as
needed. The checksum is seeded with the label under which an object is stored, so bytes of another
object, model or layout fail it like damaged ones.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash
from torch import Tensor

MAGIC = b"VKV1"
# Magic, payload bytes used here, bytes and checksum of all parts together, checksum.
_TRAILER = struct.Struct("<4sIQQQ")
TRAILER_BYTES = _TRAILER.size


@dataclass(frozen=True)
class Part:
    """What an object says about itself.

    Attributes:
        used: bytes of payload in this object.
        total: bytes of payload in all objects stored together with it.
        whole: checksum of those; 0 for a page, which is complete in itself.
    """

    used: int
    total: int
    whole: int = 0


def checksum(data: bytes | memoryview) -> int:
    """64-bit checksum of any bytes."""
    return xxhash.xxh3_64_intdigest(data)


def seal(record: Tensor, label: str, part: Part) -> None:
    """Write the trailer behind the payload.

    Args:
        record: uint8 ``[payload + TRAILER_BYTES]``; the first ``part.used`` bytes are set.
        label: identity and name of the object.
    """
    trailer = _trailer(record, label, part)
    record[-TRAILER_BYTES:].numpy()[:] = memoryview(trailer)


def verify(record: Tensor, label: str) -> Part | None:
    """What a record that was read holds; None if it is not what was sealed under this label."""
    trailer = record[-TRAILER_BYTES:].numpy().tobytes()
    magic, used, total, whole, _ = _TRAILER.unpack(trailer)
    part = Part(used, total, whole)
    if magic != MAGIC or used > len(record) - TRAILER_BYTES:
        return None
    return part if _trailer(record, label, part) == trailer else None


def payload(record: Tensor, part: Part) -> memoryview:
    """The bytes that a record holds for its object."""
    return memoryview(record.numpy().data)[: part.used]


def _trailer(record: Tensor, label: str, part: Part) -> bytes:
    head = _TRAILER.pack(MAGIC, part.used, part.total, part.whole, 0)
    seed = checksum(label.encode() + head)
    proof = xxhash.xxh3_64_intdigest(payload(record, part), seed)
    return _TRAILER.pack(MAGIC, part.used, part.total, part.whole, proof)

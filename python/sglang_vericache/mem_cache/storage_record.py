"""Format of one stored object: a payload, then what proves that it is the one asked for.

A KV page is one object; other bytes are cut into as many as needed. The checksum is seeded with the
label under which an object is stored, so bytes of another object, model or layout fail it like
damaged ones.
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


def seal(record: Tensor, label: str, part: Part) -> Tensor:
    """Write the trailer behind the payload.

    Args:
        record: uint8, room for payload and trailer; the first ``part.used`` bytes are set.
        label: identity and name of the object.

    Returns:
        The object: a slice of ``record``.
    """
    trailer = _trailer(record, label, part)
    found = record[: part.used + TRAILER_BYTES]
    memoryview(found.numpy().data)[part.used :] = trailer
    return found


def verify(found: Tensor, label: str) -> Part | None:
    """What an object (uint8) holds; None if it is not what was sealed under this label."""
    used = len(found) - TRAILER_BYTES
    if used < 0:
        return None
    trailer = found[used:].numpy().tobytes()
    _, _, total, whole, _ = _TRAILER.unpack(trailer)
    part = Part(used, total, whole)
    return part if _trailer(found, label, part) == trailer else None


def payload(record: Tensor, part: Part) -> memoryview:
    """The bytes that a record holds for its object."""
    return memoryview(record.numpy().data)[: part.used]


def _trailer(record: Tensor, label: str, part: Part) -> bytes:
    fields = (MAGIC, part.used, part.total, part.whole)
    seed = checksum(label.encode() + _TRAILER.pack(*fields, 0))
    return _TRAILER.pack(*fields, xxhash.xxh3_64_intdigest(payload(record, part), seed))

"""Objects in a store: written with a proof, read with a check, whatever the store does."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sglang_vericache.mem_cache.storage_guard import Fault, Guard, Lane, Options
from sglang_vericache.mem_cache.storage_record import TRAILER_BYTES, Part, seal, verify
from sglang_vericache.mem_cache.storage_stores import Store

logger = logging.getLogger(__name__)
# Calls at once: HiCache asks, reads and writes from a thread each, others on their own.
LANES = 4
# What one call may move.
LANE_BYTES, LANE_RECORDS = 8 << 20, 128
ALIGNMENT = 64


class Objects:
    """Objects of limited size, in memory of ours (records) on their way to and from the store.

    Methods never raise because of the store and may be called from any thread.

    Args:
        store: where they are.
        size: most bytes of payload of one.
        options: bounds of calls.
    """

    def __init__(self, store: Store, size: int, options: Options):
        self.size = size
        record = size + TRAILER_BYTES
        stride = -(-record // ALIGNMENT) * ALIGNMENT
        records = min(max(1, LANE_BYTES // stride), LANE_RECORDS)
        shape = (LANES, records, stride)
        self._buffer = torch.zeros(shape, dtype=torch.uint8)
        self._store = store
        store.attach(self._buffer)
        self.guard = Guard(options, [list(lane[:, :record]) for lane in self._buffer])

    def exist(self, names: Sequence[str]) -> list[bool] | None:
        """Whether each object is there; None if the store does not tell."""
        if not names:
            return []
        try:
            with self.guard.lane("query") as lane:
                existing = self.guard.call(lane, "query", lambda: self._store.exists(names))
        except Fault:
            return None
        self.guard.count(queried=len(names), found=sum(existing))
        return existing

    def read(self, names: Sequence[str], expected: bool = True) -> Iterator[tuple[Tensor, Part]]:
        """Records that passed their check, up to the first that does not.

        Each is valid until the next one is asked for.

        Args:
            expected: whether it is a fault if one is not there.
        """
        try:
            with self.guard.lane("read") as lane:
                step = len(lane.records)
                for start in range(0, len(names), step):
                    yield from self._read_some(lane, names[start : start + step], expected)
        except Fault:
            return

    def write(self, names: Sequence[str], fill: Callable[[Tensor, int], Part]) -> int:
        """Store objects.

        Args:
            fill: sets the payload of record ``i`` of ``names`` and says what it is.

        Returns:
            How many of them, from the first, are stored for sure.
        """
        done = 0
        try:
            with self.guard.lane("write") as lane:
                while done < len(names):
                    done += self._write_some(lane, names, done, fill)
        except Fault:
            pass
        return done

    def discard(self, name: str) -> None:
        """Remove a bad object: while it is there, nobody would write it anew."""
        logger.warning("The store holds a damaged object: %s", name)
        self._attempt(lambda: self._store.remove(name))

    def clear(self) -> None:
        """Empty the store, for other servers too."""
        self._attempt(self._store.clear)

    def close(self) -> None:
        """Let go of the store."""
        self._attempt(self._store.close)
        self.guard.close()

    def _read_some(
        self, lane: Lane, names: Sequence[str], expected: bool
    ) -> Iterator[tuple[Tensor, Part]]:
        records = lane.records[: len(names)]
        sizes = self.guard.call(
            lane,
            "read",
            lambda: self._store.read(names, records),
            moved=lambda sizes: sum(size or 0 for size in sizes),
        )
        for name, record, size in zip(names, records, sizes, strict=False):
            if size is None:
                raise self.guard.fault("read", "missing") if expected else Fault("missing")
            part = verify(record[:size], name) if size <= len(record) else None
            if part is None:
                self.discard(name)
                raise self.guard.fault("read", "corrupt")
            self.guard.count(read=1, bytes_read=size)
            yield record, part

    def _write_some(
        self, lane: Lane, names: Sequence[str], start: int, fill: Callable[[Tensor, int], Part]
    ) -> int:
        some = names[start : start + len(lane.records)]
        objects = [
            seal(record, name, fill(record, start + i))
            for i, (name, record) in enumerate(zip(some, lane.records, strict=False))
        ]
        nbytes = sum(len(data) for data in objects)
        write = functools.partial(self._store.write, some, objects)
        self.guard.call(lane, "write", write, moved=lambda result: nbytes)
        self.guard.count(written=len(some), bytes_written=nbytes)
        return len(some)

    def _attempt(self, function: Callable[[], None]) -> None:
        try:
            with self.guard.lane("remove") as lane:
                self.guard.call(lane, "remove", function)
        except Fault:
            pass

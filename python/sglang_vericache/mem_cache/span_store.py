"""Compressed copies in a remote store, beside the full KV that SGLang's HiCache keeps there.

A span is named by the hash of its last page, which covers everything before it, salt and adapter
included, as SGLang names the page itself.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from torch import Tensor

from sglang_vericache.compressors import create
from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.core import DraftView
from sglang_vericache.hooks import Hook
from sglang_vericache.mem_cache.spans import CompressedCopy, cut, join, span_tokens

logger = logging.getLogger(__name__)

# Copies that wait to be written; more are not kept, so that a slow store costs no memory.
MAX_PENDING = 8
# Names of spans known to be stored.
MAX_KNOWN = 1 << 16
# Spans read at once.
BATCH = 8
# Longest time that a request's full KV waits for its compressed copy to be read first.
MAX_WAIT_SECONDS = 3.0


class Storage(Protocol):
    """What is needed of a store; ``put`` and ``get_first`` raise nothing because of it."""

    @property
    def identity(self) -> str: ...

    def put(self, key: str, data: bytes) -> bool: ...

    def get_first(self, keys: Sequence[str]) -> list[bytes]: ...


class _Wanted(NamedTuple):
    reader: Hashable
    handle: Hashable
    names: list[str]


class _Copy(NamedTuple):
    names: list[str]
    view: DraftView
    keys: list[Tensor]
    values: list[Tensor]


class SpanCache:
    """Spans written or read last, in host memory: those of the next turn of a chat.

    Args:
        size: most bytes that are kept.
    """

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._spans: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = 0
        """Spans found."""

    @property
    def used(self) -> int:
        """Bytes kept."""
        return self._used

    def put(self, name: str, blob: bytes) -> None:
        """Keep a span, for others that have not been asked for longer."""
        if len(blob) > self._size:
            return
        with self._lock:
            self._used += len(blob) - len(self._spans.pop(name, b""))
            self._spans[name] = blob
            while self._used > self._size:
                self._used -= len(self._spans.popitem(last=False)[1])

    def get_first(self, names: Sequence[str]) -> list[bytes]:
        """Spans up to the first that is not there."""
        found = []
        with self._lock:
            for name in names:
                if name not in self._spans:
                    break
                self._spans.move_to_end(name)
                found.append(self._spans[name])
            self.hits += len(found)
        return found

    def clear(self) -> None:
        """Forget all spans."""
        with self._lock:
            self._spans.clear()
            self._used = 0


class SpanStore:
    """Writes and reads compressed copies on threads of its own.

    Args:
        storage: returns where spans go; None while nothing is attached.
        page_size: of the tree, whose prefix hashes name the spans.
        namespace: tells copies of this compressor from others.
        cache_bytes: of spans that are also kept in host memory.
    """

    def __init__(
        self,
        storage: Callable[[], Storage | None],
        page_size: int,
        namespace: str,
        cache_bytes: int = 0,
    ):
        self.cache = SpanCache(cache_bytes)
        self._storage, self._page_size = storage, page_size
        self.tokens = span_tokens(page_size)
        self._namespace = hashlib.sha256(namespace.encode()).hexdigest()[:16]
        # Names of spans that the store of this identity has.
        self._known: set[str] = set()
        self._known_in: tuple[int, str] | None = None
        self._copies: queue.Queue[_Copy] = queue.Queue(MAX_PENDING)
        self._wanted: queue.Queue[_Wanted] = queue.Queue()
        self._arrived: queue.Queue[tuple[Hashable, CompressedCopy]] = queue.Queue()
        # Whose copies are still to be read, by reader.
        self._unread: dict[Hashable, Hashable] = {}
        self._changed = threading.Condition()
        for work in (self._write_all, self._read_all):
            threading.Thread(target=work, daemon=True, name=f"vericache{work.__name__}").start()

    def names(self, tokens: Sequence[int], extra_key: str | None, salt: str | None) -> list[str]:
        """Keys of the whole spans of a prefix."""
        count = len(tokens) // self.tokens
        key = RadixKey(tokens[: count * self.tokens], extra_key=extra_key, cache_salt=salt)
        hashes = get_storage_hash_str(key, None, page_size=self._page_size) if count else []
        pages = self.tokens // self._page_size
        return [f"vericache-{self._namespace}-{name}" for name in hashes[pages - 1 :: pages]]

    def publish(
        self, names: list[str], view: DraftView, keys: list[Tensor], values: list[Tensor]
    ) -> bool:
        """Have the copy of a prefix written; see ``spans.cut`` for the arguments.

        Returns:
            False if too many wait already.
        """
        try:
            self._copies.put_nowait(_Copy(names, view, keys, values))
        except queue.Full:
            return False
        return True

    def wants(self, names: Sequence[str]) -> bool:
        """Whether to publish a copy of these names: it is not stored, and few wait already."""
        storage = self._storage()
        if storage is None or self._copies.full():
            return False
        return not self._known_to(storage).issuperset(names)

    def request(self, reader: Hashable, handle: Hashable, names: list[str]) -> None:
        """Begin to read the copy of a prefix.

        Args:
            reader: with whom it comes out of ``arrived``; differs from all before it.
            handle: of the request whose full KV should wait for it.
            names: of its spans.
        """
        with self._changed:
            self._unread[reader] = handle
        self._wanted.put(_Wanted(reader, handle, names))

    def cancel(self, reader: Hashable) -> None:
        """Nobody wants that copy any more; unknown readers are fine."""
        with self._changed:
            self._unread.pop(reader, None)
            self._changed.notify_all()

    def arrived(self) -> list[tuple[Hashable, CompressedCopy]]:
        """Copies read since the last call; those of which nothing was found are missing."""
        found = []
        while True:
            try:
                found.append(self._arrived.get_nowait())
            except queue.Empty:
                return found

    def wait_until_read(self, handle: Hashable) -> None:
        """Let the copy that a request asked for be read first; for who reads its full KV."""
        with self._changed:
            self._changed.wait_for(
                lambda: handle not in self._unread.values(), timeout=MAX_WAIT_SECONDS
            )

    def _write_all(self) -> None:
        while True:
            copy = self._copies.get()
            try:
                storage = self._storage()
                if storage is None:
                    continue
                blobs = cut(copy.view, copy.keys, copy.values, self.tokens)
                for name, blob in zip(copy.names, blobs, strict=True):
                    known = self._known_to(storage)
                    if name not in known and storage.put(name, blob):
                        known.add(name)
                        self.cache.put(name, blob)
            except Exception:  # the thread outlives whatever a store raises
                logger.exception("a compressed copy could not be stored")

    def _read_all(self) -> None:
        while True:
            wanted = self._wanted.get()
            try:
                blobs = self._read(wanted)
                if blobs:
                    self._arrived.put((wanted.reader, join(blobs, self.tokens)))
            except Exception:
                logger.exception("a compressed copy could not be read")
            finally:
                self.cancel(wanted.reader)

    def _read(self, wanted: _Wanted) -> list[bytes]:
        """Spans from the first on, as far as they are there; none if nobody wants them now."""
        blobs: list[bytes] = []
        storage = self._storage()
        if storage is None:
            return blobs
        self._known_to(storage)  # forgets what another store or other weights had
        blobs += self.cache.get_first(wanted.names)
        for start in range(len(blobs), len(wanted.names), BATCH):
            if wanted.reader not in self._unread:
                return []
            names = wanted.names[start : start + BATCH]
            found = storage.get_first(names)
            blobs += found
            self._known_to(storage).update(names[: len(found)])
            for name, blob in zip(names, found, strict=False):
                self.cache.put(name, blob)
            if len(found) < len(names):
                self._known_to(storage).discard(names[len(found)])
                break
        return blobs

    def _known_to(self, storage: Storage) -> set[str]:
        """Names that a store is known to hold under its present identity."""
        place = id(storage), storage.identity
        if place != self._known_in or len(self._known) >= MAX_KNOWN:
            self._known, self._known_in = set(), place
            self.cache.clear()
        return self._known


def namespace_of(config: VeriCacheConfig) -> str:
    """What chose the tokens of a copy; model, dtype and layout are the storage's business."""
    settings = config.compressor_settings
    dropper = create(config.compressor, settings)
    return repr((dropper.name, sorted(vars(dropper).items()), settings.budget))


def before_transfer(self: Any, operation: Any, *args: Any, **kwargs: Any) -> None:
    """``HiCacheController._page_transfer_kv_batch`` before: compressed copies come first."""
    store: SpanStore | None = getattr(self, "vericache_spans", None)
    if store is not None and not getattr(operation, "vericache_waited", False):
        operation.vericache_waited = True  # once for all of its batches
        store.wait_until_read(operation.handle)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.cache_controller.HiCacheController._page_transfer_kv_batch",
        (
            *("self", "operation", "batch_hashes", "batch_host_indices", "extra_info"),
            "kv_derived_transfers",
        ),
        "before",
        before_transfer,
        "reads in the order of arrival",
    ),
)

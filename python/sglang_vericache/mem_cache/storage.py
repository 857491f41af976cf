"""SGLang's storage backend (HiCache L3) that trusts no store.

``SafeStorage`` stands between HiCache and a store. Names carry one digest of whatever shapes KV
bytes, objects carry a checksum, calls are bounded in time: a store that fails, lies, hangs or is
gone is a miss. Bytes reach the host pool only after they were checked.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from sglang_vericache.mem_cache.storage_guard import Options
from sglang_vericache.mem_cache.storage_objects import Objects
from sglang_vericache.mem_cache.storage_record import Part, checksum, payload
from sglang_vericache.mem_cache.storage_stores import Store

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache


class SafeStorage(HiCacheStorage):
    """Pages of a host pool, and any other bytes, in a store.

    No method raises because of the store. Any thread may call any method; all but ``usage`` and
    ``identity`` may take as long as a few calls (``Options.timeout_s``).

    Args:
        store: where objects are.
        identity: digest of what two servers must share to share bytes; hexadecimal.
        pool: host pool whose pages are stored.
        options: bounds.
    """

    def __init__(self, store: Store, identity: str, pool: HostKVCache, options: Options):
        self._pool, self._identity = pool, identity
        page = pool.get_data_page(0, flat=False)
        self._page = Part(used=page.nbytes, total=page.nbytes)
        self._objects = Objects(store, page.nbytes, options)

    @property
    def identity(self) -> str:
        """Digest that names carry; changes with ``renew_identity``."""
        return self._identity

    def renew_identity(self) -> None:
        """Share nothing with anybody from now on: the weights are no longer those of the files."""
        self._identity = secrets.token_hex(len(self._identity) // 2)

    def interrupted(self) -> AbstractContextManager[None]:
        """While entered, all methods return early: their threads are about to be joined."""
        return self._objects.guard.interrupted()

    def usage(self) -> dict[str, Any]:
        """``identity`` and the fields of ``StorageCounters``, as JSON-ready values."""
        return {"identity": self._identity, **self._objects.guard.snapshot()}

    # ---- Pages ----

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages are there, up to the first that is not."""
        existing = self._objects.exist([self._name(key) for key in keys]) or []
        return existing.index(False) if False in existing else len(existing)

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool, up to the first that does not arrive as it was written.

        Args:
            keys: of pages.
            host_indices: int64 ``[len(keys) * page_size]``, slots of the host pool.

        Returns:
            Whether each page is in its slots; other slots are untouched.
        """
        slots = self._first_slots(keys, host_indices)
        done = 0
        for record, part in self._objects.read([self._name(key) for key in keys]):
            if part != self._page:
                break
            data = record[: part.used].view(self._pool.dtype)
            self._pool.set_from_flat_data_page(slots[done], data)
            done += 1
        return [True] * done + [False] * (len(keys) - done)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool, but for those that are there; arguments as above.

        Returns:
            Whether each page is stored now.
        """
        slots = self._first_slots(keys, host_indices)
        names = [self._name(key) for key in keys]
        stored = self._objects.exist(names)
        if stored is None:
            return [False] * len(names)
        missing = [i for i, there in enumerate(stored) if not there]

        def fill(record: Tensor, i: int) -> Part:
            page = self._pool.get_data_page(slots[missing[i]], flat=False)
            record[: page.nbytes].view(page.dtype).view(page.shape).copy_(page)
            return self._page

        written = self._objects.write([names[i] for i in missing], fill)
        for i in missing[:written]:
            stored[i] = True
        return stored

    # ---- Other bytes ----

    def put(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Store bytes under any string; a key stands for its bytes, so never put others there.

        Returns:
            Whether ``get`` would find them.
        """
        view = memoryview(data).cast("B")
        whole, size = checksum(view), self._objects.size
        names = self._names(key, len(view))
        stored = self._objects.exist(names)
        if stored is None:
            return False
        # The first part is written last: without it there is nothing.
        order = [i for i in (*range(1, len(names)), 0) if not stored[i]]

        def fill(record: Tensor, i: int) -> Part:
            part = Part(len(view[order[i] * size :][:size]), len(view), whole)
            payload(record, part)[:] = view[order[i] * size :][:size]
            return part

        return self._objects.write([names[i] for i in order], fill) == len(order)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> bytes | None:
        """The bytes put under a key; None if they are not there, or not all of them as they were.

        ``target_location`` and ``target_sizes`` belong to SGLang's signature and are ignored.
        """
        return next(iter(self.get_first([key])), None)

    def get_first(self, keys: Sequence[str]) -> list[bytes]:
        """As ``get``, of several keys in few calls: up to the first that it brings nothing of."""
        found: list[bytes] = []
        starts = self._pieces([self._names(key, 0)[0] for key in keys], expected=False)
        for key, (first, start) in zip(keys, starts, strict=False):
            pieces = [(first, start), *self._pieces(self._names(key, first.total)[1:])]
            data = b"".join(piece for _, piece in pieces)
            parts = {(part.total, part.whole) for part, _ in pieces}
            if parts != {(first.total, first.whole)} or checksum(data) != first.whole:
                break
            found.append(data)
        return found

    # ---- The rest of SGLang's interface ----

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Not used: pages go through ``batch_get_v1``, which needs no copies of them."""
        raise NotImplementedError

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Not used; see ``put``."""
        raise NotImplementedError

    def batch_set(
        self,
        keys: Any,
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Not used; see ``batch_set_v1``."""
        raise NotImplementedError

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse what is not the KV of full attention.

        Raises:
            ValueError: names the pool.
        """
        if host_pool is not self._pool:
            raise ValueError(
                f"--hicache-storage-backend: VeriCache stores KV of full attention only, not "
                f"{host_pool_name}"
            )

    def clear(self) -> None:
        """Empty the store, for other servers too."""
        self._objects.clear()

    def close(self) -> None:
        """Let go of the store."""
        self._objects.close()

    def _name(self, key: str) -> str:
        return f"{self._identity}-{key}"

    def _names(self, key: str, total: int) -> list[str]:
        """Names of the objects that hold ``total`` bytes."""
        stem = self._name(hashlib.sha256(key.encode()).hexdigest()[:32])
        return [f"{stem}.{i}" for i in range(max(1, -(-total // self._objects.size)))]

    def _pieces(self, names: Sequence[str], expected: bool = True) -> list[tuple[Part, bytes]]:
        read = self._objects.read(names, expected)
        return [(part, bytes(payload(record, part))) for record, part in read]

    def _first_slots(self, keys: Sequence[str], host_indices: Tensor) -> list[int]:
        slots: list[int] = host_indices[:: self._pool.page_size].tolist()
        assert len(slots) == len(keys), (len(slots), len(keys))
        return slots

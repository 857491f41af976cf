"""Stores below ``SafeStorage``: SGLang's backends, asked for whole objects.

SGLang hands a backend pages of its host pool, in a form that differs from backend to backend and
with the pool's layout. Here every backend reads and writes memory of ours, so a
store sees one object a page whatever the layout, and no byte reaches the pool before it is checked.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class StoreError(RuntimeError):
    """The store did not do what it was asked to."""


class Store(ABC):
    """One kind of store.

    Methods may raise anything, take any time and be called from several threads. Names are ASCII,
    at most 96 characters, without a path separator. A name stands for its bytes: writing one that
    exists may do nothing.
    """

    def attach(self, buffer: Tensor) -> None:  # noqa: B027 - most stores need nothing
        """Prepare to copy from and to this memory (uint8), of which all records are slices."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each object is there.

        Raises:
            StoreError: the store cannot tell.
        """

    @abstractmethod
    def read(self, names: Sequence[str], records: Sequence[Tensor]) -> list[int | None]:
        """Copy objects into records (uint8).

        Returns:
            Size of each in bytes, up to the first that is missing (None) or has no room in its
            record, which then may hold anything.

        Raises:
            StoreError: the store failed.
        """

    @abstractmethod
    def write(self, names: Sequence[str], objects: Sequence[Tensor]) -> None:
        """Store objects (uint8).

        Raises:
            StoreError: not all of them were stored.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Forget an object that is no good."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all objects, other servers' too."""

    def close(self) -> None:  # noqa: B027
        """Let go of the store."""


class FileStore(Store):
    """A directory, one file an object: ``sglang.srt.mem_cache.hicache_storage.HiCacheFile``."""

    def __init__(self, backend: Any):
        self._backend = backend

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [self._backend.exists(name) for name in names]

    def read(self, names: Sequence[str], records: Sequence[Tensor]) -> list[int | None]:
        sizes: list[int | None] = []
        for name, record in zip(names, records, strict=True):
            sizes.append(self._read(name, record))
            if sizes[-1] is None:
                break
        return sizes

    def write(self, names: Sequence[str], objects: Sequence[Tensor]) -> None:
        for name, data in zip(names, objects, strict=True):
            if not self._backend.set(name, data):  # it has logged why
                raise StoreError(f"{self._backend.file_path} took no file for {name}")

    def remove(self, name: str) -> None:
        if self._backend.metadata_cache is not None:
            self._backend.metadata_cache.remove(self._backend._get_suffixed_key(name))
        os.remove(self._path(name))

    def clear(self) -> None:
        self._backend.clear()

    def _read(self, name: str, record: Tensor) -> int | None:
        try:
            size = os.path.getsize(self._path(name))
        except FileNotFoundError:
            return None
        if size > len(record):
            return size
        return None if self._backend.get(name, record[:size]) is None else size

    def _path(self, name: str) -> str:
        file = f"{self._backend._get_suffixed_key(name)}.bin"
        return os.path.join(self._backend.file_path, file)


class MooncakeStore(Store):
    """Mooncake's distributed store, set up by SGLang's backend of that name."""

    # Mooncake's ErrorCode; an object larger than its record is an invalid parameter.
    NOT_FOUND, INVALID = -704, -600

    def __init__(self, backend: Any):
        self._backend = backend
        self._client = backend.store

    def attach(self, buffer: Tensor) -> None:
        self._backend.register_buffer(buffer)

    def exists(self, names: Sequence[str]) -> list[bool]:
        codes = self._client.batch_is_exist(list(names))
        if min(codes) < 0:
            raise StoreError(f"Mooncake error {min(codes)}")
        return [code == 1 for code in codes]

    def read(self, names: Sequence[str], records: Sequence[Tensor]) -> list[int | None]:
        codes = self._client.batch_get_into(list(names), *_places(records))
        sizes: list[int | None] = []
        for code, record in zip(codes, records, strict=True):
            if code < 0 and code not in (self.NOT_FOUND, self.INVALID):
                raise StoreError(f"Mooncake error {code}")
            sizes.append({self.NOT_FOUND: None, self.INVALID: len(record) + 1}.get(code, code))
        return sizes

    def write(self, names: Sequence[str], objects: Sequence[Tensor]) -> None:
        codes = self._client.batch_put_from(list(names), *_places(objects))
        if min(codes) < 0:
            raise StoreError(f"Mooncake error {min(codes)}")

    def remove(self, name: str) -> None:
        self._client.remove(name, True)  # although it was just read

    def clear(self) -> None:
        self._backend.clear()


def _places(memory: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return [piece.data_ptr() for piece in memory], [len(piece) for piece in memory]


STORES: dict[str, type[FileStore] | type[MooncakeStore]] = {
    "file": FileStore,
    "mooncake": MooncakeStore,
}

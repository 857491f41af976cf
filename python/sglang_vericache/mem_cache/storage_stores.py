"""Stores below ``SafeStorage``: SGLang's backends, asked for whole objects of one size.

SGLang hands a backend pages of its host pool, in a form that differs from backend to backend and
with the pool's layout. Here every backend reads and writes flat records in memory of ours, so a
store sees one object a page whatever the layout, and no byte reaches the pool before it is checked.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import Tensor


class StoreError(RuntimeError):
    """The store did not do what it was asked to."""


class Outcome(Enum):
    """What reading one object brought."""

    READ = "read"
    MISSING = "missing"
    SHORT = "short"
    """There is one, of another size."""


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
    def read(self, names: Sequence[str], records: Sequence[Tensor]) -> list[Outcome]:
        """Fill records (uint8); after the first that is not ``READ`` they may hold anything.

        Raises:
            StoreError: the store failed.
        """

    @abstractmethod
    def write(self, names: Sequence[str], records: Sequence[Tensor]) -> None:
        """Store records.

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

    def read(self, names: Sequence[str], records: Sequence[Tensor]) -> list[Outcome]:
        outcomes = []
        for name, record in zip(names, records, strict=True):
            outcomes.append(self._read(name, record))
            if outcomes[-1] is not Outcome.READ:
                break
        return outcomes

    def write(self, names: Sequence[str], records: Sequence[Tensor]) -> None:
        for name, record in zip(names, records, strict=True):
            if not self._backend.set(name, record):  # it has logged why
                raise StoreError(f"{self._backend.file_path} took no file for {name}")

    def remove(self, name: str) -> None:
        if self._backend.metadata_cache is not None:
            self._backend.metadata_cache.remove(self._backend._get_suffixed_key(name))
        os.remove(self._path(name))

    def clear(self) -> None:
        self._backend.clear()

    def _read(self, name: str, record: Tensor) -> Outcome:
        path = self._path(name)
        if os.path.exists(path) and os.path.getsize(path) != len(record):
            return Outcome.SHORT
        found = self._backend.get(name, record)
        return Outcome.MISSING if found is None else Outcome.READ

    def _path(self, name: str) -> str:
        file = f"{self._backend._get_suffixed_key(name)}.bin"
        return os.path.join(self._backend.file_path, file)


class MooncakeStore(Store):
    """Mooncake's distributed store, set up by SGLang's backend of that name."""

    # Mooncake's ErrorCode; sizes that do not fit are an invalid parameter.
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

    def read(self, names: Sequence[str], records: Sequence[Tensor]) -> list[Outcome]:
        codes = self._client.batch_get_into(list(names), *_places(records))
        outcomes = []
        for code, record in zip(codes, records, strict=True):
            if code == self.NOT_FOUND:
                outcomes.append(Outcome.MISSING)
            elif code == self.INVALID or 0 <= code < len(record):
                outcomes.append(Outcome.SHORT)
            elif code < 0:
                raise StoreError(f"Mooncake error {code}")
            else:
                outcomes.append(Outcome.READ)
        return outcomes

    def write(self, names: Sequence[str], records: Sequence[Tensor]) -> None:
        codes = self._client.batch_put_from(list(names), *_places(records))
        if min(codes) < 0:
            raise StoreError(f"Mooncake error {min(codes)}")

    def remove(self, name: str) -> None:
        self._client.remove(name, True)  # although it was just read

    def clear(self) -> None:
        self._backend.clear()


def _places(records: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return [record.data_ptr() for record in records], [len(record) for record in records]


STORES: dict[str, type[FileStore] | type[MooncakeStore]] = {
    "file": FileStore,
    "mooncake": MooncakeStore,
}

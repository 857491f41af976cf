"""Packed copies of what running requests keep: a pool for each codec, slots for each request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sgl_kernel_ext import CODECS, ViewPool
from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.packed import PackedPool
from sglang_vericache.mem_cache.views import ViewStore, gather_listed

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache
    from torch import Tensor

    from sglang_vericache.speculative.state import RequestState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A request's packed copy: ``slots`` of the pool of ``codec``, filed under ``row``."""

    state: RequestState
    codec: str
    slots: Tensor
    row: int


class PackedViews:
    """Packs views, files them, and gives slots back when a view is replaced or its request ends.

    Args:
        kv: the KV pool.
        store: where views are filed.
        tokens: slots of each pool.
        add_view_pool: tells the attention backend of a new pool and returns its number.
    """

    def __init__(
        self,
        kv: KVCache,
        store: ViewStore,
        tokens: int,
        add_view_pool: Callable[[Sequence[ViewPool]], int],
    ) -> None:
        self._kv, self._store, self._tokens = kv, store, tokens
        self._add_view_pool = add_view_pool
        self._pools: dict[str, PackedPool] = {}
        self._numbers: dict[str, int] = {}
        self._unaffordable: set[str] = set()
        self._held: dict[int, Held] = {}
        # Codec and slots lent to whoever asked, by borrower; and how to ask for them all.
        self._lent: dict[Hashable, tuple[str, Tensor]] = {}
        self.give_up_room: Callable[[], None] = lambda: None

    def pool(self, codec: str) -> PackedPool:
        """The pool of a codec, made when it is first asked for."""
        if codec not in self._pools:
            keys = self._kv.get_key_buffer(self._kv.start_layer)
            _, heads, dim = keys.shape
            layers = self._kv.layer_num
            pool = PackedPool(CODECS[codec], self._tokens, layers, heads, dim, keys.device)
            self._pools[codec] = pool
            self._numbers[codec] = self._add_view_pool(pool.layers)
        return self._pools[codec]

    def number(self, codec: str) -> int:
        """Of the pool of a codec, as in ``ViewLists.pool``."""
        self.pool(codec)
        return self._numbers[codec]

    def _is_affordable(self, codec: str) -> bool:
        """Whether the pool of a codec exists or could be made."""
        if codec in self._unaffordable:
            return False
        try:
            self.pool(codec)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for packed KV of %s: %s", codec, error)
            self._unaffordable.add(codec)
            return False
        return True

    def holds(self, state: RequestState) -> bool:
        """Whether drafts of a request read a packed copy."""
        return state.serial in self._held

    def has_room(self, state: RequestState) -> bool:
        """Whether there is room now for the copy that a request, ``barred``, found none for."""
        codec = state.dropper.codec
        assert codec is not None and not self.holds(state)
        if not self._is_affordable(codec):
            return False
        return self.pool(codec).available() + self._lent_of(codec) >= state.barred

    def file(self, state: RequestState, view: DraftView, slots: Tensor) -> bool:
        """Pack what a view lists and file the copy.

        Args:
            state: of a request that holds no copy.
            view: positions per layer.
            slots: int32 ``[T]``, slots of the KV pool of positions ``0 .. T - 1``.

        Returns:
            False if the pool has no room or there is no memory for it: nothing has changed then.

        Raises:
            torch.OutOfMemoryError: there is none to fill it; nothing has changed either.
        """
        codec = state.dropper.codec
        assert codec is not None and not self.holds(state)
        if not self._is_affordable(codec):
            return False
        pool = self.pool(codec)
        wanted = max(view.kept)
        if pool.available() < wanted and self._lent_of(codec):
            self.give_up_room()
        packed = pool.alloc(wanted)
        if packed is None:
            return False
        try:
            for layer, positions in enumerate(view.layers):
                lists = slots[positions.long()].long()
                buffers = self._kv.get_kv_buffer(self._kv.start_layer + layer)
                keys, values = (gather_listed(buffer, lists) for buffer in buffers)
                pool.write(layer, keys, values, packed[: lists.shape[1]])
            self._store.put_elsewhere(state.row, view, packed, self._numbers[codec])
        except torch.OutOfMemoryError:
            pool.free(packed)
            raise
        self._held[state.serial] = Held(state, codec, packed, state.row)
        return True

    def listed(self, state: RequestState, layer: int) -> tuple[Sequence[Tensor], Tensor]:
        """The copy of a request that holds one.

        Returns:
            Packed keys and values of a layer, ``[pool slots, HKV, row bytes]`` each of a divisible
            copy, and the slots of the listed tokens in their order, at least as many as the layer
            lists.
        """
        held = self._held[state.serial]
        pool = self._pools[held.codec].layers[layer]
        return (pool.keys, pool.values), held.slots

    def lend(self, borrower: Hashable, codec: str, tokens: int) -> Tensor | None:
        """Slots for a borrower, which has none yet, until ``take_back``; None without room.

        Requests that file a copy come first: ``give_up_room`` is called before one finds no room.
        """
        assert borrower not in self._lent
        slots = self.pool(codec).alloc(tokens)
        if slots is not None:
            self._lent[borrower] = codec, slots
        return slots

    def take_back(self, borrower: Hashable) -> None:
        """Free what was lent."""
        codec, slots = self._lent.pop(borrower)
        self._pools[codec].free(slots)

    def _lent_of(self, codec: str) -> int:
        return sum(len(slots) for lent, slots in self._lent.values() if lent == codec)

    def release(self, state: RequestState) -> None:
        """Free the copy of a request, if it holds one."""
        held = self._held.pop(state.serial, None)
        if held is not None:
            self._pools[held.codec].free(held.slots)
            self._store.forget(held.row)

    def retain(self, states: Sequence[RequestState]) -> None:
        """Free the copies of all requests but these."""
        running = {state.serial for state in states}
        for held in [h for serial, h in self._held.items() if serial not in running]:
            self.release(held.state)

    def usage(self) -> dict[str, dict[str, int]]:
        """By codec in use, ``tokens`` and ``bytes`` of its pool and the tokens ``used``.

        Slots of ended requests do not count: they are freed before anybody asks for some.
        """
        used = {codec: self._lent_of(codec) for codec in self._pools}
        for held in self._held.values():
            if not held.state.req.finished():
                used[held.codec] += len(held.slots)
        return {
            codec: {"tokens": pool.tokens, "bytes": pool.nbytes, "used": used[codec]}
            for codec, pool in self._pools.items()
        }

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every slot is free or held, and not both."""
        for codec, pool in self._pools.items():
            held = [h.slots for h in self._held.values() if h.codec == codec]
            lent = [slots for other, slots in self._lent.values() if other == codec]
            pool.check_integrity([*held, *lent])

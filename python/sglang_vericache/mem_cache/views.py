"""Where lists of KV slots live, one block per request row, in one flat tensor.

A view names slots of SGLang's own KV pool, or of another one (``put_elsewhere``). In the KV pool it
is zero-copy while the radix tree keeps the slots of the request's full KV locked; the listed tokens
of a request that gives those up are copied (``relocate``). What was generated since the view was
chosen is not listed; readers add that run of ``req_to_token`` themselves.

Beside its view a request may have a list of all its full KV in host memory, for verify passes that
read it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_vericache.attention.rows import ViewLists
from sglang_vericache.core import DraftView

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache


def gather_listed(buffer: Tensor, lists: Tensor) -> Tensor:
    """Rows of a pool that the lists of one layer name.

    Args:
        buffer: ``[slots, HKV, D]``.
        lists: int64 ``[Hs, n]`` slots; one list for all heads, or one for each.

    Returns:
        ``[n, HKV, D]``.
    """
    if lists.shape[0] == 1:
        return buffer[lists[0]]
    heads = torch.arange(lists.shape[0], device=lists.device)[:, None]
    return buffer[lists, heads].transpose(0, 1)


def _lengths(view: DraftView, like: Tensor) -> Tensor:
    """``[L, heads]`` listed tokens of every layer and head, as ``like`` ``[L, rows, heads]``."""
    heads = like.shape[-1]
    by_head = [lists * heads if len(lists) == 1 else lists for lists in view.list_lengths]
    return torch.tensor(by_head, dtype=like.dtype, device=like.device)


class ViewStore:
    """Slot lists of all running requests.

    Args:
        rows: rows of ``req_to_token``; a view is filed under its request's row.
        layers: attention layers L.
        heads: lists per layer, 1 or the number of KV heads (Hv); see ``widen``.
        capacity: longest list in tokens; grows when a longer one is filed.
        device: where the KV pool is.
        width: longest list of full KV in host memory; 0 if there are none.
    """

    def __init__(
        self,
        rows: int,
        layers: int,
        heads: int,
        capacity: int,
        device: torch.device,
        width: int = 0,
    ):
        self.capacity = capacity
        self.host_length = torch.zeros(rows, dtype=torch.int32, device=device)
        full = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self.length = torch.zeros((layers, rows, heads), dtype=torch.int32, device=device)
        # The pool of each row's view, and by row the lists of views that are not in the KV pool.
        self.pool = torch.zeros(rows, dtype=torch.int32, device=device)
        self._elsewhere: dict[int, Tensor] = {}
        # The pool of full KV in host memory.
        self.host_pool = 0
        self._file(torch.zeros((rows, layers, heads, capacity), dtype=torch.int32), full)
        # The same lengths on the host, by row.
        self._kept: dict[int, tuple[int, ...]] = {}

    def _file(self, views: Tensor, full: Tensor) -> None:
        """Lay out all lists in one flat tensor; nothing changes if there is no memory for it."""
        self._flat = torch.cat([views.flatten().to(full.device), full.flatten()])
        self.indices = self._flat[: views.numel()].view_as(views)
        self.host = self._flat[views.numel() :].view_as(full)
        self.start = self._offsets()
        for row, slots in self._elsewhere.items():
            self._share(row, slots)
        self.host_start = (
            views.numel() + torch.arange(len(full), device=full.device) * full.shape[1]
        )

    def _offsets(self) -> Tensor:
        """Where the list of each layer, row and head begins, unless a row shares one."""
        rows, layers, heads, capacity = self.indices.shape
        offsets = torch.arange(rows * layers * heads, device=self._flat.device) * capacity
        return offsets.view(rows, layers, heads).transpose(0, 1).contiguous()

    def widen(self, heads: int) -> None:
        """Make room for ``heads`` lists a layer; views filed so far are repeated for each head."""
        if self.indices.shape[2] == heads:
            return
        assert self.indices.shape[2] == 1, self.indices.shape
        self._file(self.indices.repeat(1, 1, heads, 1), self.host)
        self.length = self.length.repeat(1, 1, heads)

    def _grow(self, capacity: int) -> None:
        """Make room for lists of ``capacity`` tokens; what was filed stays."""
        wider = self.indices.new_zeros((*self.indices.shape[:3], capacity))
        wider[..., : self.capacity] = self.indices
        self._file(wider, self.host)
        self.capacity = capacity

    def _share(self, row: int, slots: Tensor) -> None:
        """File one list for all layers and heads: it may take the row's whole block."""
        block = self.indices[row].view(-1)
        block[: len(slots)] = slots
        self.start[:, row] = row * len(block)

    def put(self, row: int, view: DraftView, slots: Tensor) -> None:
        """File a view in the KV pool; one in another pool must be forgotten first.

        Args:
            row: the request's row of ``req_to_token``.
            view: positions per layer.
            slots: int32 ``[T]``, slots of positions ``0 .. T - 1`` of the request.
        """
        assert row not in self._elsewhere
        if max(view.kept) > self.capacity:
            self._grow(max(max(view.kept), self.capacity * 3 // 2))
        self._kept[row] = view.kept
        for layer, positions in enumerate(view.layers):
            self.indices[row, layer, :, : positions.shape[1]] = slots[positions.long()]
        self.length[:, row] = _lengths(view, self.length)

    def put_elsewhere(self, row: int, view: DraftView, slots: Tensor, pool: int) -> None:
        """File a view whose tokens were copied to another pool.

        Args:
            row: the request's row of ``req_to_token``.
            view: positions per layer.
            slots: int32, as many as the longest list; entry ``j`` holds the j-th listed token of
                every layer and head.
            pool: number of the pool, from 1.
        """
        _, layers, heads, _ = self.indices.shape
        if len(slots) > layers * heads * self.capacity:
            self._grow(-(-len(slots) // (layers * heads)))
        self._kept[row], self._elsewhere[row] = view.kept, slots
        self.pool[row] = pool
        self._share(row, slots)
        self.length[:, row] = _lengths(view, self.length)

    def forget(self, row: int) -> None:
        """Forget a view that is in another pool."""
        del self._elsewhere[row]
        self.pool[row] = 0
        self.length[:, row] = 0
        self.start[:, row] = self._offsets()[:, row]

    def relocate(self, row: int, pool: KVCache, slots: Tensor) -> None:
        """Copy what a filed view lists to slots of its own, and list those.

        Args:
            row: the request's row of ``req_to_token``.
            pool: keys and values of all layers.
            slots: int64 ``[n]``, at least as many as the longest list of the row; entry ``j`` holds
                the j-th listed token of every layer and head.
        """
        for layer in range(self.indices.shape[1]):
            lists = self.indices[row, layer]
            count = self._kept[row][layer]
            source, target = lists[:, :count].long(), slots[:count]
            for buffer in pool.get_kv_buffer(pool.start_layer + layer):
                buffer[target] = gather_listed(buffer, source)
            lists[:, :count] = target.int()

    def longest(self, row: int) -> int:
        """Tokens in the longest list of a filed view."""
        return max(self._kept[row])

    def put_host(self, row: int, slots: Tensor) -> None:
        """File where the full KV of a request is in host memory, int64 ``[n]`` host slots."""
        self.host[row, : len(slots)] = slots.to(self.host.device)
        self.host_length[row] = len(slots)

    def lists(self, req_row: Tensor, drafting: Tensor, on_host: Tensor | None = None) -> ViewLists:
        """Kernel arguments for one pass.

        Args:
            req_row: int64 ``[G]`` rows of the requests.
            drafting: int32 ``[G]``, 1 where the group reads its view, 0 where its full KV.
            on_host: int32 ``[G]``, 1 where the full KV is read in host memory; None: nowhere.
        """
        start, length = self.start[:, req_row], self.length[:, req_row] * drafting[:, None]
        longest = max(self.capacity, *map(len, self._elsewhere.values()), 0)
        pool = self.pool[req_row] * drafting if self._elsewhere else None
        if on_host is not None:
            there = on_host.bool()[None, :, None]
            start = torch.where(there, self.host_start[req_row][None, :, None], start)
            length = torch.where(there, self.host_length[req_row][None, :, None], length)
            longest = max(longest, self.host.shape[1])
            host = on_host * self.host_pool
            pool = host if pool is None else pool + host
        return ViewLists(self._flat, start, length, longest, pool)

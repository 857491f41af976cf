"""Copies from the host that leave out the tokens a compressed copy has.

A dropper's compressed copy holds some tokens of each layer as they are. When the full KV comes back
those go from slot to slot on the device and the others alone over the link (the missing KV of
VeriCache, arXiv 2605.17613). SGLang moves whole pages, so what is left out are whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.l2_transfer import L2TransferEngine
from torch import Tensor

from sgl_kernel_ext import copy_rows
from sglang_vericache.core import DraftView


class Way(NamedTuple):
    """From where to where tokens of one layer go: int64 ``[n]`` slots each."""

    source: Tensor
    target: Tensor


class Parts:
    """Which tokens of a prefix its compressed copy has, layer by layer, and which it lacks.

    What it knows takes four bytes a token and layer, on the device and once more on the host.

    Args:
        view: what the copy was made from.
        length: tokens of the prefix, a multiple of the page size; may be less than the view's.
        page_size: what is copied from the host are whole pages of this size.
    """

    def __init__(self, view: DraftView, length: int, page_size: int) -> None:
        self.length = length
        # By layer, ascending: entries of the copy, their positions, and positions it lacks.
        entries_of, held, lacking = [], [], []
        device = view.layers[0].device
        lists = torch.cat([positions.flatten() for positions in view.layers]).cpu().long()
        sizes = [positions.numel() for positions in view.layers]
        for positions, flat in zip(view.layers, lists.split(sizes), strict=True):
            by_head = flat.view(positions.shape)
            # With a list for each head an entry is a token only where all of them name it.
            common = (by_head == by_head[:1]).all(dim=0) & (by_head[0] < length)
            entries = common.nonzero()[:, 0]
            tokens = by_head[0, entries]
            there = torch.zeros(length, dtype=torch.bool)
            there[tokens] = True
            there = there.view(-1, page_size).all(dim=1).repeat_interleave(page_size)
            whole = there[tokens]
            entries_of.append(entries[whole])
            held.append(tokens[whole])
            lacking.append((~there).nonzero()[:, 0])
        self._entries, self._held = _Layered(entries_of, device), _Layered(held, device)
        self._lacking = _Layered(lacking, device)

    def held(self, copy: Tensor, target: Tensor) -> list[Way]:
        """Ways of what the copy has.

        Args:
            copy: int64, slots of the compressed copy.
            target: int64 ``[n]``, where the last n tokens of the prefix are wanted.
        """
        start = self.length - len(target)
        first = self._held.first(start)
        entries, counts = self._entries.since(first)
        tokens, _ = self._held.since(first)
        return _ways(copy[entries], target[tokens - start], counts)

    def lacking(self, host: Tensor, target: Tensor) -> list[Way]:
        """Ways of what the copy lacks.

        Args:
            host: int64 ``[n]``, host slots of the last n tokens of the prefix.
            target: int64 ``[n]``, where they are wanted.
        """
        start = self.length - len(target)
        tokens, counts = self._lacking.since(self._lacking.first(start))
        wanted = tokens - start
        return _ways(host.to(target.device)[wanted], target[wanted], counts)


class _Layered:
    """Ascending numbers of each layer, one layer after the other in a tensor on the device."""

    def __init__(self, layers: Sequence[Tensor], device: torch.device) -> None:
        flat = torch.cat(list(layers)).int()
        self._layers = flat.split([len(layer) for layer in layers])
        self._flat = flat.to(device)

    def first(self, number: int) -> list[int]:
        """By layer, how many are below ``number``."""
        if number == 0:
            return [0] * len(self._layers)
        return [int(torch.searchsorted(layer, number)) for layer in self._layers]

    def since(self, first: Sequence[int]) -> tuple[Tensor, list[int]]:
        """All but the first ones of each layer, and how many that are."""
        counts = [len(layer) - at for layer, at in zip(self._layers, first, strict=True)]
        if not any(first):
            return self._flat, counts
        whole = self._flat.split([len(layer) for layer in self._layers])
        return torch.cat([layer[at:] for layer, at in zip(whole, first, strict=True)]), counts


def _ways(source: Tensor, target: Tensor, counts: Sequence[int]) -> list[Way]:
    return list(map(Way, source.split(list(counts)), target.split(list(counts))))


def merged(each: Sequence[Sequence[Way]], device: torch.device | str) -> list[Way]:
    """Ways of several copies that become one, as int64 slots on ``device``."""
    layers = list(zip(*each, strict=True))
    counts = [sum(len(way.source) for way in ways) for ways in layers]
    flat = (torch.cat([way[i] for ways in layers for way in ways]).long() for i in (0, 1))
    source, target = (slots.to(device) for slots in flat)
    return _ways(source, target, counts)


def whole(host: Tensor, target: Tensor, layers: int) -> list[Way]:
    """Ways of tokens of which nothing is left out."""
    return [Way(host.to(target.device), target)] * layers


def copy_held(pool: Any, ways: Sequence[Way]) -> None:
    """Copy tokens from slot to slot of SGLang's KV pool, on the current stream."""
    for layer, (source, target) in enumerate(ways, start=pool.start_layer):
        for buffer in pool.get_kv_buffer(layer):
            copy_rows(buffer, source, buffer, target)


class PartTransferEngine(L2TransferEngine):
    """SGLang's copies between host and device, each layer of a load with slots of its own."""

    def __init__(self, io_backend: str) -> None:
        super().__init__(io_backend)
        self.ways: Sequence[Way] = ()
        """What the next load moves, by layer; empty: all that its transfer names."""

    def submit_host_to_device(self, transfers: list[Any], **kwargs: Any) -> Any:
        """As stock, which runs a load as an inner loop over the layers of each transfer."""
        if self.ways:
            kv, *others = transfers
            transfers = [kv._replace(host_pool=_LayerWise(kv.host_pool, self.ways)), *others]
            self.ways = ()
        return super().submit_host_to_device(transfers, **kwargs)


class _LayerWise:
    """A host pool that loads other slots for each layer than the transfer names."""

    def __init__(self, pool: Any, ways: Sequence[Way]) -> None:
        self._pool, self._ways = pool, ways

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def load_to_device_per_layer_physical(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        way = self._ways[layer_id]
        if len(way.source) == 0:
            return
        for slots in way:
            if slots.is_cuda:  # made on another stream
                slots.record_stream(torch.cuda.current_stream(slots.device))
        self._pool.load_to_device_per_layer_physical(
            device_pool, way.source, way.target, layer_id, io_backend, is_draft=is_draft
        )

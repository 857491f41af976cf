"""Compressed copies as bytes: what a draft view lists, cut into spans of equally many tokens.

A span can be read without the others, so whoever shares only the beginning of a prompt finds that
part of its compressed copy. Keys carry their rotary embedding, so a reader needs no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sglang_vericache.core import DraftView

SPAN_TOKENS = 128


def span_tokens(page_size: int) -> int:
    """Tokens of a span: at least ``SPAN_TOKENS``, whole pages."""
    return -(-SPAN_TOKENS // page_size) * page_size


@dataclass(frozen=True)
class CompressedCopy:
    """The listed tokens of a prefix.

    Attributes:
        length: tokens of the prefix.
        counts: ``[L, Hv]``, listed tokens of each layer and list (``Hv`` as in ``DraftView``).
        keys, values: per layer and list ``[counts[l, h], W]``; W is all KV heads times head_dim
            where they share a list, else head_dim. Of a quantizing compressor they are the codes of
            its packed pool, uint8, and head_dim is the bytes of a row there (``PackedPool``).
    """

    length: int
    counts: Tensor
    keys: Sequence[Sequence[Tensor]]
    values: Sequence[Sequence[Tensor]]

    @property
    def longest(self) -> int:
        return int(self.counts.max())

    def write(self, buffers: Sequence[tuple[Tensor, Tensor]], slots: Tensor) -> None:
        """Copy to the device.

        Args:
            buffers: keys and values of each layer, ``[pool slots, HKV, D]``: the KV pool, or the
                packed pool of the codec that the copy was written with.
            slots: int64 ``[n]``, n at least ``longest``; the j-th takes the j-th listed token of
                every layer and list.
        """
        for layer, pair in enumerate(buffers):
            for buffer, lists in zip(pair, (self.keys[layer], self.values[layer]), strict=True):
                for head, rows in enumerate(lists):
                    target = slots[: len(rows)]
                    rows = rows.to(buffer.device, non_blocking=True)
                    if len(lists) == 1:
                        buffer[target] = rows.view(-1, *buffer.shape[1:])
                    else:
                        buffer[target, head] = rows


def cut(
    view: DraftView, keys: Sequence[Tensor], values: Sequence[Tensor], tokens: int
) -> list[bytes]:
    """Serialise every whole span of a view.

    Args:
        view: what is listed, on the host.
        keys, values: per layer ``[Hv, n, W]``, the rows of the listed tokens, on the host; see
            ``CompressedCopy``. Those after the end of a shorter list are not written.
        tokens: length of a span.
    """
    borders = torch.arange(0, view.length + 1, tokens, dtype=torch.int32)
    # [L][Hv, spans + 1]: where each span begins in each list.
    starts = [
        torch.searchsorted(lists.contiguous(), borders.expand(len(lists), -1).contiguous())
        .minimum(torch.tensor(counts)[:, None])
        .tolist()
        for lists, counts in zip(view.layers, view.list_lengths, strict=True)
    ]
    blobs = []
    for span in range(len(borders) - 1):
        ranges = [[(s[span], s[span + 1]) for s in layer] for layer in starts]
        tensors = {"counts": torch.tensor([[b - a for a, b in layer] for layer in ranges])}
        for name, rows in (("keys", keys), ("values", values)):
            tensors[name] = torch.cat(
                [
                    rows[layer][head, a:b]
                    for layer, lists in enumerate(ranges)
                    for head, (a, b) in enumerate(lists)
                ]
            )
        blobs.append(save(tensors))
    return blobs


def join(blobs: Sequence[bytes], tokens: int) -> CompressedCopy:
    """The copy that consecutive spans from the start of a prefix make.

    Raises:
        ValueError: a blob is none of ours, or they differ in their layers or lists.
    """
    try:
        spans = [load(blob) for blob in blobs]
        counts = torch.stack([span["counts"] for span in spans])
        layers, lists = counts.shape[1:]
        found: dict[str, list[list[Tensor]]] = {}
        for name in ("keys", "values"):
            pieces = [span[name].split(span["counts"].flatten().tolist()) for span in spans]
            found[name] = [
                [torch.cat([p[layer * lists + head] for p in pieces]) for head in range(lists)]
                for layer in range(layers)
            ]
    except (KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"not a compressed span: {error}") from error
    return CompressedCopy(len(blobs) * tokens, counts.sum(0), found["keys"], found["values"])

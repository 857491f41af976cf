"""The latest queries of a request, kept for the next choice of its view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class RecentQueries:
    """Rotated queries ``[L, n, HQ, D]`` of a request's latest tokens, and where those stand.

    Takes L * window * HQ * D elements on the device, at most twice that: whole chunks are dropped.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[Tensor, int]] = []

    def __len__(self) -> int:
        return sum(queries.shape[1] for queries, _ in self._chunks)

    def append(self, queries: Tensor, end: int, window: int) -> None:
        """Add those of the tokens before position ``end``; keep what the last ``window`` need.

        Tokens between two calls may be missing.
        """
        # A slice would keep the queries of the whole pass alive.
        self._chunks.append((queries[:, -window:].clone(), end))
        while len(self) - self._chunks[0][0].shape[1] >= window:
            del self._chunks[0]

    def last(self, count: int) -> tuple[Tensor, Tensor]:
        """The latest ``count`` queries ``[L, w, HQ, D]`` or all, and their positions ``[w]``."""
        queries = torch.cat([queries for queries, _ in self._chunks], dim=1)[:, -count:]
        positions = torch.cat([torch.arange(end - q.shape[1], end) for q, end in self._chunks])
        return queries, positions[-count:].to(queries.device)

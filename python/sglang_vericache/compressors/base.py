"""What a compressor is: the contract of a dropper and what it gets to see of one layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sglang_vericache.compressors.rotary import Rotary
from sglang_vericache.core import Budget


class Protected(NamedTuple):
    """Tokens kept whatever their score.

    Attributes:
        sinks: the first tokens.
        recent: the last tokens.
        recent_share: the last tokens again, as a share of all that are kept; the larger counts.
    """

    sinks: int = 0
    recent: int = 0
    recent_share: float = 0.0


@dataclass(frozen=True)
class LayerContext:
    """One request's KV in one attention layer, as a dropper may look at it.

    Valid only during the ``score`` call it is passed to: ``keys`` and ``values`` read the engine's
    pool. Keys and queries are rotated by their original positions ``0 .. length - 1``.

    Attributes:
        layer: index of the layer, from 0.
        num_layers: layers of the model.
        length: tokens T to choose from.
        num_kv_heads: HKV.
        queries: ``[w, HQ, D]`` of the last ``w`` tokens (the last prompt tokens, or the rows of a
            verify pass); ``w <= T`` and HQ a multiple of HKV. May be empty if the dropper's
            ``query_rows`` is 0.
        gather_keys: returns ``[T, HKV, D]``; copies, so call it only if needed.
        gather_values: the same for values.
        key_scores: kernel that computes ``attention(queries)``; None takes the torch fallback.
        query_positions: int64 ``[w]``, where the queries stand; None: they are the last ``w``.
        rotary: what rotated keys and queries; None if the model has no rotary embedding.
    """

    layer: int
    num_layers: int
    length: int
    num_kv_heads: int
    queries: Tensor
    gather_keys: Callable[[], Tensor]
    gather_values: Callable[[], Tensor]
    key_scores: Callable[[Tensor], Tensor] | None = None
    query_positions: Tensor | None = None
    rotary: Rotary | None = None

    @property
    def device(self) -> torch.device:
        return self.queries.device

    def keys(self) -> Tensor:
        return self.gather_keys()

    def values(self) -> Tensor:
        return self.gather_values()

    def attention(self, queries: Tensor | None = None) -> Tensor:
        """Causal softmax probabilities summed over the queries, float32 ``[HQ, T]``.

        Args:
            queries: ``[w, HQ, D]`` of the last ``w`` tokens; ``self.queries`` if None.
        """
        queries = self.queries if queries is None else queries
        if self.key_scores is not None:
            return self.key_scores(queries)
        return summed_attention(queries, self.keys())

    def unrotated_queries(self) -> Tensor:
        """The queries before rotary embedding, float32 ``[w, HQ, D]``."""
        if self.rotary is None:
            return self.queries.float()
        positions = self.query_positions
        if positions is None:
            positions = torch.arange(self.length, device=self.device)[-len(self.queries) :]
        return self.rotary.undo(self.queries, positions)


def summed_attention(queries: Tensor, keys: Tensor) -> Tensor:
    """The semantics of ``LayerContext.attention``, in torch.

    Query ``i`` of ``w`` stands at position ``T - w + i`` and sees the keys up to itself.

    Args:
        queries: ``[w, HQ, D]``.
        keys: ``[T, HKV, D]``.

    Returns:
        float32 ``[HQ, T]``; each row sums to ``w``.
    """
    w, num_heads, head_dim = queries.shape
    length, num_kv_heads, _ = keys.shape
    if w > length:
        raise ValueError(f"{w} queries for a context of {length} tokens")
    grouped = queries.float().view(w, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = torch.einsum("whgd,thd->hgwt", grouped, keys.float()) * head_dim**-0.5
    positions = torch.arange(length, device=keys.device)
    future = positions > positions[length - w :, None]
    probabilities = logits.masked_fill_(future, float("-inf")).softmax(dim=-1)
    return probabilities.sum(dim=2).view(num_heads, length)


class Dropper(ABC):
    """Scores the tokens of a layer; the best ones form the draft view.

    A subclass is a frozen dataclass whose fields are its settings, with ``name`` and ``score``. It
    changes nothing it is given, keeps no state between calls and knows no engine: the same context
    and settings give the same view on every call. A poor score costs acceptance, never exactness.
    """

    name: ClassVar[str]
    """Value of ``--vericache-compressor`` that selects the method."""
    per_head: ClassVar[bool] = False
    """Whether every KV head has its own list, i.e. Hs = HKV."""
    drops: ClassVar[bool] = True
    """Whether views are smaller than long contexts."""
    codec: ClassVar[str | None] = None
    """How the copy that drafts read is packed (``sgl_kernel_ext.CODECS``); None: there is no copy,
    they read what is listed in the KV pool itself."""
    residual: ClassVar[int] = 0
    """The latest tokens that drafts read as they are rather than in a packed copy, where the full
    KV is on the device."""
    divisible: ClassVar[bool] = True
    """Whether a part of a packed copy can be decoded, as that of a copy in a store has to be."""
    floor_share: ClassVar[float] = 1.0
    """What each list of a layer surely gets, as a share of an equal part; the rest goes to the best
    scores of all lists. 1: all lists of a layer are equally long."""
    refreshable: ClassVar[bool] = False
    """Whether the view should be chosen anew after verify passes, from their queries."""

    @property
    def query_rows(self) -> int:
        """Queries of the last prompt tokens that ``score`` wants; 0 if it reads none."""
        return 0

    @property
    def protected(self) -> Protected:
        """Tokens kept whatever their score, as far as the budget reaches."""
        return Protected()

    def count(self, ctx: LayerContext, budget: Budget) -> int:
        """Tokens to keep of this layer, in ``[0, ctx.length]``; a mean over lists."""
        return budget.tokens(ctx.length)

    def longest(self, length: int, kv_heads: int, budget: Budget) -> int:
        """Most tokens that any list of a view of ``length`` tokens can have."""
        return budget.tokens(length)

    def sure(self, count: int) -> int:
        """Tokens that each list of a layer gets whatever the others score; at least 1 of any."""
        return min(count, max(1, int(self.floor_share * count)))

    @abstractmethod
    def score(self, ctx: LayerContext) -> Tensor:
        """Return float scores ``[Hs, T]``, higher = keep; NaN counts as lowest.

        Hs is HKV if ``per_head``, else 1. The tensor is kept while other layers are scored, so it
        must not be written to again. Called only if something has to go, so ``T >= 2`` and
        at least one query is there if ``query_rows`` is positive.
        """


@dataclass(frozen=True)
class KeepsEnds(Dropper):
    """A dropper that keeps both ends of the context whatever their score.

    Attributes:
        sinks: first tokens, which draw attention whatever they say.
        window: last tokens.
        recent: share of the budget for the last tokens, since the next one depends most on them.
    """

    sinks: int = 4
    window: int = 16
    recent: float = 0.4

    @property
    def protected(self) -> Protected:
        return Protected(self.sinks, self.window, self.recent)

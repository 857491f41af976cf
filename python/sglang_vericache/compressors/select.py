"""From scores to index lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_vericache.compressors.base import Dropper, LayerContext, Protected
from sglang_vericache.core import Budget, DraftView

NOTHING = Protected()
ALWAYS, NEVER = float("inf"), float("-inf")
# Scores to choose from at once: few large steps are faster than one for each layer. Choosing takes
# some 30 bytes a score.
MOST_SCORES = 1 << 22


def compress(dropper: Dropper, layers: Iterable[LayerContext], budget: Budget) -> DraftView:
    """Choose the draft view of one request.

    Args:
        dropper: the method.
        layers: one context per layer, in order, all of one length; consumed one at a time, so a
            generator keeps only one layer's gathered keys alive.
        budget: tokens to keep; when it covers the context the view is everything, unscored.

    Raises:
        ValueError: ``dropper.score`` returned another shape than its contract says.
    """
    views: list[Tensor] = []
    counts: list[tuple[int, ...]] = []
    length = 0
    for group in _scored(dropper, layers, budget):
        length, heads, count = group.length, group.heads, group.count
        if count >= length:
            everything = torch.arange(length, dtype=torch.int32, device=group.device)
            views.append(everything.repeat(heads, 1))
            counts.append((length,) * heads)
        elif (sure := dropper.sure(count)) == count:
            kept = keep_best(torch.cat(group.scores), count, dropper.protected)
            views += kept.split(heads)
            counts += [(count,) * heads] * len(group.scores)
        else:
            (scores,) = group.scores
            kept, lists = keep_best_of_all(scores, count, sure, dropper.protected)
            views.append(kept)
            counts.append(lists)
    uneven = any(len(set(lists)) > 1 for lists in counts)
    return DraftView(tuple(views), length, tuple(counts) if uneven else ())


@dataclass
class _Scored:
    """Layers in a row to choose from at once, and the scores ``[heads, length]`` of each; a layer
    that keeps everything is alone and has none."""

    length: int
    heads: int
    count: int
    device: torch.device
    scores: list[Tensor] = field(default_factory=list)


def _scored(dropper: Dropper, layers: Iterable[LayerContext], budget: Budget) -> Iterator[_Scored]:
    """Score the layers, grouped."""
    group: _Scored | None = None
    for ctx in layers:
        heads = ctx.num_kv_heads if dropper.per_head else 1
        count = dropper.count(ctx, budget)
        together = (
            group is not None
            and (heads, count) == (group.heads, group.count)
            and count < ctx.length
            and dropper.sure(count) == count
            and (len(group.scores) + 1) * heads * ctx.length <= MOST_SCORES
        )
        if not together:
            if group is not None:
                yield group
            group = _Scored(ctx.length, heads, count, ctx.device)
        assert group is not None
        if count >= ctx.length:
            continue
        scores = dropper.score(ctx)
        if scores.shape != (heads, ctx.length):
            expected = [heads, ctx.length]
            raise ValueError(f"{dropper.name}: scores {list(scores.shape)}, expected {expected}")
        group.scores.append(scores)
    if group is not None:
        yield group


def keep_best(scores: Tensor, count: int, protected: Protected = NOTHING) -> Tensor:
    """Positions of the ``count`` highest scores of each row, ascending, int32 ``[Hs, count]``.

    Equal scores: the lower position wins. Protected tokens come first; where they exceed the
    count, sinks win, then the most recent tokens.

    Args:
        scores: ``[Hs, T]``, not changed.
        count: in ``[0, T]``.
    """
    if count == 0:
        return scores.new_empty((len(scores), 0), dtype=torch.int32)
    kept = _best(_protect(scores, count, protected), count)
    return kept.nonzero()[:, 1].view(len(scores), count).to(torch.int32)


def keep_best_of_all(
    scores: Tensor, count: int, sure: int, protected: Protected = NOTHING
) -> tuple[Tensor, tuple[int, ...]]:
    """Positions of the ``Hs * count`` highest scores of all rows, at least ``sure`` of each.

    Equal scores: the lower row wins, then the lower position. Protected tokens of every row come
    first, as in ``keep_best``, then the ``sure`` best of each.

    Args:
        scores: ``[Hs, T]``, not changed.
        count: mean number of a row, in ``[0, T]``.
        sure: in ``[min(1, count), count]``; protected tokens count.

    Returns:
        int32 ``[Hs, n]`` and the number of each row, as in ``DraftView``.
    """
    if sure == count:
        return keep_best(scores, count, protected), (count,) * len(scores)
    scores = _protect(scores, count, protected)
    scores = scores.masked_fill_(_best(scores, sure), ALWAYS)
    kept = _best(scores.reshape(1, -1), count * len(scores)).view(scores.shape)
    counts = kept.sum(dim=1)
    ends = counts.cumsum(0)
    entries = torch.arange(int(counts.max()), device=scores.device).expand(len(scores), -1)
    entries = entries.minimum(counts[:, None] - 1) + (ends - counts)[:, None]
    return kept.nonzero()[:, 1][entries].to(torch.int32), tuple(counts.tolist())


def _protect(scores: Tensor, count: int, protected: Protected) -> Tensor:
    """Scores in float32 with protected tokens above all others; a copy."""
    length = scores.shape[1]
    scores = scores.float().nan_to_num(NEVER, posinf=ALWAYS, neginf=NEVER)
    sinks = min(protected.sinks, count)
    wanted = max(protected.recent, int(protected.recent_share * count))
    recent = min(wanted, count - sinks)
    scores[:, :sinks] = ALWAYS
    scores[:, length - recent :] = ALWAYS
    return scores


def _best(scores: Tensor, count: int) -> Tensor:
    """Where the ``count`` highest scores of each row are, bool ``[Hs, T]``."""
    # NOTE: topk's choice among equal scores is unspecified; only its smallest value is used.
    threshold = scores.topk(count, dim=1).values[:, -1:]
    above, tied = scores > threshold, scores == threshold
    missing = count - above.sum(dim=1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=1) <= missing))


def before(view: DraftView, length: int) -> DraftView:
    """What a view lists of the tokens ``0 .. length - 1``."""
    layers, counts = [], []
    for positions, lengths in zip(view.layers, view.list_lengths, strict=True):
        listed = torch.tensor(lengths, device=positions.device)
        below = (positions < length).sum(dim=1).minimum(listed)
        counts.append(tuple(below.tolist()))
        entries = torch.arange(max(counts[-1]), device=positions.device)
        entries = entries.minimum((below - 1).clamp(min=0)[:, None])
        layers.append(positions.gather(1, entries).clamp(max=length - 1))
    even = all(len(set(lengths)) == 1 for lengths in counts)
    return DraftView(tuple(layers), length, () if even else tuple(counts))

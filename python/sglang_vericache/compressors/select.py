"""From scores to index lists."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sglang_vericache.compressors.base import Dropper, LayerContext, Protected
from sglang_vericache.core import Budget, DraftView

NOTHING = Protected()
ALWAYS, NEVER = float("inf"), float("-inf")


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
    length = 0
    for ctx in layers:
        length = ctx.length
        heads = ctx.num_kv_heads if dropper.per_head else 1
        count = dropper.count(ctx, budget)
        if count >= length:
            everything = torch.arange(length, dtype=torch.int32, device=ctx.device)
            views.append(everything.repeat(heads, 1))
            continue
        scores = dropper.score(ctx)
        if scores.shape != (heads, length):
            expected = [heads, length]
            raise ValueError(f"{dropper.name}: scores {list(scores.shape)}, expected {expected}")
        views.append(keep_best(scores, count, dropper.protected))
    return DraftView(tuple(views), length)


def keep_best(scores: Tensor, count: int, protected: Protected = NOTHING) -> Tensor:
    """Positions of the ``count`` highest scores of each row, ascending, int32 ``[Hs, count]``.

    Equal scores: the lower position wins. Protected tokens come first; where they exceed the
    count, sinks win, then the most recent tokens.

    Args:
        scores: ``[Hs, T]``, not changed.
        count: in ``[0, T]``.
    """
    heads, length = scores.shape
    if count == 0:
        return scores.new_empty((heads, 0), dtype=torch.int32)
    scores = scores.float().nan_to_num(NEVER, posinf=ALWAYS, neginf=NEVER)
    sinks = min(protected.sinks, count)
    wanted = max(protected.recent, int(protected.recent_share * count))
    recent = min(wanted, count - sinks)
    scores[:, :sinks] = ALWAYS
    scores[:, length - recent :] = ALWAYS
    # NOTE: topk's choice among equal scores is unspecified; only its smallest value is used.
    threshold = scores.topk(count, dim=1).values[:, -1:]
    above, tied = scores > threshold, scores == threshold
    missing = count - above.sum(dim=1, keepdim=True)
    kept = above | (tied & (tied.cumsum(dim=1) <= missing))
    return kept.nonzero()[:, 1].view(heads, count).to(torch.int32)

"""top_k, top_p and min_p: which tokens of a row may be drawn, in order of rank.

Semantics (those of SGLang's ``pytorch`` sampling backend): rank tokens by falling probability,
ties by token id; keep ranks below ``top_k``, ranks whose preceding mass is at most ``top_p``, and
probabilities of at least ``min_p`` times the largest. Weights are not renormalised: a Gumbel draw
does not need it. ``min_p = 1`` keeps rank 0 only, so that it means greedy whatever is tied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

# Candidates above one of these probabilities are ranked first; nearly every request is decided by
# a few hundred tokens, and ranking a whole vocabulary costs milliseconds a row.
_LADDER = (1e-3, 1e-5, 1e-7, 0.0)
# Larger than any rounding error of a running sum of probabilities.
_MASS_SLACK = 1e-3


class Ranked(NamedTuple):
    """Leading ranks of a row: ``weights[i]`` is 0 where rank i may not be drawn."""

    weights: torch.Tensor
    token_ids: torch.Tensor


def rank(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> Ranked:
    """Rank and filter every row, on the tensor's device without a synchronisation.

    Args:
        probs: ``[rows, vocab]`` float32 probabilities.
        top_ks: ``[rows]`` int32; top_ps, min_ps: ``[rows]`` float32.

    Returns:
        weights ``[rows, vocab]``, token_ids ``[rows, vocab]`` int64.
    """
    weights, token_ids = probs.sort(dim=-1, descending=True, stable=True)
    return Ranked(_filter(weights, top_ks, top_ps, min_ps), token_ids)


def rank_row(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> Ranked:
    """The part of ``rank``'s result that may be drawn, for one row on the host.

    Args:
        probs: ``[vocab]`` float32.

    Returns:
        weights ``[n]``, token_ids ``[n]``: equal to the first n ranks of ``rank``; every later
        rank has weight 0 there.
    """
    values = probs.numpy()
    limits = tuple(
        torch.tensor([value], dtype=dtype)
        for value, dtype in ((top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32))
    )
    floor = float(values.max() * np.float32(min_p))
    for step in _LADDER:
        least = max(step, floor)
        token_ids = np.flatnonzero(~(values < np.float32(least)))  # NaN is never filtered away
        order = np.argsort(-values[token_ids], kind="stable")
        token_ids = token_ids[order]
        weights = torch.from_numpy(values[token_ids])
        before_last = float(weights[:-1].sum())
        if (
            least <= floor
            or step == 0.0
            or token_ids.size >= top_k
            or before_last > top_p + _MASS_SLACK
        ):
            break
    return Ranked(_filter(weights[None], *limits)[0], torch.from_numpy(token_ids))


def _filter(
    weights: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Zero in place what may not be drawn of ``weights`` ``[rows, ranks]``, sorted falling."""
    mass = torch.cumsum(weights, dim=-1)
    top_ks = torch.where(min_ps >= 1.0, 1, top_ks)
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    weights[ranks >= top_ks[:, None]] = 0.0
    weights[(mass - weights) > top_ps[:, None]] = 0.0
    weights[weights < (weights[:, 0] * min_ps)[:, None]] = 0.0
    return weights

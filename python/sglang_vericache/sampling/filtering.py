"""top_k, top_p and min_p: which tokens of a row may be drawn.

Semantics (those of SGLang's ``pytorch`` sampling backend): rank tokens by falling probability,
ties by token id; keep ranks below ``top_k``, ranks whose preceding mass is at most ``top_p``, and
probabilities of at least ``min_p`` times the largest. Nothing is renormalised: a Gumbel draw does
not need it. ``min_p = 1`` keeps rank 0 only, so that it means greedy whatever is tied.
"""

from __future__ import annotations

import numpy as np
import torch

# Tokens above one of these probabilities are ranked first; nearly every request is decided by a few
# hundred tokens, and ranking a whole vocabulary costs milliseconds a row.
_LADDER = (1e-3, 1e-5, 1e-7, 0.0)
# Larger than any rounding error of a running sum of probabilities.
_MASS_SLACK = 1e-3


def filter_rows(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Zero what may not be drawn, on the tensor's device without a synchronisation.

    Args:
        probs: ``[rows, vocab]`` float32 probabilities.
        top_ks: ``[rows]`` int32; top_ps, min_ps: ``[rows]`` float32.

    Returns:
        ``[rows, vocab]`` float32.
    """
    ranked, token_ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = _filter_ranked(ranked, top_ks, top_ps, min_ps)
    return torch.zeros_like(probs).scatter_(1, token_ids, kept)


def filter_row(
    probs: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, np.ndarray]:
    """``filter_rows`` for one row on the host, without the tokens it zeroes.

    Args:
        probs: ``[vocab]`` float32.

    Returns:
        probabilities ``[n]`` and token ids ``[n]`` of what may be drawn, by rising token id.
    """
    values = probs.numpy()
    floor = float(values.max() * np.float32(min_p))
    for step in _LADDER:
        least = max(step, floor)
        token_ids = np.flatnonzero(~(values < np.float32(least)))  # NaN is never filtered away
        candidates = values[token_ids]
        decided = (
            least <= floor
            or token_ids.size >= top_k
            or candidates.sum() - candidates.min(initial=1.0) > top_p + _MASS_SLACK
        )
        if decided:
            break
    order = np.argsort(-candidates, kind="stable")
    token_ids, ranked = token_ids[order], torch.from_numpy(candidates[order])
    limits = (
        torch.tensor([value], dtype=dtype)
        for value, dtype in ((top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32))
    )
    kept = _filter_ranked(ranked[None], *limits)[0]
    survivors = np.flatnonzero(kept.numpy())
    survivors = survivors[np.argsort(token_ids[survivors])]
    return kept[torch.from_numpy(survivors)], token_ids[survivors]


def _filter_ranked(
    ranked: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Zero in place what may not be drawn of probabilities ``[rows, ranks]``, sorted falling."""
    mass = torch.cumsum(ranked, dim=-1)
    top_ks = torch.where(min_ps >= 1.0, 1, top_ks)
    ranks = torch.arange(ranked.shape[-1], device=ranked.device)
    ranked[ranks >= top_ks[:, None]] = 0.0
    ranked[(mass - ranked) > top_ps[:, None]] = 0.0
    ranked[ranked < (ranked[:, 0] * min_ps)[:, None]] = 0.0
    return ranked

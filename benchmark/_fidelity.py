"""How a compressor's drafts compare with the full KV, on one prompt and over several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from _offline import Chain, LayerKV, OfflineModel, Reference, per_head
from sgl_kernel_ext import CODECS, KvCodec
from sglang_vericache.compressors import (
    Dropper,
    LayerContext,
    Rotary,
    before,
    compress,
    summed_attention,
)
from sglang_vericache.core import Budget, DraftView

DRAFT = 16
"""Tokens of a draft."""

# Attention of the last w queries, by layer, tokens and w: equal for many methods and all budgets.
Memo = dict[tuple[int, int, int], Tensor]


@dataclass(frozen=True)
class Outcome:
    """One method at one budget on one prompt.

    Attributes:
        drafts: the text in drafts of up to ``DRAFT`` tokens, each behind verified text: which of
            its tokens the full KV agrees with, given that all before it were right.
        kl: of the same rows, KL(full || draft) in nats.
        unverified: tokens that decoding from the view alone gets right before its first wrong one.
        text: tokens of the text.
        kv_bytes: K and V that a draft row reads of the prompt, bytes of all layers.
        full_bytes: the same of a row over the full KV.
    """

    drafts: list[list[bool]]
    kl: list[float]
    unverified: int
    text: int
    kv_bytes: int
    full_bytes: int


def measure(
    model: OfflineModel,
    reference: Reference,
    dropper: Dropper,
    budget: Budget,
    memo: Memo,
    refresh: bool = False,
) -> Outcome:
    """Draft from the view that a method chooses after the prompt.

    Args:
        memo: of this reference; filled.
        refresh: choose the view of a refreshable method anew before every draft but the first,
            from the tokens verified so far and their queries.
    """
    codec = CODECS[dropper.codec] if dropper.codec else None
    view = choose(dropper, reference.prompt, budget, memo, model.rotary)
    first, *later = chains(reference.rows)
    plan = [(view, [first, *later])]
    if refresh and dropper.refreshable:
        plan = [(view, [first])]
        for chain in later:
            known = reference.upto(chain.start)
            plan.append((choose(dropper, known, budget, memo, model.rotary), [chain]))
    log_probs = model.draft(reference, plan, codec).log_softmax(-1)
    agrees = (log_probs.argmax(-1) == torch.tensor(reference.tokens[1:])).tolist()
    drafts = [[agrees[row] for row in chain.span] for chain in (first, *later)]
    alone = drafts[0]
    if later and all(alone):
        logits = model.draft(reference, [(view, [Chain(0, reference.rows)])], codec)
        alone = (logits.argmax(-1) == torch.tensor(reference.tokens[1:])).tolist()
    return Outcome(
        drafts,
        kl=(reference.log_probs.exp() * (reference.log_probs - log_probs)).sum(-1).tolist(),
        unverified=[*alone, False].index(False),
        text=reference.rows,
        kv_bytes=view_bytes(view, reference.prompt[0], codec),
        full_bytes=reference.kv_bytes,
    )


def chains(rows: int) -> list[Chain]:
    """A text cut into drafts."""
    return [Chain(start, min(DRAFT, rows - start)) for start in range(0, rows, DRAFT)]


def choose(
    dropper: Dropper, layers: list[LayerKV], budget: Budget, memo: Memo, rotary: Rotary
) -> DraftView:
    """The draft view that a method chooses, without the tokens that it leaves as they are."""
    view = compress(dropper, _contexts(layers, dropper.query_rows, memo, rotary), budget)
    return before(view, max(view.length - dropper.residual, 0))


def _contexts(
    layers: list[LayerKV], query_rows: int, memo: Memo, rotary: Rotary
) -> Iterator[LayerContext]:
    for index, kv in enumerate(layers):

        def attention(rows: Tensor, index: int = index, kv: LayerKV = kv) -> Tensor:
            latest = kv.queries[len(kv.queries) - len(rows) :]
            if rows.shape != latest.shape or rows.data_ptr() != latest.data_ptr():
                return summed_attention(rows, kv.keys)
            key = (index, len(kv.keys), len(rows))
            if key not in memo:
                memo[key] = summed_attention(rows, kv.keys)
            return memo[key].clone()

        yield LayerContext(
            layer=index,
            num_layers=len(layers),
            length=len(kv.keys),
            num_kv_heads=kv.keys.shape[1],
            queries=kv.queries[max(len(kv.queries) - query_rows, 0) :],
            gather_keys=kv.keys.clone,
            gather_values=kv.values.clone,
            key_scores=attention,
            rotary=rotary,
        )


def view_bytes(view: DraftView, layer: LayerKV, codec: KvCodec | None) -> int:
    """Bytes of K and V that drafts read of layers like ``layer``: what a view lists, and all that
    follows it; lists themselves not counted."""
    heads, head_dim = layer.keys.shape[1:]
    plain = 2 * head_dim * layer.keys.element_size()
    row = codec.row_bytes(head_dim) if codec else plain
    after = len(view.layers) * heads * (len(layer.keys) - view.length)
    layers = range(len(view.layers))
    kept = sum(len(rows) for layer in layers for rows in per_head(view, layer, heads))
    return kept * row + after * plain


def survival(drafts: Sequence[Sequence[bool]], most: int) -> list[float]:
    """Chance that the first 1, 2, ... ``most`` tokens of a draft all agree.

    The product-limit estimate: a draft that the end of the text cut off counts as far as it goes.
    Shorter than ``most`` where every draft that agreed so far was cut off.
    """
    chances, chance = [], 1.0
    for depth in range(most):
        alive = [draft[depth] for draft in drafts if len(draft) > depth and all(draft[:depth])]
        if not alive and chance > 0:
            break
        chance *= fmean(alive) if alive else 0.0
        chances.append(chance)
    return chances


def summary(outcomes: Sequence[Outcome]) -> dict[str, float | list[float] | None]:
    """Figures of one method at one budget over the prompts of a task.

    Returns:
        ``agreement``: share of draft tokens that the full KV agrees with, each given that those
        before it are right. ``accepted_8``, ``accepted_16``: expected tokens accepted of a draft of
        8 or 16; None if all texts are too short to tell. ``by_position``: see ``survival``.
        ``identical_unverified``: share of prompts whose text decoded from the view alone is
        byte-identical. ``kl``: mean of the draft tokens, nats. ``kv_bytes``, ``kv_share``: read of
        the prompt by a draft row, mean bytes and share of the full KV. ``prompts`` and ``tokens``
        (of drafts): what these rest on.
    """
    drafts = [draft for outcome in outcomes for draft in outcome.drafts]
    flat = [agrees for draft in drafts for agrees in draft]
    chances = survival(drafts, DRAFT)
    return {
        "agreement": round(fmean(flat), 4),
        "accepted_8": round(sum(chances[:8]), 3) if len(chances) >= 8 else None,
        "accepted_16": round(sum(chances), 3) if len(chances) >= DRAFT else None,
        "identical_unverified": round(fmean(o.unverified == o.text for o in outcomes), 4),
        "kl": round(fmean(kl for outcome in outcomes for kl in outcome.kl), 6),
        "kv_bytes": round(fmean(outcome.kv_bytes for outcome in outcomes)),
        "kv_share": round(fmean(o.kv_bytes / o.full_bytes for o in outcomes), 5),
        "by_position": [round(chance, 4) for chance in chances],
        "prompts": len(outcomes),
        "tokens": len(flat),
    }

"""Semantic retrieval heads: which query heads look at a fact while it is being repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_vericache.cli.needles import Needle
from sglang_vericache.cli.probe import Probe, Seen

STEPS = 16


class Found(NamedTuple):
    """Heads by layer, ascending, and the prompts that were answered correctly."""

    heads: tuple[tuple[int, ...], ...]
    answered: list[Needle]


def find_heads(
    probe: Probe, prompts: Sequence[Needle], most: int, say: Callable[[str], None]
) -> Found:
    """The ``most`` best query heads of each layer.

    On prompts that the model answers correctly, at every step whose token is one of the needle's, a
    head scores its attention mass on the whole needle; summed over steps, averaged over prompts
    (CompressKV, https://arxiv.org/abs/2606.24467).

    Raises:
        ValueError: no prompt was answered correctly.
    """
    scores, answered = torch.zeros(probe.layers, probe.heads), []
    for i, needle in enumerate(prompts, 1):
        found = _masses(probe, needle)
        if found is not None:
            scores += found
            answered.append(needle)
        say(f"retrieval heads: {i}/{len(prompts)} prompts, {len(answered)} answered")
    if not answered:
        raise ValueError(
            f"the model answered none of {len(prompts)} prompts: try a shorter --context"
        )
    top = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
    return Found(tuple(tuple(sorted(layer)) for layer in top.tolist()), answered)


def _masses(probe: Probe, needle: Needle) -> Tensor | None:
    """Attention on the needle, summed over the steps that repeat it, ``[L, HQ]``; None if the
    answer is wrong."""
    begin, end = needle.span
    latest = torch.zeros(probe.layers, probe.heads)
    total = torch.zeros_like(latest)
    names = set(needle.ids[begin:end].tolist())
    tokens = []

    def watch(seen: Seen) -> None:
        shares, _ = seen.attend(seen.queries[-1])
        latest[seen.layer] = shares[:, begin:end].sum(dim=1).cpu()

    with probe.watching(watch):
        for token in probe.decode(needle.ids, STEPS):
            tokens.append(token)
            if token in names:
                total += latest
            text = probe.tokenizer.decode(tokens)
            if needle.answer in text:
                return total
            if not needle.answer.startswith(text.strip()):
                break
    return None

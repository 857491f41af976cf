"""Layer weights: how much a layer's output changes when it sees a few tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglang_vericache.cli.needles import Needle
from sglang_vericache.cli.probe import Probe, Seen
from sglang_vericache.compressors import Calibration, LayerContext, compress, create
from sglang_vericache.compressors.calibrated import Calibrated
from sglang_vericache.compressors.settings import Settings
from sglang_vericache.core import Budget

STEPS, PROMPTS = 16, 8


def layer_weights(
    probe: Probe,
    prompts: Sequence[Needle],
    heads: tuple[tuple[int, ...], ...],
    say: Callable[[str], None],
) -> tuple[float, ...]:
    """Shares of 1 by layer, from at most ``PROMPTS`` of the prompts.

    e_l = |o_proj(compressed) - o_proj(full)|_F / |o_proj(full)|_F over decode steps, averaged over
    prompts, where compressed attention sees the 32 prompt tokens that ``compresskv`` keeps (with
    its default sinks and recent share) and what was decoded since. Every layer is measured by
    itself: its input is that of the full model. CompressKV, https://arxiv.org/abs/2606.24467

    Raises:
        ValueError: a prompt is so short that nothing would be left out.
    """
    if min(len(needle.ids) for needle in prompts) <= Calibrated.LEAST:
        raise ValueError(f"prompts of {Calibrated.LEAST} tokens or fewer: use a longer --context")
    even = Calibration(heads, (1 / probe.layers,) * probe.layers)
    dropper = create("compresskv", Settings(calibration=even))
    budget = Budget(1e-9, Calibrated.LEAST)
    total = torch.zeros(probe.layers)
    prompts = prompts[:: -(-len(prompts) // PROMPTS)]
    for i, needle in enumerate(prompts, 1):
        kept: dict[int, Tensor] = {}
        change, size = torch.zeros(probe.layers), torch.zeros(probe.layers)

        def watch(
            seen: Seen,
            needle: Needle = needle,
            kept: dict[int, Tensor] = kept,
            change: Tensor = change,
            size: Tensor = size,
        ) -> None:
            prompt = len(needle.ids)
            if seen.layer not in kept:
                ctx = context_of(seen, probe.layers)
                kept[seen.layer] = compress(dropper, [ctx], budget).layers[0][0].long()
                return
            later = torch.arange(prompt, len(seen.keys), device=seen.keys.device)
            _, output = seen.attend(seen.queries[-1], torch.cat([kept[seen.layer], later]))
            full = seen.project(seen.output[-1]).float()
            small = seen.project(output.to(seen.output.dtype)).float()
            change[seen.layer] += (small - full).square().sum().cpu()
            size[seen.layer] += full.square().sum().cpu()

        with probe.watching(watch):
            for _ in probe.decode(needle.ids, STEPS):
                pass
        total += (change / size).sqrt()
        say(f"layer budgets: {i}/{len(prompts)} prompts")
    return tuple(round(float(weight), 6) for weight in total / total.sum())


def context_of(seen: Seen, layers: int) -> LayerContext:
    """A layer after the prompt, as a dropper sees it."""
    return LayerContext(
        layer=seen.layer,
        num_layers=layers,
        length=len(seen.keys),
        num_kv_heads=seen.keys.shape[1],
        queries=seen.queries,
        gather_keys=lambda: seen.keys,
        gather_values=lambda: seen.values,
    )

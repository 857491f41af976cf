"""A checkpoint in transformers, whose attention can be watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "vericache_probe"


@dataclass(frozen=True)
class Seen:
    """Attention of one layer in one pass of one text.

    Attributes:
        layer: its index.
        queries: ``[n, HQ, D]`` of the tokens of this pass, rotated.
        keys, values: ``[T, HKV, D]`` of all tokens up to the last of them.
        output: ``[n, HQ * D]``, what goes into ``project``.
        project: the output projection.
        scale: of the dot products.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    project: nn.Module
    scale: float

    def attend(self, query: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One query ``[HQ, D]`` over some positions, int64 ``[m]``, or all.

        Returns:
            Probabilities ``[HQ, m]`` and output ``[HQ * D]``, float32.
        """
        keys, values = self.keys, self.values
        if kept is not None:
            keys, values = keys[kept], values[kept]
        grouped = query.float().view(keys.shape[1], -1, query.shape[-1])
        scores = torch.einsum("hgd,thd->hgt", grouped, keys.float()) * self.scale
        shares = scores.softmax(dim=-1)
        output = torch.einsum("hgt,thd->hgd", shares, values.float())
        return shares.flatten(0, 1), output.flatten()


class Probe:
    """Loads a checkpoint and decodes with it; whoever ``watching`` names sees its attention.

    Args:
        model_path: directory or hub name of a causal language model with plain attention layers.

    Raises:
        ValueError: its attention is of another kind.
    """

    def __init__(self, model_path: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register(ATTENTION, self._attention)
        self._watcher: Callable[[Seen], None] | None = None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=torch.float32 if device == "cpu" else "auto",
            attn_implementation=ATTENTION,
        ).to(device)
        self.model.eval()
        config = self.model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads

    @contextmanager
    def watching(self, watcher: Callable[[Seen], None]) -> Iterator[None]:
        """Have every layer of every pass call ``watcher``."""
        self._watcher = watcher
        try:
            yield
        finally:
            self._watcher = None

    @torch.inference_mode()
    def decode(self, ids: Tensor, most: int) -> Iterator[int]:
        """Greedy tokens after ``ids`` ``[T]``, one pass each; the first comes from the prompt's."""
        past, step = None, ids[None].to(self.model.device)
        for _ in range(most):
            result = self.model(step, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, step = result.past_key_values, result.logits[:, -1].argmax(dim=-1, keepdim=True)
            yield int(step)

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention as transformers asks for it; one text without padding needs no mask."""
        if sliding_window or softcap or not hasattr(module, "o_proj"):
            raise ValueError("only models with plain causal attention and an o_proj are supported")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = query.shape[2] > 1
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=True
        )
        out = out.transpose(1, 2).contiguous()
        if self._watcher is not None:
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            seen = Seen(module.layer_idx, q, k, v, out[0].flatten(1), module.o_proj, scale)
            self._watcher(seen)
        return out, None

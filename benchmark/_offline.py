"""The target model without a server: prefill once, then read its KV through any draft view.

It runs the Hugging Face checkpoint: prefill in bf16, everything after it in fp32 over K and V
rounded to bf16, as the server's pool holds them. In fp32 a token does not depend on how many rows
share a pass (but for ties of 1e-6), so the view of everything agrees with itself.

*Teacher forcing.* All rows of a text are computed in one pass, each fed the full-KV token before
it. A real draft feeds its own tokens, but up to the first disagreement those are the same ones: the
agreement of a row, given that the rows before it agree, is exactly that of a draft, and a text
decoded from the view alone equals the full-KV text if and only if every row agrees. A row reads the
K and V of earlier rows of its own *chain*, which were computed from the view, as a draft does. What
lies between view and chain was verified before the chain began, so there the exact K and V are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sgl_kernel_ext import KvCodec
from sgl_kernel_ext.packed import Codec
from sgl_kernel_ext.reference.packed import pack, unpack
from sglang_vericache.compressors import Rotary
from sglang_vericache.core import DraftView

ATTENTION = "vericache-offline"
# Of a layer and its rows' rotated q [R, HQ, D], k and v [R, HKV, D]: the outputs [R, HQ, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LayerKV:
    """Rotated queries, keys and values of consecutive tokens in one layer, bf16.

    Attributes:
        queries: ``[w, HQ, D]`` of the last ``w`` tokens.
        keys, values: ``[T, HKV, D]``.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def upto(self, length: int) -> LayerKV:
        """The first ``length`` tokens, all of whose queries are here."""
        return LayerKV(self.queries[:length], self.keys[:length], self.values[:length])

    def then(self, later: LayerKV) -> LayerKV:
        """These tokens followed by ``later`` ones."""
        return LayerKV(
            torch.cat((self.queries, later.queries)),
            torch.cat((self.keys, later.keys)),
            torch.cat((self.values, later.values)),
        )


@dataclass(frozen=True)
class Reference:
    """A prompt and its greedy continuation under the full KV.

    Attributes:
        prompt: its layers; ``T`` tokens.
        tokens: ``n + 1`` tokens that follow it; all but the last were fed.
        tail: layers of the ``n`` tokens fed.
        log_probs: float32 ``[n, V]``; row ``i`` predicts ``tokens[i + 1]``.
    """

    prompt: list[LayerKV]
    tokens: list[int]
    tail: list[LayerKV]
    log_probs: Tensor

    @property
    def length(self) -> int:
        return len(self.prompt[0].keys)

    @property
    def rows(self) -> int:
        return len(self.tokens) - 1

    def upto(self, rows: int) -> list[LayerKV]:
        """Layers of the prompt and the first ``rows`` tokens after it."""
        pairs = zip(self.prompt, self.tail, strict=True)
        return [prompt.then(tail.upto(rows)) for prompt, tail in pairs]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the prompt's K and V."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.prompt)


@dataclass(frozen=True)
class Chain:
    """Consecutive rows that read each other: a draft that begins at token ``start`` of the text."""

    start: int
    rows: int

    @property
    def span(self) -> range:
        return range(self.start, self.start + self.rows)


Plan = Sequence[tuple[DraftView, Sequence[Chain]]]
"""Views, each with the chains that read it."""


class OfflineModel:
    """A causal language model of ``transformers`` whose attention is handed in with each call."""

    def __init__(self, path: Path):
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(ATTENTION, _attention)
        load = partial(AutoModelForCausalLM.from_pretrained, path, attn_implementation=ATTENTION)
        self._bf16, self._fp32 = (load(dtype=t).eval() for t in (torch.bfloat16, torch.float32))
        end = self._fp32.generation_config.eos_token_id
        self.ends = set(end if isinstance(end, list) else [end])
        positions = torch.arange(self._fp32.config.max_position_embeddings)[None]
        halves = self._fp32.model.rotary_emb(torch.zeros(1), positions)  # twice the same half
        self.rotary = Rotary(torch.cat([x[0].chunk(2, dim=-1)[0] for x in halves], dim=-1))

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], query_rows: int) -> tuple[list[LayerKV], int]:
        """Layers of a prompt with its last ``query_rows`` queries, and the token that follows."""
        layers: list[LayerKV] = []

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layers.append(LayerKV(q[max(len(q) - query_rows, 0) :].clone(), k.clone(), v.clone()))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        logits = _run(self._bf16, ids, range(len(ids)), attend, last=1)
        return layers, int(logits[-1].argmax())

    @torch.inference_mode()
    def continue_greedily(self, prompt: list[LayerKV], first: int, most: int) -> list[int]:
        """``first`` and up to ``most`` tokens after it, to the end of the text.

        Raises:
            ValueError: the text ends with ``first``, so there is nothing to draft.
        """
        if first in self.ends:
            raise ValueError("the model's answer is empty")
        length = len(prompt[0].keys)
        spare = prompt[0].keys.new_zeros(most, *prompt[0].keys.shape[1:])
        pools = [[torch.cat((x, spare)).float() for x in (kv.keys, kv.values)] for kv in prompt]
        tokens = [first]
        while len(tokens) <= most and tokens[-1] not in self.ends:
            now = length + len(tokens)

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, now: int = now) -> Tensor:
                keys, values = (pool[:now] for pool in pools[layer])
                keys[-1], values[-1] = _stored(k[0]), _stored(v[0])
                return _attend(q, [keys], [values], None)

            logits = _run(self._fp32, tokens[-1:], [now - 1], attend)
            tokens.append(int(logits[0].argmax()))
        return tokens

    @torch.inference_mode()
    def reference(self, prompt: list[LayerKV], tokens: list[int]) -> Reference:
        """What the full KV says about a text; ``tokens`` as from ``continue_greedily``.

        The text is cut before a token that is not the most likely one here.
        """
        tail: list[LayerKV] = []
        length, whole = len(prompt[0].keys), Chain(0, len(tokens) - 1)
        mask = _mask([length] * prompt[0].keys.shape[1], _visible([whole], 0, 0))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = LayerKV(*(x.to(torch.bfloat16) for x in (q, k, v)))
            tail.append(own)
            kv = prompt[layer]
            return _attend(q, [kv.keys, own.keys], [kv.values, own.values], mask)

        positions = range(length, length + whole.rows)
        logits = _run(self._fp32, tokens[:-1], positions, attend)
        agrees = (logits.argmax(-1) == torch.tensor(tokens[1:])).tolist()
        rows = [*agrees, False].index(False)
        log_probs = logits[:rows].log_softmax(-1)
        return Reference(prompt, tokens[: rows + 1], [kv.upto(rows) for kv in tail], log_probs)

    @torch.inference_mode()
    def draft(self, reference: Reference, drafts: Plan, codec: KvCodec | None = None) -> Tensor:
        """Logits ``[rows of all chains, V]`` of chains that read views, teacher-forced.

        Args:
            drafts: a view may be of more than the prompt, of the first ``view.length - T`` tokens
                of the text, at most its chains' start; or of less, whose end is then read exactly.
            codec: how what is listed is packed.
        """
        chains = [chain for _, group in drafts for chain in group]
        at = [row for chain in chains for row in chain.span]
        groups = [
            (view, _visible(group, view.length - reference.length, reference.rows))
            for view, group in drafts
        ]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs, row = [], 0
            prompt, tail = reference.prompt[layer], reference.tail[layer]
            pools = (prompt.keys, tail.keys, _stored(k)), (prompt.values, tail.values, _stored(v))
            codecs = (codec.keys, codec.values) if codec else (None, None)
            for view, seen in groups:
                rows = slice(row, row := row + len(seen))
                lists = per_head(view, layer, k.shape[1])
                parts = []
                for (full, later, own), encoding in zip(pools, codecs, strict=True):
                    known = torch.cat((full, later))
                    after = known[min(view.length, reference.length) :]
                    viewed = known[: view.length]
                    parts.append([_listed(viewed, lists, encoding), after, own[rows]])
                outs.append(_attend(q[rows], *parts, _mask([len(x) for x in lists], seen)))
            return torch.cat(outs)

        tokens = [reference.tokens[i] for i in at]
        positions = [reference.length + i for i in at]
        return _run(self._fp32, tokens, positions, attend)


def per_head(view: DraftView, layer: int, heads: int) -> list[Tensor]:
    """The list of every KV head of a layer."""
    rows = zip(view.layers[layer], view.list_lengths[layer], strict=True)
    lists = [row[:count].long() for row, count in rows]
    return lists * heads if len(lists) == 1 else lists


def _run(model: Any, ids: Any, positions: Any, attend: Attend, last: int = 0) -> Tensor:
    """Logits float32 ``[rows, V]``, of the last ``last`` rows if given."""
    result = model(
        torch.tensor([list(ids)]),
        position_ids=torch.tensor([list(positions)]),
        use_cache=False,
        logits_to_keep=last,
        attend=attend,
    )
    return result.logits[0].float()


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, attend: Attend, **_: Any
) -> tuple[Tensor, None]:
    """As ``transformers`` calls it: q ``[1, HQ, R, D]``, k and v ``[1, HKV, R, D]``."""
    assert mask is None
    by_row = (x[0].transpose(0, 1) for x in (q, k, v))
    return attend(module.layer_idx, *by_row)[None], None


def _stored(x: Tensor) -> Tensor:
    """As the pool holds it."""
    return x.to(torch.bfloat16).float()


def _visible(chains: Sequence[Chain], viewed: int, tail: int) -> Tensor:
    """bool ``[R, n + R]``: which of the exact tail and of each other the rows see.

    The tail begins at the prompt's end, or at ``viewed`` if that is before.
    """
    owner = torch.cat([torch.full((c.rows,), i) for i, c in enumerate(chains)])
    depth = torch.cat([torch.arange(c.rows) for c in chains])
    start = torch.tensor([c.start for c in chains])[owner, None]
    column = torch.arange(min(viewed, 0), tail)
    exact = (column >= viewed) & (column < start)
    own = (owner == owner[:, None]) & (depth <= depth[:, None])
    return torch.cat((exact, own), dim=1)


def _mask(counts: Sequence[int], seen: Tensor) -> Tensor:
    """bool ``[HKV, R, n + columns]``: ``counts`` listed tokens of each head, then as ``seen``."""
    listed = torch.arange(max(counts)) < torch.tensor(counts)[:, None, None]
    rows = len(seen)
    return torch.cat((listed.expand(-1, rows, -1), seen.expand(len(counts), -1, -1)), dim=2)


def _listed(x: Tensor, lists: list[Tensor], codec: Codec | None) -> Tensor:
    """``[T, HKV, D]`` -> ``[n, HKV, D]``, shorter lists padded with zeros."""
    rows = [x[positions, head] for head, positions in enumerate(lists)]
    if codec:
        rows = [unpack(pack(r, codec), r.shape[-1], codec)[: len(r)] if len(r) else r for r in rows]
    return pad_sequence(rows)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor | None) -> Tensor:
    """Softmax attention in fp32.

    Args:
        q: ``[R, HQ, D]``.
        keys, values: parts ``[n, HKV, D]``, of N tokens together.
        mask: bool ``[HKV, R, N]``; None sees all.
    """
    rows, _, head_dim = q.shape
    k, v = (torch.cat([x.float() for x in parts]).transpose(0, 1) for parts in (keys, values))
    heads = len(k)
    grouped = q.view(rows, heads, -1, head_dim).permute(1, 2, 0, 3)
    group = grouped.shape[1]
    if mask is not None:
        mask = mask.repeat(1, group, 1)[None]
    out = F.scaled_dot_product_attention(
        grouped.reshape(1, heads, -1, head_dim), k[None], v[None], mask
    )
    return out.view(heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(q.shape)

"""Needle prompts: a fact somewhere in a long text, and a question for it at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from sglang_vericache.cli.prompts import code, documentation

THINGS = ("access code", "password", "order number", "licence key", "room", "serial number")
PLACES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Perth", "Turin", "Cusco", "Bergen")
WORDS = ("amber", "falcon", "copper", "meadow", "violet", "harbor", "cobalt", "juniper", "saffron")
SHARES = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Needle:
    """A prompt, tokenised.

    Attributes:
        ids: int64 ``[T]``.
        span: first token of the needle and the one after its last.
        answer: text that a correct continuation contains.
    """

    ids: Tensor
    span: tuple[int, int]
    answer: str


def needles(tokenizer: Any, count: int, context: int, seed: int) -> Iterator[Needle]:
    """Prompts of at most ``context`` tokens; their needles lie at all depths."""
    texts: tuple[Callable[[int, int], str], ...] = (documentation, code)
    random = Random(seed)
    for i in range(count):
        thing, place = random.choice(THINGS), random.choice(PLACES)
        answer = f"{random.choice(WORDS)}-{random.randint(100, 999)}"
        fact = f"\n\nThe {thing} of the office in {place} is {answer}.\n\n"
        ask = f"\n\nQuestion: What is the {thing} of the office in {place}?\nAnswer: The {thing} "
        ask += f"of the office in {place} is"
        tokens = int(context * SHARES[i % len(SHARES)])
        depth = (i + 0.5) / count
        hay = texts[i % len(texts)](8 * tokens, i // len(texts))
        yield _assemble(tokenizer, hay, fact, ask, answer, tokens, depth)


def _assemble(
    tokenizer: Any, hay: str, fact: str, ask: str, answer: str, tokens: int, depth: float
) -> Needle:
    encoded = tokenizer(hay, add_special_tokens=False)["input_ids"]
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (fact, ask)]
    room = max(tokens - sum(map(len, parts)) - 1, 0)
    begin = int(min(room, len(encoded)) * depth)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    before, after = encoded[:begin], encoded[begin:room]
    start = len(bos) + len(before)
    ids = torch.tensor([*bos, *before, *parts[0], *after, *parts[1]])
    return Needle(ids, (start, start + len(parts[0])), answer)

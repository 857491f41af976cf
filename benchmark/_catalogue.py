"""The distinct requests of a soak: chats, long documents and short prompts, drawn from a seed.

Each is asked once without drafts; that answer is what every later one must equal, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prompts import Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Tokens of each document; questions about one share all or the first part of it.
DOCUMENTS = (1000, 1600, 2400, 3400, 4600, 6000)
QUESTIONS = 4
CHATS, TURNS = 6, 4
SHORT = 12
SAMPLED_SHARE = 0.35

Ids = tuple[int, ...]
Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Answer:
    """What a server answered: token ids, their logprobs, text, finish reason, ``meta_info``."""

    ids: Ids
    logprobs: tuple[float, ...]
    text: str
    finish: Mapping[str, Any] | None
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, ids: list[int], text: str, meta: Mapping[str, Any]) -> Answer:
        logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
        return cls(tuple(ids), logprobs, text, meta["finish_reason"], meta)

    @property
    def is_cut(self) -> bool:
        """Whether it was aborted, or its client left."""
        return self.finish is None or self.finish["type"] == "abort"

    def difference(self, expected: Answer) -> str | None:
        """The first difference; of an answer that was cut, in what there is of it."""
        end = min(len(self.ids), len(expected.ids)) if self.is_cut else len(expected.ids)
        if self.ids != expected.ids[:end]:
            pairs = enumerate(zip(self.ids, expected.ids, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            return f"{len(self.ids)} tokens for {end}, unlike from token {at}"
        if self.logprobs != expected.logprobs[:end]:
            pairs = enumerate(zip(self.logprobs, expected.logprobs, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            return f"{len(self.logprobs)} logprobs for {end}, unlike from logprob {at}"
        if not self.is_cut and (self.text, self.finish) != (expected.text, expected.finish):
            return f"{self.text!r}, {self.finish} instead of {expected.text!r}, {expected.finish}"
        return None


@dataclass
class Request:
    """One distinct request.

    Attributes:
        name: for messages.
        prompt: token ids for ``/generate``, or messages for ``/v1/chat/completions``.
        tokens: most tokens of the answer.
        seed: of a sampled answer; None is greedy.
        stops: whether the end-of-sequence token ends the answer.
        expected: the answer without drafts.
    """

    name: str
    prompt: Ids | Messages
    tokens: int
    seed: int | None
    stops: bool = False
    expected: Answer | None = None

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt[0], Mapping)


@dataclass
class Conversation:
    """Requests that follow one another: the turns of a chat, or a single one.

    Attributes:
        kind: ``chat``, ``document`` or ``short``.
        additions: what the user adds to the conversation before each request.
        requests: one for each addition; those of a chat are known once ``answer`` ran.
    """

    kind: str
    name: str
    additions: list[Ids | str]
    tokens: int
    seed: int | None
    requests: list[Request] = field(default_factory=list)

    async def answer(self, ask: Callable[[Request], Awaitable[Answer]]) -> None:
        """Have every request answered, each with the answers before it in its prompt."""
        history: tuple[Any, ...] = ()
        for turn, addition in enumerate(self.additions):
            if isinstance(addition, str):
                history += ({"role": "user", "content": addition},)
            else:
                history += addition
            request = Request(
                f"{self.name}.{turn}", history, self.tokens, self.seed, self.kind == "chat"
            )
            request.expected = answer = await ask(request)
            self.requests.append(request)
            if isinstance(addition, str):
                history += ({"role": "assistant", "content": answer.text},)
            else:
                history += answer.ids


def draw(tokenizer: Tokenizer, seed: int) -> list[Conversation]:
    """The catalogue of a seed; every other chat is one of messages, the others of token ids."""
    rng, corpus = random.Random(seed), Corpus(tokenizer)

    def conversation(kind: str, name: str, additions: list[Ids | str]) -> Conversation:
        sampled = rng.random() < SAMPLED_SHARE
        return Conversation(
            kind, name, additions, rng.randint(16, 64), rng.randrange(2**31) if sampled else None
        )

    def ids(least: int, most: int) -> Ids:
        return tuple(corpus.prompt(rng.randint(least, most)))

    found = []
    for length in DOCUMENTS:
        document = ids(length, length)
        for i in range(QUESTIONS):
            cut = length if i % 2 else rng.randint(length // 2, length)
            question = document[:cut] + ids(8, 60)
            found.append(conversation("document", f"document-{length}-{i}", [question]))
    for i in range(CHATS):
        additions: list[Any] = [ids(150, 600), *(ids(20, 80) for _ in range(TURNS - 1))]
        if i % 2:
            additions = [tokenizer.decode(addition) for addition in additions]
        found.append(conversation("chat", f"chat-{i}", additions))
    found += [conversation("short", f"short-{i}", [ids(8, 100)]) for i in range(SHORT)]
    return found

"""Six tasks of real text with the embedded model, for ``fidelity.py``.

Long texts are Python's reference documentation and the source of its standard library; what is
asked about them, incident records and keys are made up. Chats follow the model's own template.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from random import Random
from typing import Any

import prompts as texts
from _tasks import TICKET

CONTEXTS = (1000, 2000, 4000)
NEEDLE_CONTEXTS = (1000, 2000, 4000, 8000)
# Of the haystack, by prompt.
DEPTHS = (0.5, 0.15, 0.8, 0.35, 0.65, 0.05, 0.95, 0.25)

QUESTIONS = (
    ("with", "What happens, step by step, when a with statement is executed?"),
    ("try", "When are the else and finally clauses of a try statement executed?"),
    ("assignment", "What happens when a list is assigned to several targets?"),
    ("import", "What does the from form of the import statement do, step by step?"),
    ("attribute-access", "How can a class customise what reading an attribute returns?"),
    ("typesseq", "Which operations do most sequence types support?"),
)
SUMMARISED = ("debugger", "formatstrings", "execmodel", "class", "customization", "integers")
MODULES = ("tarfile", "argparse", "subprocess", "smtplib", "configparser", "zipfile")
CHATS = (
    ("for", "lambda", "global"),
    ("while", "assert", "del"),
    ("yield", "return", "raise"),
    ("slicings", "subscriptions", "calls"),
    ("comparisons", "booleans", "operator-summary"),
    ("numbers", "strings", "identifiers"),
)
SERVICES = ("billing-gateway", "mail-relay", "search-index", "image-cache", "ledger", "auth-proxy")


@dataclass(frozen=True)
class Case:
    """One prompt.

    Attributes:
        ids: token ids.
        new_tokens: most tokens of its text; None for the benchmark's own number.
        fact: what a right answer contains, if that can be told.
    """

    ids: list[int]
    new_tokens: int | None = None
    fact: str | None = None


class TaskTexts:
    """Builds the prompts of every task with one tokenizer (of ``transformers``)."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._manual = self._encode(texts.documentation())

    def cases(self, task: str, count: int, longest: int) -> Iterator[Case]:
        """``count`` prompts of ``TASKS[task]``, of at most ``longest`` tokens of long text each."""
        contexts = NEEDLE_CONTEXTS if task == "needle" else CONTEXTS
        for index, context in zip(range(count), itertools.cycle(contexts), strict=False):
            yield TASKS[task](self, index, min(context, longest))

    def question(self, index: int, context: int) -> Case:
        """A question about one section in the middle of the documentation around it."""
        topic, question = QUESTIONS[index % len(QUESTIONS)]
        passage = self._encode(topics[topic])[: context // 2]
        around = self._passage(index, context - len(passage))
        half = len(around) // 2
        document = self.decode(around[:half] + passage + around[half:])
        return self._chat(f"{document}\n\nAnswer from the text above: {question}")

    def code(self, index: int, context: int) -> Case:
        """Source of the standard library, to be continued."""
        ids = self._encode(texts.source(MODULES[index % len(MODULES)]))
        return Case(ids[:context])

    def summary(self, index: int, context: int) -> Case:
        """A section of the documentation, and what follows it up to the context, to sum up."""
        at = sorted(topics).index(SUMMARISED[index % len(SUMMARISED)])
        text = "\n\n".join(topics[name] for name in sorted(topics)[at:])
        document = self.decode(self._encode(text)[:context])
        return self._chat(f"{document}\n\nSummarise the text above in a few sentences.")

    def dialogue(self, index: int, context: int) -> Case:
        """Questions answered with sections of the documentation, then one back to the first."""
        names = CHATS[index % len(CHATS)]
        messages: list[dict[str, str]] = []
        for name in names:
            filler = self._passage(7 * index + len(messages), context // len(names))
            answer = (self._encode(topics[name]) + filler)[: context // len(names)]
            messages.append({"role": "user", "content": f"What should I know about {name}?"})
            messages.append({"role": "assistant", "content": self.decode(answer)})
        last = f"Thank you. Explain again what you said about {names[0]}, with an example."
        return self._chat(last, messages)

    def tool(self, index: int, context: int) -> Case:
        """An incident record in the middle of documentation, to be passed to a tool as JSON.

        The beginning of the answer is given, as servers do that force a tool call.
        """
        random = Random(f"tool/{index}")
        record = {
            "service": SERVICES[index % len(SERVICES)],
            "error_code": f"E-{random.randrange(10_000, 99_999)}",
            "host": f"node-{random.randrange(1000, 9999)}",
            "port": random.randrange(10_000, 65_000),
        }
        around = self._passage(index + 3, context)
        half = len(around) // 2
        document = (
            f"{self.decode(around[:half])}\n\nIncident record: {json.dumps(record)}\n\n"
            f"{self.decode(around[half:])}"
        )
        tool = json.dumps({"name": "open_ticket", "parameters": TICKET})
        order = (
            f"{document}\n\nYou have this tool: {tool}\nOpen a ticket: call open_ticket with the "
            f"incident record above, as JSON."
        )
        return self._chat(order, begun='{"name": "open_ticket", "arguments": {"service": "')

    def needle(self, index: int, context: int) -> Case:
        """A key planted in documentation, to be repeated at its end."""
        random = Random(f"needle/{index}")
        parts = ["".join(random.choices("abcdefghkmnpqrstuvwxyz23456789", k=4)) for _ in range(4)]
        key = "-".join(parts)
        around = self._passage(index + 5, context)
        at = round(DEPTHS[index % len(DEPTHS)] * len(around))
        sentence = "The access key of this manual is"
        text = (
            f"{self.decode(around[:at])}\n\n{sentence} {key}.\n\n"
            f"{self.decode(around[at:])}\n\n{sentence}"
        )
        return Case(self._encode(text), new_tokens=24, fact=key)

    def _passage(self, index: int, tokens: int) -> list[int]:
        """``tokens`` tokens of the documentation, elsewhere for every ``index``."""
        start = 9973 * index % (len(self._manual) - tokens)
        return self._manual[start : start + tokens]

    def _chat(self, last: str, before: list[dict[str, str]] | None = None, begun: str = "") -> Case:
        messages = [*(before or []), {"role": "user", "content": last}]
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return Case(self._encode(text + begun))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


TASKS: dict[str, Callable[[TaskTexts, int, int], Case]] = {
    "questions": TaskTexts.question,
    "code": TaskTexts.code,
    "summaries": TaskTexts.summary,
    "chat": TaskTexts.dialogue,
    "tools": TaskTexts.tool,
    "needle": TaskTexts.needle,
}

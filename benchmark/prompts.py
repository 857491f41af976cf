"""Prompts of real text at exact token counts: language documentation and library source.

The text ships with Python itself, so every machine with the same Python has the same prompts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Long modules of the standard library, each written by other people in another style.
MODULES = (
    "argparse", "asyncio.base_events", "configparser", "doctest", "difflib", "email.message",
    "http.client", "imaplib", "inspect", "logging.config", "mailbox", "optparse", "pathlib",
    "pickletools", "platform", "shutil", "smtplib", "socket", "ssl", "statistics", "subprocess",
    "tarfile", "tempfile", "threading", "turtle", "typing", "urllib.request", "uuid", "zipfile",
)  # fmt: skip


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model directory."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


def documentation() -> str:
    """The reference documentation of Python that ``help()`` shows, about 110,000 tokens."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def source(module: str) -> str:
    """Source of a module of the standard library.

    Raises:
        ModuleNotFoundError: this Python lacks its source.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        raise ModuleNotFoundError(f"no source of {module}")
    return Path(spec.origin).read_text(encoding="utf-8")


class Corpus:
    """Hands out prompts that share no text: documentation and source in turn."""

    def __init__(self, tokenizer: Tokenizer):
        code = "\n\n".join(source(module) for module in MODULES)
        self._texts = [
            tokenizer.encode(text, add_special_tokens=False).ids for text in (documentation(), code)
        ]
        self._used = [0 for _ in self._texts]
        self._turn = itertools.cycle(range(len(self._texts)))

    def prompt(self, tokens: int) -> list[int]:
        """The next prompt, exactly ``tokens`` token ids.

        Raises:
            ValueError: the text is used up.
        """
        turn = next(self._turn)
        text, start = self._texts[turn], self._used[turn]
        if start + tokens > len(text):
            raise ValueError(f"no real text left for a prompt of {tokens} tokens")
        self._used[turn] = start + tokens
        return text[start : start + tokens]

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """``count`` distinct prompts of ``tokens`` token ids each."""
        return [self.prompt(tokens) for _ in range(count)]


def digest(prompts: Iterable[Iterable[int]]) -> str:
    """Short fingerprint of token ids, to tell whether two runs used the same prompts."""
    text = ";".join(",".join(map(str, prompt)) for prompt in prompts)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

"""Real prompts of various lengths, from Python's own documentation and source code."""

from __future__ import annotations

import argparse
import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHARACTERS_PER_TOKEN = 3  # low for English and code, so that a prompt never exceeds its share
TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "maxLength": 40},
        "arguments": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["function", "arguments"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Prompt:
    """One prompt, and the sampling parameters that belong to it."""

    name: str
    text: str
    sampling: dict[str, Any] = field(default_factory=dict)


def from_file(path: Path) -> list[Prompt]:
    """Prompts of a file: one JSON string a line.

    Raises:
        ValueError: a line is none.
    """
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            text = json.loads(line)
        except json.JSONDecodeError:
            text = None
        if not isinstance(text, str):
            raise ValueError(f"{path}:{number}: expected one JSON string a line")
        prompts.append(Prompt(f"{path.name}:{number}", text))
    return prompts


def built_in(count: int, context: int) -> list[Prompt]:
    """``count`` prompts, the longest near three quarters of ``context`` tokens."""
    prompts = []
    for i in range(count):
        repeat, kind = divmod(i, len(KINDS))
        share = SHARES[(kind + repeat) % len(SHARES)]
        name, make, sampling = KINDS[kind]
        text = make(int(share * context * CHARACTERS_PER_TOKEN), repeat)
        prompts.append(Prompt(f"{i} {name} ({len(text)} characters)", text, sampling))
    return prompts


def documentation(characters: int, skip: int) -> str:
    """Python's help topics, starting with another one for each ``skip``."""
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: -len(topics[name]))
    return "\n\n".join(topics[name] for name in names[3 * skip :])[:characters]


def code(characters: int, skip: int) -> str:
    """Source code of one of three modules."""
    modules = (argparse, inspect, typing)
    return inspect.getsource(modules[skip % len(modules)])[:characters]


def copy_identifier(characters: int, skip: int) -> str:
    """A key at the start of a long text, and a question for it at the end."""
    key = f"request_{7919 * (skip + 11)}_kQ9xZr4vT2mB8wLp"
    return (
        f"The access key is {key}.\n\n{documentation(characters, skip + 1)}\n\n"
        "Question: what is the access key? Repeat it exactly.\nAnswer: The access key is"
    )


def tool_call(characters: int, skip: int) -> str:
    return f"{code(characters, skip + 1)}\n\n# One call of a function above, as JSON:\n"


# Name, function of (characters, repeat), sampling parameters.
KINDS: tuple[tuple[str, Callable[[int, int], str], dict[str, Any]], ...] = (
    ("continue text", documentation, {}),
    ("copy an identifier", copy_identifier, {}),
    ("continue code", code, {}),
    ("tool call", tool_call, {"json_schema": json.dumps(TOOL_SCHEMA)}),
)
SHARES = (0.75, 0.125, 0.5, 0.25)

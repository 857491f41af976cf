"""Servers of the tests of what requests ask for: one for nearly all, one with other outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from server.comparing import assert_identical
from server.harness import Ask, Result, ServerSpec
from server.specs import MIN_TOKENS, WINDOW

MAX_DRAFT_LEN = 16
DRAFT_LEN = 6
# Views of half a context: drafts of short prompts are rejected now and then, not nearly always.
_FLAGS = (
    *("--vericache-compressor", "snapkv", "--vericache-ratio", "0.5"),
    *("--vericache-settings", json.dumps({"window": WINDOW, "min_tokens": MIN_TOKENS})),
    *("--vericache-draft-len", str(MAX_DRAFT_LEN), "--vericache-refresh", "1"),
)
SERVING = ServerSpec((*_FLAGS, "--enable-custom-logit-processor", "--tool-call-parser", "qwen25"))
# Another one for what changes every answer: chunks hold what is new only, thoughts are told apart,
# sessions keep their KV between turns, and a request for too many tokens is cut.
INCREMENTAL = ServerSpec(
    (
        *_FLAGS,
        *("--incremental-streaming-output", "--reasoning-parser", "qwen3"),
        *("--enable-streaming-session", "--allow-auto-truncate", "--vericache-allow-unverified"),
    )
)
EOS = 2
CHAT_EOS = "<|im_end|>"
# A tool whose arguments even a small model finishes.
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "maximum": 99},
                "b": {"type": "integer", "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def assert_same(found: Sequence[Result], expected: Sequence[Result], asks: Iterable[Ask]) -> None:
    """``assert_identical`` and equal counts of tokens, of drafts that were accepted in part.

    Raises:
        AssertionError: also if no draft was made or none rejected, as that tests nothing.
    """
    names = [(ask.vericache, ask.tokens, ask.sampling) for ask in asks]
    assert_identical(found, expected, names)
    counts = [[answer.meta["completion_tokens"] for answer in each] for each in (found, expected)]
    assert counts[0] == counts[1]
    drafted, accepted = (sum(getattr(a, n) for a in found) for n in ("drafted", "accepted"))
    assert 0 < accepted < drafted, (accepted, drafted)
    assert all(answer.drafted == 0 for answer in expected)


def alternate(count: int, draft_len: int = DRAFT_LEN) -> list[dict[str, object]]:
    """``custom_params.vericache`` for ``count`` requests: compressors in turn."""
    names = ("snapkv", "identity", "random-kv")
    return [{"compressor": names[i % len(names)], "draft_len": draft_len} for i in range(count)]

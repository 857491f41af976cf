"""Compares answers bit for bit and keeps those of a reference server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from server.harness import Ask, LiveServer, Result, ServerSpec

if TYPE_CHECKING:
    from server.pool import ServerPool

PLAIN = {"enabled": False}
# What a small model can answer in a few tokens.
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}


def plain(ask: Ask) -> Ask:
    """The same request, decoded without drafts on the same server."""
    return replace(ask, vericache=PLAIN)


def difference(found: Result, expected: Result) -> str | None:
    """The first difference in ids, logprobs, text or finish reason; None if there is none."""
    pairs = zip(found.ids, expected.ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None:
        return f"token {at}: {found.ids[at]} instead of {expected.ids[at]}"
    if len(found.ids) != len(expected.ids):
        return f"{len(found.ids)} tokens instead of {len(expected.ids)}"
    if len(found.logprobs) != len(expected.logprobs):
        return f"{len(found.logprobs)} logprobs instead of {len(expected.logprobs)}"
    for i, (a, b) in enumerate(zip(found.logprobs, expected.logprobs, strict=True)):
        if a != b:
            return f"logprob {i}: {a!r} instead of {b!r}"
    if found.text != expected.text:
        return f"text {found.text!r} instead of {expected.text!r}"
    if found.finish != expected.finish:
        return f"finish {found.finish} instead of {expected.finish}"
    return None


def assert_identical(
    found: Iterable[Result], expected: Iterable[Result], names: Iterable[Any] | None = None
) -> None:
    """Assert that ids, logprobs (every bit), text and finish reason are equal, one by one.

    Args:
        names: of the answers, for the message; their indices by default.
    """
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    labels = list(names) if names is not None else list(range(len(found)))
    wrong = [
        f"{label}: {text}"
        for label, a, b in zip(labels, found, expected, strict=True)
        if (text := difference(a, b)) is not None
    ]
    assert not wrong, f"{len(wrong)} of {len(found)} answers differ:\n" + "\n".join(wrong)


class Reference:
    """Plain answers of one server; the same request is asked once a session.

    Args:
        pool: starts the server when an answer is missing.
        spec: of the server.
        vericache: replaces that of every request; None for a server without drafts.
    """

    def __init__(
        self, pool: ServerPool, spec: ServerSpec, vericache: Mapping[str, Any] | None = None
    ):
        self._pool, self._spec, self._vericache = pool, spec, vericache
        self._answers: dict[str, Result] = {}

    def server(self) -> LiveServer:
        """The server itself, for other questions."""
        return self._pool.get(self._spec)

    def answers(self, asks: Iterable[Ask]) -> list[Result]:
        """Plain answers to ``asks``, in order."""
        changed = [_plain(ask, self._vericache) for ask in asks]
        keys = [_key(ask.body()) for ask in changed]
        missing = {k: a for k, a in zip(keys, changed, strict=True) if k not in self._answers}
        if missing:
            server = self.server()
            first = next(iter(missing.values()))
            if not isinstance(first.prompt, str):
                server.warm(first.prompt)  # prompts of one question share most of their text
            found = server.concurrently(missing.values())
            self._answers.update(zip(missing, found, strict=True))
        return [self._answers[key] for key in keys]


def _plain(ask: Ask, vericache: Mapping[str, Any] | None) -> Ask:
    # Request ids are unique on a server, and a reference is asked by several tests.
    fields = {name: value for name, value in ask.fields.items() if name != "rid"}
    return replace(ask, vericache=vericache, fields=fields)


def _key(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)

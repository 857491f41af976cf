"""The four prompts of the demo: what compressed KV gets wrong in practice.

Each is a long real text with one detail that the answer depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import prompts as texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IDENTIFIER = "qx7-94b1-ue52-08fd-tk3"

TICKET = {
    "type": "object",
    "properties": {
        "service": {"type": "string", "maxLength": 24},
        "error_code": {"type": "string", "maxLength": 16},
        "host": {"type": "string", "maxLength": 24},
        "port": {"type": "integer"},
    },
    "required": ["service", "error_code", "host", "port"],
    "additionalProperties": False,
}
INCIDENT = (
    '{"service": "billing-gateway", "error_code": "E-77410", "host": "node-3817", "port": 48213}'
)


@dataclass(frozen=True)
class Task:
    """One request to the server.

    Attributes:
        name: what the task is.
        path: endpoint.
        body: JSON body without VeriCache's options and the length limit.
        answer: takes the compared text out of the response.
        meta: takes SGLang's ``meta_info`` out of the response.
    """

    name: str
    path: str
    body: dict[str, Any]
    answer: Callable[[dict[str, Any]], str]
    meta: Callable[[dict[str, Any]], dict[str, Any]]

    def request(self, options: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """The body with ``options`` as ``custom_params.vericache``."""
        custom = {"custom_params": {"vericache": options}, "temperature": 0}
        if self.path == "/generate":
            return self.body | {"sampling_params": custom | {"max_new_tokens": max_tokens}}
        return self.body | custom | {"max_tokens": max_tokens, "return_meta_info": True}


def tasks(tokenizer: Tokenizer, context: int) -> list[Task]:
    """The demo's tasks with prompts of about ``context`` tokens."""
    manual, code = texts.documentation(), texts.source("tarfile")
    call = "Open a ticket: repeat the incident record above as the parameters of open_ticket."
    answer = "Repeat the incident record above as JSON."
    return [
        _completion("copy an identifier", _identifier(tokenizer, manual, context)),
        _completion("continue code", cut(tokenizer, code, 0, context)),
        _chat("tool call", _incident(tokenizer, manual, 2 * context, context, call), _tool()),
        _chat("JSON schema", _incident(tokenizer, manual, 3 * context, context, answer), _schema()),
    ]


def cut(tokenizer: Tokenizer, text: str, start: int, tokens: int) -> str:
    """``tokens`` tokens of ``text`` from token ``start`` on."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.decode(ids[start : start + tokens], skip_special_tokens=False)


def _identifier(tokenizer: Tokenizer, manual: str, context: int) -> str:
    half = context // 2
    return (
        f"{cut(tokenizer, manual, 0, half)}\n\nThe access key of this manual is {IDENTIFIER}.\n\n"
        f"{cut(tokenizer, manual, half, half)}\n\nThe access key of this manual is"
    )


def _incident(tokenizer: Tokenizer, manual: str, start: int, context: int, order: str) -> str:
    """The incident in the middle of ``context`` tokens of the manual from token ``start`` on."""
    half = context // 2
    return (
        f"{cut(tokenizer, manual, start, half)}\n\nIncident record: {INCIDENT}\n\n"
        f"{cut(tokenizer, manual, start + half, half)}\n\n{order}"
    )


def _completion(name: str, prompt: str) -> Task:
    return Task(
        name,
        "/generate",
        {"text": prompt},
        answer=lambda response: response["text"],
        meta=lambda response: response["meta_info"],
    )


def _chat(name: str, prompt: str, options: dict[str, Any]) -> Task:
    return Task(
        name,
        "/v1/chat/completions",
        {"model": "default", "messages": [{"role": "user", "content": prompt}], **options},
        answer=lambda response: _content(response["choices"][0]["message"]),
        meta=lambda response: response["choices"][0]["meta_info"],
    )


def _content(message: dict[str, Any]) -> str:
    if calls := message.get("tool_calls"):
        return "; ".join(f"{c['function']['name']}({c['function']['arguments']})" for c in calls)
    return message.get("content") or ""


def _tool() -> dict[str, Any]:
    function = {
        "name": "open_ticket",
        "description": "Open a ticket for an incident.",
        "parameters": TICKET,
    }
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _schema() -> dict[str, Any]:
    schema = {"name": "ticket", "schema": TICKET, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}

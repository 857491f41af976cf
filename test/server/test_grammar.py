"""Structured output: drafts that the grammar forbids, grammars that end in a run (G1-G3)."""

import json
import re

import pytest

from server.harness import Ask
from server.serving import SERVING, alternate, assert_same

pytestmark = pytest.mark.server(SERVING)


def schema(**properties):
    """JSON schema of an object with exactly these members."""
    return json.dumps(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


WORD = {"type": "string", "pattern": "^[a-z]{3,8}$"}
CITY = schema(zebra_code=WORD, population={"type": "integer", "maximum": 99}, is_big={"enum": [0]})
SHORT = schema(ok={"type": "boolean"})
PROMPT = 'Paris as JSON: {"name": "Paris", "country": "France", "population": 2100000}\nLyon: '
GRAMMARS = (
    {"json_schema": CITY},
    {"json_schema": SHORT},
    {"regex": r"\(\d{3}\) \d{3}-\d{4}"},
    {"ebnf": 'root ::= "[" item ("," item)? "]"\nitem ::= "red" | "green" | "blue"'},
    {"json_schema": '{"type": "object", "maxProperties": 2, "additionalProperties": false, '
     '"properties": {"a": {"type": "integer", "maximum": 9}}}'},
)  # fmt: skip


def assert_valid(grammar, text):
    if "json_schema" in grammar:
        found, wanted = json.loads(text), json.loads(grammar["json_schema"])
        assert set(wanted.get("required", ())) <= set(found) <= set(wanted["properties"])
    elif "regex" in grammar:
        assert re.fullmatch(grammar["regex"], text)
    else:
        assert re.fullmatch(r"\[(red|green|blue)(,(red|green|blue))?\]", text)


def test_drafts_prefer_another_key(server, without_drafts):
    """G1: complete, valid, equal to plain decoding, with keys the model would not write."""
    free = server.ask(PROMPT, 8)
    assert "zebra" not in free.text
    sampling = {"json_schema": CITY, "ignore_eos": False}
    asks = [Ask(PROMPT, 80, vericache, sampling) for vericache in alternate(3)]
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    for answer in found:
        assert_valid({"json_schema": CITY}, answer.text)
        assert answer.finish["type"] == "stop"


@pytest.mark.parametrize(
    ("count", "at_once"), [(16, False), pytest.param(50, False, marks=pytest.mark.long), (24, True)]
)
def test_grammars_beside_plain_requests(count, at_once, server, without_drafts):
    """G2: one after the other and all at once, with plain and sampled requests between them."""
    asks = []
    for i, vericache in enumerate(alternate(count, draft_len=8)):
        grammar = {} if i % 4 == 3 else GRAMMARS[i % 5]
        sampling = {"ignore_eos": False, **grammar}
        if i % 3 == 2:
            sampling |= {"temperature": 0.8, "sampling_seed": i}
        asks.append(Ask(PROMPT, 80 if grammar else 16, vericache, sampling))
    found = server.concurrently(asks) if at_once else [server.answer(ask) for ask in asks]
    assert_same(found, without_drafts.answers(asks), asks)
    for i, answer in enumerate(found):
        if i % 4 != 3:
            assert_valid(GRAMMARS[i % 5], answer.text)


@pytest.mark.parametrize("grammar", [GRAMMARS[0], GRAMMARS[1]], ids=["long", "short"])
@pytest.mark.parametrize("draft_len", [3, 16])
def test_a_grammar_ends_inside_a_run(draft_len, grammar, server, without_drafts):
    """G3: nothing behind the closing brace, one logprob a token."""
    asks = [
        Ask(PROMPT, 80, vericache, {"ignore_eos": False, **grammar})
        for vericache in alternate(3, draft_len=draft_len)
    ]
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    for answer in found:
        assert_valid(grammar, answer.text)
        assert answer.text.endswith("}")
        assert len(answer.logprobs) == answer.meta["completion_tokens"] == len(answer.ids)


def test_json_object_of_the_chat_api(server):
    """G2: response_format json_object, plain and drafted."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Give me a tiny JSON object."}],
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "max_tokens": 64,
    }
    texts = []
    for vericache in ({"enabled": False}, *alternate(3)):
        response = server.post("/v1/chat/completions", body | {"vericache": vericache})
        assert response.status_code == 200, response.text
        texts.append(response.json()["choices"][0]["message"]["content"])
    assert len(set(texts)) == 1 and texts[0].lstrip().startswith("{")

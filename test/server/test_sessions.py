"""Streaming sessions, whose turns inherit KV without the prefix tree."""

import pytest

from server.comparing import assert_identical
from server.harness import Ask
from server.serving import INCREMENTAL

pytestmark = pytest.mark.server(INCREMENTAL)


def open_session(server):
    body = {"capacity_of_str_len": 100_000, "streaming": True}
    response = server.post("/open_session", body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("compressor", ["identity", "snapkv", "random-kv"])
def test_turns_equal_requests_with_the_whole_history(compressor, server, make_corpus):
    """The KV of a turn's last token, and of its rejected drafts, is not inherited."""
    corpus = make_corpus()
    session, history = open_session(server), ()
    for tokens in (9, 14, 5, 20):
        chunk = tuple(corpus.prompt(40))
        ask = Ask(
            chunk,
            tokens,
            {"compressor": compressor, "draft_len": 6},
            fields={"session_params": {"id": session, "rid": None}},
        )
        found = server.answer(ask)
        history += chunk
        assert found.meta["prompt_tokens"] == len(history)
        assert found.drafted > 0
        assert_identical([found], [server.answer(Ask(history, tokens, {"enabled": False}))])
        history += found.ids
    assert server.post("/close_session", {"session_id": session}).status_code == 200


def test_a_session_keeps_no_unverified_kv(server):
    session = open_session(server)
    vericache = {"unverified": True}
    ask = Ask("Hello", 4, vericache, fields={"session_params": {"id": session, "rid": None}})
    response = server.post("/generate", ask.body())
    assert response.status_code == 400
    assert "unverified" in response.text
    assert server.post("/close_session", {"session_id": session}).status_code == 200

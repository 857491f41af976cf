"""Talking to a server with a remote store: fill it, forget everything else, ask again."""

from __future__ import annotations

import time

from server.specs import STORE_PAGE as PAGE

POLICY = "wait_complete"
ADMIN = {"Authorization": "Bearer test"}


def flush(server):
    response = server.post("/flush_cache?timeout=30", {}, headers=ADMIN)
    assert response.status_code == 200, response.text


def usage(server):
    return server.get("/vericache")["ranks"][0]["storage"]


# Times that nothing may change before all is taken to be written: other load can hold up a server.
QUIET = 4


def stored(server, more_than=None):
    """Wait until everything that is to be written is written; counters then.

    Args:
        more_than: counters before something was to be written.
    """
    last, quiet, deadline = None, 0, time.monotonic() + 60
    while quiet < QUIET or (more_than is not None and last["written"] == more_than["written"]):
        assert time.monotonic() < deadline, f"nothing was written: {last}"
        now = usage(server)
        quiet = quiet + 1 if now == last else 0
        last = now
        time.sleep(0.3)
    return last


def compute(server, ask):
    """The answer of a server that has to compute the prompt, and what it stored."""
    flush(server)
    before = usage(server)
    answer = server.answer(ask)
    assert answer.meta["cached_tokens"] == 0
    assert answer.accepted > 0
    return answer, stored(server)["written"] - before["written"]


def from_store(server, ask):
    """The answer after host and device forgot the prompt, and the pages that came back."""
    flush(server)
    answer = server.answer(ask)
    details = answer.meta["cached_tokens_details"] or {"device": 0, "host": 0, "storage": 0}
    assert details["device"] == details["host"] == 0
    stored(server)
    return answer, details["storage"] / PAGE

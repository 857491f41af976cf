"""X0 and X1 while a store delivers: drafts on the compressed copy change nothing.

The link of the store is slow, so that there is time to draft; every test asserts that it was used.
"""

import json
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.comparing import SCHEMA, assert_identical
from server.harness import Ask
from server.specs import REMOTE, REMOTE_PACKED
from server.storing import ADMIN, PAGE, compute, flush, from_store

pytestmark = [pytest.mark.slow, pytest.mark.server(REMOTE)]

CONTEXT = 40 * PAGE
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    "penalised": {"frequency_penalty": 0.7, "min_new_tokens": 20},
    "schema": {"json_schema": json.dumps(SCHEMA), "ignore_eos": False},
}


@pytest.fixture
def prompts(make_corpus, request):
    """Prompts of this test alone, which the store has not seen: their first token is its own."""
    first = 1000 + zlib.crc32(request.node.name.encode()) % 10000

    def make(count, tokens):
        return [(first, *prompt[1:]) for prompt in make_corpus().prompts(count, tokens)]

    return make


def drafted_meanwhile(server, before):
    """Requests that drafted before their full KV had come since ``before``, and their drafts."""
    after = server.counters()
    return tuple(after[name] - before[name] for name in ("provisional", "proposed"))


def copied(server, ask):
    """The answer of a server that has to compute the prompt, with its copy in the store."""
    expected, _ = compute(server, ask)
    assert expected.meta["vericache"]["drafted"] > 0  # a view was chosen, and so written
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_before_the_full_kv(kind, server, prompts):
    (prompt,) = prompts(1, CONTEXT + 5)
    ask = Ask(prompt, 40, {"draft_len": 4}, sampling=KINDS[kind])
    expected = copied(server, ask)
    before = server.counters()
    found, pages = from_store(server, ask)
    assert_identical([found], [expected])
    assert pages == CONTEXT // PAGE
    requests, drafts = drafted_meanwhile(server, before)
    assert requests == 1 and drafts > 4
    assert found.accepted > 0


def test_a_longer_question_about_a_known_text(server, prompts):
    """Z8: whoever shares the beginning of a prompt drafts on that part of its copy."""
    (prompt,) = prompts(1, CONTEXT)
    copied(server, Ask(prompt, 24, {"draft_len": 4}))
    ask = Ask((*prompt[: CONTEXT - 40], *prompt[:100]), 24, {"draft_len": 4})
    before = server.counters()
    found, pages = from_store(server, ask)
    assert 0 < pages < CONTEXT // PAGE
    assert drafted_meanwhile(server, before)[0] == 1
    plain = Ask(ask.prompt, ask.tokens, {"enabled": False})
    expected, _ = from_store(server, plain)
    assert_identical([found], [expected])
    assert drafted_meanwhile(server, before)[0] == 1, "drafted for a request that must not"


def test_many_at_once_and_some_that_leave(server, prompts):
    """More than the device holds; aborts while copies, full KV and drafts are on their way."""
    asks = [Ask(prompt, 24, {"draft_len": 4}) for prompt in prompts(8, CONTEXT + 3)]
    expected = [copied(server, ask) for ask in asks]
    flush(server)
    before = server.counters()
    leaving = [
        Ask(ask.prompt, 24, fields={"rid": f"remote-leaves-{i:02}"}) for i, ask in enumerate(asks)
    ]
    with ThreadPoolExecutor(len(leaving)) as threads:
        running = [threads.submit(server.answer, ask) for ask in leaving[:4]]
        found = threads.submit(server.concurrently, asks)
        for i, ask in enumerate(leaving[:4]):
            time.sleep(0.1 * i)
            while not running[i].done():  # an id that has not arrived yet is ignored
                server.post("/abort_request", {"rid": ask.fields["rid"]}, headers=ADMIN)
                time.sleep(0.02)
        assert_identical(found.result(), expected)
        reasons = [future.result().finish["type"] for future in running]
    assert "abort" in reasons
    # Who is refused for want of room drafts no more, so how many did is up to chance.
    assert drafted_meanwhile(server, before)[0] > 0
    server.check_idle()


@pytest.mark.server(REMOTE_PACKED)
def test_drafts_on_codes(server, prompts):
    """Copies of a quantizing compressor come as its codes, and drafts on them are good ones."""
    asks = [Ask(prompt, 9, {"draft_len": 8}) for prompt in prompts(2, CONTEXT + 5)]
    start = server.counters()
    expected = [copied(server, ask) for ask in asks]
    before = server.counters()
    found = [from_store(server, ask)[0] for ask in asks]
    assert_identical(found, expected)
    requests, drafts = drafted_meanwhile(server, before)
    # How many is a matter of time: the link has its speed, the processor may have other work.
    most = sum(len(answer.ids) for answer in found)
    assert requests == 2 and 2 <= drafts <= most
    # What was drafted meanwhile and holds is not drafted again.
    read = [after["kv_bytes_read"] for after in (start, before, server.counters())]
    assert read[2] - read[1] < (1 - 0.3 * drafts / most) * (read[1] - read[0])
    assert server.get("/vericache")["ranks"][0]["packed"]["int4"]["used"] == 0

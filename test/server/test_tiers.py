"""What may go wrong with full KV on the host between verify passes; X0 and X1 hold all the way.

The device of these servers holds the contexts of two or three requests, so that most verify passes
find their full KV on the host only; every test asserts that copies were made.
"""

import itertools
import random
import threading
import time
from dataclasses import replace

import pytest

from server.comparing import assert_identical
from server.harness import Ask
from server.serving import TOOL
from server.specs import (
    COMPRESSORS,
    TIER_TOKENS,
    TIERED,
    TIERED_AUTO,
    TIERED_LATE,
    TIERED_TIGHT,
)

CONTEXT = 420
# All but identity: a copy of everything saves nothing, so such a request stays on the device.
DROPPERS = [name for name in COMPRESSORS if name != "identity"]
FORCED = [
    pytest.param(dtype, id=dtype, marks=pytest.mark.server(spec)) for dtype, spec in TIERED.items()
]
HOST = pytest.mark.server(TIERED["bfloat16"])


def asks(make_corpus, count, tokens, context=CONTEXT, first=0):
    """Prompts that only fit together without their full KV; compressors and lengths in turn."""
    prompts = make_corpus().prompts(first + count, context)[first:]
    assert count * context > 2 * TIER_TOKENS or count == 1
    return [
        Ask(tuple(prompt), tokens, {"compressor": DROPPERS[i % 4], "draft_len": 3 + i % 6})
        for i, prompt in enumerate(prompts)
    ]


def moved(server, before):
    """Change of the counters since ``before``, after asserting that host copies were used."""
    after = server.counters()
    names = ("offloads", "stages", "staged_tokens", "copied_ahead", "host_reads")
    change = {name: after[name] - before[name] for name in names}
    change["moved"] = change["staged_tokens"] + change["copied_ahead"] + change["host_reads"]
    assert change["offloads"] > 0 and change["moved"] > 0, change
    copies = server.get("/vericache")["config"]["staging"] == "copy"
    assert change["host_reads"] == 0 if copies else change["host_reads"] > 0, change
    return change


@HOST
def test_what_only_fits_compressed_is_admitted(server, off, make_corpus):
    """Z6: at least twice as many run at once, and nobody is retracted."""
    prompts = make_corpus().prompts(8, CONTEXT)
    assert 8 * CONTEXT > 2 * TIER_TOKENS
    most = []
    for compressor in ("identity", "snapkv"):
        vericache = {"compressor": compressor, "draft_len": 6}
        given = [Ask(tuple(prompt), 24, vericache) for prompt in prompts]
        before = server.counters()["offloads"]
        running, seen = [server.submit(ask) for ask in given], []
        while not all(each.done() for each in running):
            seen.append(server.get("/vericache")["ranks"][0])
        found = [each.result() for each in running]
        assert_identical(found, off["bfloat16"].answers(given))
        assert not any(answer.meta["num_retractions"] for answer in found)
        assert (server.counters()["offloads"] > before) == (compressor != "identity")
        tiers = [rank["tiers"] for rank in seen if rank["tiers"]]
        assert all(t["compressed"] + t["device_free"] <= t["device"] == TIER_TOKENS for t in tiers)
        most.append(max(len(rank["running"]) for rank in seen))
    assert most[0] == TIER_TOKENS // CONTEXT and most[1] >= 2 * most[0], most


@pytest.mark.server(TIERED_AUTO)
def test_under_pressure_only(server, off, make_corpus):
    """One request stays resident; of eight some leave, and return once there is room again."""
    first, *others = asks(make_corpus, 8, 16)
    before = server.counters()
    assert_identical([server.answer(first)], off["bfloat16"].answers([first]))
    assert server.counters()["offloads"] == before["offloads"]
    given = [replace(first, tokens=120), *others]
    found = server.concurrently(given)
    assert_identical(found, off["bfloat16"].answers(given))
    assert not any(answer.meta["num_retractions"] for answer in found)
    after = server.counters()
    assert after["offloads"] > before["offloads"]
    assert after["returns"] > before["returns"]


@pytest.mark.parametrize("dtype", FORCED)
def test_decoding_from_the_host_alone(dtype, server, off, make_corpus):
    """E9, Z8: the prompt is on the host only when it is asked for; usage counts all of it.

    While it decodes others take the device, so its verify passes find it on the host again.
    """
    page = server.get("/server_info")["page_size"]
    first, *others = given = asks(make_corpus, 8, 32)
    assert first.vericache["compressor"] != "identity"
    server.answer(first)
    server.concurrently(others)  # push it off the device
    before = server.counters()
    again, *_ = found = server.concurrently(given)
    whole = (CONTEXT - 1) // page * page
    assert again.meta["cached_tokens_details"] == {"device": 0, "host": whole}
    assert again.meta["prompt_tokens"] == CONTEXT
    assert_identical(found, off[dtype].answers(given))
    assert moved(server, before)["moved"] > 8 * CONTEXT, "more than once each"


@HOST
def test_a_tool_call_after_a_round_trip(server, make_corpus, tokenizer):
    """H1: device, host, device, then arguments of a tool."""
    text = tokenizer.decode(make_corpus().prompt(CONTEXT))
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text + "\nWhat is 3 plus 4? Use the tool."}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "max_tokens": 60,
        "temperature": 0,
        "return_cached_tokens_details": True,
    }
    plain = {"custom_params": {"vericache": {"enabled": False}}}
    expected, *_ = [server.post("/v1/chat/completions", body | plain).json()]
    server.concurrently(asks(make_corpus, 8, 2, first=1))
    before = server.counters()
    found = server.post("/v1/chat/completions", body).json()
    after = server.counters()
    assert after["drafted"] > before["drafted"] and after["offloads"] > before["offloads"]
    details = found["sglext"]["cached_tokens_details"]
    assert details["device"] == 0 and details["host"] > CONTEXT, details
    message = found["choices"][0]["message"]
    assert message["tool_calls"]
    assert message == expected["choices"][0]["message"] | {"tool_calls": message["tool_calls"]}
    calls = [m["choices"][0]["message"]["tool_calls"][0]["function"] for m in (found, expected)]
    assert calls[0] == calls[1]


@HOST
def test_two_views_of_one_prefix(server, off, make_corpus):
    """Z8: requests share a prefix on the host and draft from different views of it."""
    corpus = make_corpus()
    shared = tuple(corpus.prompt(CONTEXT))
    given = [
        Ask(shared + tuple(corpus.prompt(12)), 30, {"compressor": name, "draft_len": 5})
        for name in COMPRESSORS * 2
    ]
    server.warm(shared)
    server.concurrently(asks(make_corpus, 8, 2, first=9))  # push it off the device
    before = server.counters()["offloads"]
    found = server.concurrently(given)
    assert_identical(found, off["bfloat16"].answers(given))
    assert server.counters()["offloads"] > before
    details = [answer.meta["cached_tokens_details"] for answer in found]
    assert any(d and d.get("host", 0) >= CONTEXT - 1 for d in details), details


@HOST
@pytest.mark.parametrize("count", [36, pytest.param(200, marks=pytest.mark.long)])
def test_aborts_in_every_state(count, server, off, make_corpus):
    """H6: by id and by leaving, at random times; others are untouched and nothing leaks."""
    rng = random.Random(11)
    given = asks(make_corpus, 8, 40)
    before = server.counters()
    survivors = [server.submit(ask) for ask in given[:2]]

    def start_and_abort(i):
        rid = f"tier-abort-{count}-{i:03d}"
        ask = Ask(given[2 + i % 6].prompt, 200, given[i % 8].vericache, {}, {"rid": rid})
        with server.post("/generate", ask.body() | {"stream": True}, stream=True) as response:
            lines = response.iter_lines()
            for _ in range(rng.randint(0, 12)):
                next(lines, None)
            if i % 2:
                server.abort(rid)
                list(lines)

    threads = [threading.Thread(target=start_and_abort, args=(i,)) for i in range(count)]
    for start in range(0, len(threads), 6):
        for thread in threads[start : start + 6]:
            thread.start()
        for thread in threads[start : start + 6]:
            thread.join()
    found = [each.result() for each in survivors]
    assert_identical(found, off["bfloat16"].answers(given[:2]))
    moved(server, before)
    server.check_idle()
    tiers = server.get("/vericache")["ranks"][0]["tiers"]
    assert tiers["compressed"] == tiers["offloaded"] == tiers["staged"] == 0
    server.flush()
    tiers = server.get("/vericache")["ranks"][0]["tiers"]
    assert (tiers["device_free"], tiers["host_free"]) == (tiers["device"], tiers["host"])
    before = server.counters()
    assert_identical(server.concurrently(given), off["bfloat16"].answers(given))
    moved(server, before)


@HOST
def test_turns_of_a_chat(server, off, make_corpus):
    """Each turn finds all of the last one, its answer included, whichever tier holds it."""
    corpus = make_corpus()
    history = tuple(corpus.prompt(CONTEXT))
    others = asks(make_corpus, 8, 2, first=9)
    known = 0
    for _ in range(3):
        ask = Ask(history, 25, {"compressor": "snapkv", "draft_len": 5})
        found = server.answer(ask)
        assert_identical([found], off["bfloat16"].answers([ask]))
        assert found.meta["cached_tokens"] >= known, found.meta
        server.concurrently(others)
        known = len(history) + len(found.ids) - 1
        history += found.ids + tuple(corpus.prompt(20))


@HOST
def test_a_salt_holds_below_the_device(server, make_corpus):
    """H11: another salt finds nothing, on either tier; the same one finds all."""
    prompt = tuple(make_corpus().prompts(20, CONTEXT)[19])

    def cached(salt):
        return server.ask(prompt, 4, fields={"cache_salt": salt}).meta

    assert cached("a")["cached_tokens"] == 0
    assert cached("b")["cached_tokens"] == 0
    server.concurrently(asks(make_corpus, 8, 2))  # push both off the device
    assert cached("c")["cached_tokens"] == 0
    found = cached("a")
    assert found["cached_tokens"] == CONTEXT - 1
    assert found["cached_tokens_details"]["host"] > 0


@pytest.mark.server(TIERED_TIGHT)
def test_a_host_pool_of_one_request(server, off, make_corpus):
    """H4: whoever finds no room there stays on the device; see ``mem_cache/test_tiered.py``."""
    given = asks(make_corpus, 8, 24)
    before = server.counters()["offloads"]
    found = server.concurrently(given)
    assert_identical(found, off["bfloat16"].answers(given))
    assert server.counters()["offloads"] > before
    tiers = server.get("/vericache")["ranks"][0]["tiers"]
    assert CONTEXT < tiers["host"] < 1.4 * CONTEXT


@pytest.mark.server(TIERED_TIGHT)
def test_many_small_requests_get_through(server, off, make_corpus):
    """H9: a host pool smaller than the device's starves nobody; somebody ends every 10 s."""
    prompts = make_corpus().prompts(23, TIER_TOKENS // 20)
    given = [Ask(tuple(prompt), 12, {"draft_len": 4}) for prompt in prompts]
    assert sum(len(prompt) for prompt in prompts) > TIER_TOKENS, "they must queue"
    before, began, ends = server.counters()["offloads"], time.monotonic(), []
    running = [server.submit(ask) for ask in given]
    for each in running:
        each.add_done_callback(lambda _: ends.append(time.monotonic()))
    assert_identical([each.result() for each in running], off["bfloat16"].answers(given))
    assert all(later - one < 10 for one, later in itertools.pairwise([began, *ends]))
    assert server.counters()["offloads"] > before
    tiers = server.get("/vericache")["ranks"][0]["tiers"]
    assert tiers["host"] < tiers["device"]


@pytest.mark.server(TIERED_LATE)
def test_late_copies(server, off, make_corpus):
    """H2: no pass reads KV before it has arrived; see also the matrix, and ``make soak``."""
    given = asks(make_corpus, 8, 16)
    # Twins share every node, and are staged by each other's copies.
    given = [*given, *given[:4], *(Ask((*a.prompt, 7, 8, 9), 16, a.vericache) for a in given[4:])]
    before = server.counters()
    for _ in range(8):
        assert_identical(server.concurrently(given), off["float32"].answers(given))
        # Whether a copy is planned ahead hangs on times that other work on the machine changes.
        if server.counters()["copied_ahead"] > before["copied_ahead"]:
            break
    else:
        pytest.fail("nothing was copied ahead")
    moved(server, before)
    assert "saboteur: copies are spoiled" in server.process.log.read_text(errors="replace")

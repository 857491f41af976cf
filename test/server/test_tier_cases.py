"""Cases K7, K12, K14 and H16 with full KV on the host between verify passes.

Without a tier they are in ``test_kv_slots.py`` and ``test_limits.py``.
"""

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.comparing import assert_identical, difference
from server.harness import Ask, RequestFailed, Result
from server.specs import TIER_TOKENS, TIERED, TIERED_RETRACTING
from server.test_tiers import CONTEXT, DROPPERS, FORCED, HOST, moved

PAGE = 16
PAGED = pytest.mark.server(TIERED["float32"])


def stream_and_abort(server, ask, chunks):
    """Abort a request by its id after some chunks; what was answered until then."""
    with server.post("/generate", ask.body() | {"stream": True}, stream=True) as response:
        assert response.status_code == 200, response.text
        found = None
        lines = (line for line in response.iter_lines() if line.startswith(b"data: {"))
        for count, line in enumerate(lines, 1):
            found = Result.of(json.loads(line[6:]))
            if count == chunks:
                server.abort(ask.fields["rid"])
    return found


@pytest.mark.parametrize("repeats", [3, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", FORCED)
def test_cancelled_sharers_corrupt_nobody(dtype, repeats, server, off, make_corpus):
    """K7: four requests share 128 tokens; two are cancelled and retried beside a stranger."""
    rng, corpus = random.Random(7), make_corpus()
    shared = tuple(corpus.prompt(128))
    prompts = [shared + tuple(corpus.prompt(300)) for _ in range(4)] + [tuple(corpus.prompt(400))]
    given = [
        Ask(prompt, 16, {"compressor": DROPPERS[i % 4], "draft_len": 3})
        for i, prompt in enumerate(prompts)
    ]
    assert sum(map(len, prompts)) - 3 * len(shared) > TIER_TOKENS
    expected = off[dtype].answers(given)
    before, cut = server.counters(), 0
    with ThreadPoolExecutor(2) as threads:
        for repeat in range(repeats):
            named = [
                Ask(
                    ask.prompt,
                    ask.tokens,
                    ask.vericache,
                    fields={"rid": f"tier-share-{repeats}-{repeat}-{i}"},
                )
                for i, ask in enumerate(given)
            ]
            running = [server.submit(ask) for ask in named[2:]]
            chunks = [rng.randint(1, 3) for _ in range(2)]
            cancelled = list(
                threads.map(lambda a, n: stream_and_abort(server, a, n), named, chunks)
            )
            retried = [server.submit(ask) for ask in given[:2]]
            assert_identical([future.result() for future in running], expected[2:])
            assert_identical([future.result() for future in retried], expected[:2])
            for found, answer in zip(cancelled, expected, strict=False):
                if found.finish["type"] == "abort":
                    cut += 1
                    assert 0 < len(found.ids) < len(answer.ids)
                    assert found.ids == answer.ids[: len(found.ids)]
                    assert found.logprobs == answer.logprobs[: len(found.logprobs)]
                else:
                    assert difference(found, answer) is None
    assert cut >= repeats, cut
    moved(server, before)


@HOST
@pytest.mark.parametrize("compressor", ["snapkv", "snapkv-per-head"])
def test_a_pool_smaller_than_one_request(compressor, server, off, make_corpus):
    """K12: what outgrows the pool, or cannot enter it, gets an error; the next request works."""
    corpus = make_corpus()
    vericache = {"compressor": compressor, "draft_len": 4}
    context = TIER_TOKENS - 80
    long = Ask(tuple(corpus.prompt(context)), TIER_TOKENS, vericache)
    short = Ask(tuple(corpus.prompt(CONTEXT)), 12, vericache)
    with pytest.raises(RequestFailed, match="Out of memory"):
        server.answer(long)
    with pytest.raises(RequestFailed, match="length") as refused:
        server.ask(corpus.prompt(TIER_TOKENS), 4)
    assert refused.value.status == 400
    before = server.counters()["offloads"]
    assert_identical([server.answer(short)], off["bfloat16"].answers([short]))
    assert server.counters()["offloads"] > before


@pytest.mark.server(TIERED_RETRACTING)
def test_retraction_changes_nothing(server, off, make_corpus):
    """K14: offloaded requests are retracted again and again; big-pool answers are the reference."""
    tokens = 40
    prompts = [tuple(prompt) for prompt in make_corpus().prompts(6, 220)]
    options = [{"compressor": DROPPERS[i % 4], "draft_len": (2, 4, 16)[i % 3]} for i in range(6)]
    given = [Ask(prompt, tokens, options[i]) for i, prompt in enumerate(prompts)]
    before = server.counters()
    streams = server.streams(given)
    found = [chunks[-1] for chunks in streams]
    assert_identical(found, off["bfloat16"].answers(given))
    moved(server, before)
    assert sum(answer.meta["num_retractions"] for answer in found) >= 3
    assert all(len(answer.logprobs) == tokens for answer in found)
    for chunks in streams:
        assert len(chunks) > 4  # one for each verify pass
        for earlier, later in itertools.pairwise(chunks):
            assert later.ids[: len(earlier.ids)] == earlier.ids
            assert later.logprobs[: len(earlier.logprobs)] == earlier.logprobs
            assert later.text.startswith(earlier.text.rstrip("\ufffd"))


@PAGED
def test_prompts_of_whole_pages(server, off, make_corpus):
    """H16: k pages, one token less and one more, from the host; at least one token is computed."""
    corpus = make_corpus()
    lengths = [CONTEXT // PAGE * PAGE + more for more in (-1, 0, 1)]
    given = [Ask(tuple(corpus.prompt(n)), 20, {"draft_len": 4}) for n in lengths]
    expected = off["float32"].answers(given)
    assert_identical([server.answer(ask) for ask in given], expected)
    before = server.counters()
    others = [Ask(tuple(prompt), 1) for prompt in corpus.prompts(4, CONTEXT)]
    assert 4 * CONTEXT > TIER_TOKENS
    server.concurrently(others)  # push them off the device
    again = [server.answer(ask) for ask in given]
    assert_identical(again, expected)
    assert [answer.meta["cached_tokens_details"] for answer in again] == [
        {"device": 0, "host": (length - 1) // PAGE * PAGE} for length in lengths
    ]
    moved(server, before)

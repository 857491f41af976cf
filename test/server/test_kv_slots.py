"""KV slots and the prefix tree: nothing leaks, nothing is lost, nothing foreign is read.

Every test ends idle, without a used slot (fixture ``server``). Servers run with SGLang's own checks
of every iteration; see ``harness.CHECKS``.
"""

import itertools
import random
import time

import pytest

from server.comparing import assert_identical, difference
from server.harness import Ask, RequestFailed
from server.specs import COMPRESSORS, DRAFTING, PAGE_SIZES

PAGED = [
    *(
        pytest.param(page, id=f"page{page}", marks=pytest.mark.server(spec))
        for page, spec in PAGE_SIZES.items()
    ),
    pytest.param(16, id="page16-fixed", marks=pytest.mark.server(DRAFTING["float32"])),
]


# Stop tokens, a third of the vocabulary: met after few tokens.
STOPPING = {"stop_token_ids": list(range(0, 49152, 3)), "ignore_eos": False}


def floor(length, page):
    return length // page * page


def is_fixed(server):
    """Whether requests on this server draft as many tokens as they ask for."""
    return server.get("/vericache")["config"]["draft_len"] is not None


def assert_drafted(server, before):
    """Drafts were made and some rejected; what an adaptive server makes is up to it."""
    after = server.counters()
    accepted, drafted = (after[name] - before[name] for name in ("accepted", "drafted"))
    if is_fixed(server):
        assert 0 < accepted < drafted, (accepted, drafted)


@pytest.mark.parametrize("page", PAGED)
def test_200_requests_leak_nothing(page, server, make_corpus):
    """K1: ended by a stop token, by length, and by an abort in any phase."""
    assert server.get("/server_info")["page_size"] == page
    rng, corpus = random.Random(page), make_corpus()
    drafts = itertools.cycle(itertools.product((*COMPRESSORS, "int4"), (1, 3, 6)))
    server.flush()
    before = server.counters()
    ends = {"stop": 0, "length": 0, "abort": 0}
    for round_ in range(5):
        pending = []
        for i in range(40):
            prompt = tuple(corpus.prompt(rng.randint(2, 90)))
            rid = f"leak-{page}-{round_}-{i}"
            compressor, draft_len = next(drafts)
            ask = Ask(
                prompt,
                tokens=400 if i % 4 == 3 else rng.randint(1, 10),
                vericache={"compressor": compressor, "draft_len": draft_len},
                sampling=STOPPING if i % 4 == 1 else {},
                fields={"rid": rid},
            )
            pending.append((ask, server.submit(ask)))
        for ask, _ in pending[3::4]:
            time.sleep(rng.uniform(0, 0.03))
            server.abort(ask.fields["rid"])
        for _, future in pending:
            ends[future.result().finish["type"]] += 1
    assert sum(ends.values()) == 200 and min(ends.values()) >= 25, ends
    assert_drafted(server, before)
    server.check_idle()
    packed = server.get("/vericache")["ranks"][0]["packed"]
    assert not any(pool["used"] for pool in packed.values()), packed
    server.flush()
    server.check_idle()


def chat(server, corpus, turns, tokens=6):
    """Cached and prompt tokens summed over a chat that grows by answers and new questions."""
    history, cached, total = tuple(corpus.prompt(50)), 0, 0
    for _ in range(turns):
        answer = server.ask(history, tokens)
        cached, total = cached + answer.meta["cached_tokens"], total + len(history)
        history += answer.ids + tuple(corpus.prompt(12))
    return cached, total


@pytest.mark.server(DRAFTING["bfloat16"])
def test_reserved_slots_keep_prefix_reuse(server, off, make_corpus):
    """K2: 8 chats of 6 turns, beside the same on a server that reserves nothing for drafts."""
    ratios = []
    before = server.counters()
    for each in (server, off["bfloat16"].server()):
        each.flush()
        corpus = make_corpus()
        sums = [chat(each, corpus, turns=6) for _ in range(8)]
        ratios.append(sum(c for c, _ in sums) / sum(t for _, t in sums))
    assert_drafted(server, before)
    assert ratios[0] >= 0.95 * ratios[1] > 0.5, ratios


@pytest.mark.parametrize("page", PAGED)
def test_the_tree_holds_exactly_what_was_returned(page, server, make_corpus):
    """K3: not a token past a stop inside an accepted run, and everything up to it."""
    corpus = make_corpus()
    corpus.prompt(300 * page)
    for stop_at in (3, 8, 17):
        prompt = tuple(corpus.prompt(130))
        vericache = {"compressor": "identity"}
        whole = server.ask(prompt, 24, vericache=vericache, sampling={"ignore_eos": False})
        assert len(whole.ids) == 24
        if is_fixed(server):
            assert whole.accepted == whole.drafted >= 16, "no long run to stop in"
        end = next(i for i in range(stop_at, 24) if whole.ids[i] not in whole.ids[:i])
        server.flush()
        stop = {"stop_token_ids": [whole.ids[end]], "ignore_eos": False}
        first = server.ask(prompt, 24, vericache=vericache, sampling=stop)
        assert first.finish["type"] == "stop" and first.ids == whole.ids[: end + 1]

        # What was not returned is not in the tree: a continuation the model would have chosen.
        known = prompt + whole.ids
        again = server.ask(known, 1)
        returned = len(prompt) + len(first.ids)
        assert floor(returned - 1, page) <= again.meta["cached_tokens"] <= returned
        server.flush()
        first = server.ask(prompt, 24, vericache=vericache, sampling=stop)
        turn = server.ask(prompt + first.ids + tuple(corpus.prompt(40)), 8)
        assert turn.meta["cached_tokens"] >= floor(returned - 1, page)


@pytest.mark.server(DRAFTING["bfloat16"])
def test_cancelled_sharers_corrupt_nobody(server, off, make_corpus):
    """K7: four requests share 128 tokens; two are cancelled and retried beside a stranger."""
    rng, corpus = random.Random(7), make_corpus()
    shared = tuple(corpus.prompt(128))
    prompts = [shared + tuple(corpus.prompt(9)) for _ in range(4)] + [tuple(corpus.prompt(100))]
    asks = [
        Ask(prompt, 20, {"compressor": COMPRESSORS[i], "draft_len": 4})
        for i, prompt in enumerate(prompts)
    ]
    expected = off["bfloat16"].answers(asks)
    before, cancelled = server.counters(), 0
    for repeat in range(50):
        names = [f"share-{repeat}-{i}" for i in range(5)]
        named = [
            Ask(ask.prompt, ask.tokens, ask.vericache, fields={"rid": name})
            for ask, name in zip(asks, names, strict=True)
        ]
        running = [server.submit(ask) for ask in named]
        time.sleep(rng.uniform(0, 0.25))
        for name in names[:2]:
            server.abort(name)
        retried = [server.submit(ask) for ask in asks[:2]]
        assert_identical([future.result() for future in running[2:]], expected[2:])
        assert_identical([future.result() for future in retried], expected[:2])
        for future, answer in zip(running[:2], expected, strict=False):
            try:
                found = future.result()
            except RequestFailed:  # cancelled before it ran
                cancelled += 1
                continue
            if found.finish["type"] == "abort":
                cancelled += 1
                assert found.ids == answer.ids[: len(found.ids)]
            else:
                assert difference(found, answer) is None
    assert cancelled >= 25, cancelled
    assert_drafted(server, before)

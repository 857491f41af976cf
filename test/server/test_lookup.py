"""X1 with tokens found in a request's own text as drafts, right and wrong ones."""

import json

import pytest

from server.comparing import SCHEMA, assert_identical
from server.harness import Ask
from server.specs import ADAPTIVE, TIERED_AUTO

pytestmark = pytest.mark.slow

SERVERS = [
    pytest.param(dtype, id=dtype, marks=pytest.mark.server(spec))
    for dtype, spec in ADAPTIVE.items()
]
KINDS = {
    "greedy": {},
    "sampled": {"temperature": 0.5, "top_p": 0.9, "sampling_seed": 7},
    "penalised": {"frequency_penalty": 0.3, "min_new_tokens": 20},
    "schema": {"json_schema": json.dumps(SCHEMA), "ignore_eos": False},
}


def repeating(make_corpus, count, tokens):
    """Prompts whose text comes twice, up to its middle: the rest is to be expected."""
    return [(*p, *p, *p[: len(p) // 2]) for p in make_corpus().prompts(count, tokens)]


def looked_up(server, before):
    after = server.counters()
    names = ("looked_up", "looked_up_accepted", "probed", "probed_agreed")
    return [after[name] - before[name] for name in names]


@pytest.mark.parametrize("dtype", SERVERS)
def test_found_tokens_change_nothing(dtype, server, off, make_corpus):
    """Short contexts, below the least one for drafts, and long ones."""
    prompts = [*repeating(make_corpus, 4, 16), *repeating(make_corpus, 4, 300)]
    kinds = list(KINDS.values())
    asks = [Ask(p, 40, sampling=kinds[i % len(kinds)]) for i, p in enumerate(prompts)]
    before = server.counters()
    for _ in range(2):
        assert_identical(server.concurrently(asks), off[dtype].answers(asks))
    drafted, accepted, probed, agreed = looked_up(server, before)
    assert 0 < accepted < drafted, "some were right and some wrong"
    assert 0 <= agreed <= probed


@pytest.mark.parametrize("dtype", SERVERS[:1])
def test_repetition_takes_few_passes(dtype, server, off, make_corpus):
    ask = Ask(repeating(make_corpus, 1, 300)[0], 64)
    server.warm(ask.prompt)
    (found,) = server.concurrently([ask])
    assert_identical([found], off[dtype].answers([ask]))
    assert found.accepted > 16, "precondition: the model repeats the text"
    assert found.meta["vericache"]["verify_passes"] < 64 / 2


@pytest.mark.parametrize("dtype", SERVERS)
def test_who_asks_for_no_drafts_gets_none(dtype, server, make_corpus):
    ask = Ask(repeating(make_corpus, 1, 100)[0], 24, {"enabled": False})
    before = server.counters()
    assert server.concurrently([ask])[0].drafted == 0
    assert looked_up(server, before) == [0, 0, 0, 0]


@pytest.mark.server(TIERED_AUTO)
def test_a_fixed_length_looks_nothing_up(server, make_corpus):
    before = server.counters()
    server.concurrently([Ask(repeating(make_corpus, 1, 100)[0], 24)])
    assert looked_up(server, before) == [0, 0, 0, 0]

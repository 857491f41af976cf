"""Seeds, filters and the distribution of samples (cases P7, P9, P10)."""

import os
from collections import Counter

import pytest
from scipy.stats import chi2_contingency

from server.harness import Ask, Result
from server.serving import INCREMENTAL, SERVING, alternate, assert_same

pytestmark = pytest.mark.server(SERVING)
# Set to draw 5,000 samples of each kind, which takes minutes.
FULL = "VERICACHE_TEST_FULL"
DRAWS = 5000 if FULL in os.environ else 300
TOKENS = 3
# Of six comparisons of equal distributions one falls below this in a thousand runs of the test.
SIGNIFICANCE = 0.001 / 6


def test_filters_down_to_one_token_mean_greedy(server, without_drafts, make_corpus):
    """P7: min_p = 1 and top_k = 1 at temperature 1, at every position."""
    prompt = tuple(make_corpus().prompt(60))
    greedy = without_drafts.answers([Ask(prompt, 32)])[0]
    asks = [
        Ask(prompt, 32, vericache, {"temperature": 1.0, **narrow})
        for narrow in ({"min_p": 1.0}, {"top_k": 1})
        for vericache in alternate(3)
    ]
    found = server.concurrently(asks)
    assert {a.ids for a in found} == {greedy.ids}
    assert sum(a.accepted for a in found) < sum(a.drafted for a in found)


@pytest.mark.parametrize(
    "narrow", [{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.02}]
)
def test_seeded_samples_equal_plain_ones(narrow, server, without_drafts, make_corpus):
    """P9: beside each other, alone, twice and without drafts."""
    prompt = tuple(make_corpus().prompt(60))
    asks = [
        Ask(prompt, 24, vericache, {"temperature": 1.0, "sampling_seed": seed, **narrow})
        for seed, vericache in enumerate(alternate(8))
    ]
    together = server.concurrently(asks)
    assert_same(together, without_drafts.answers(asks), asks)
    assert len({a.ids for a in together}) == 8, "seeds are shared"
    alone = [server.answer(ask) for ask in asks[:3]]
    assert [a.ids for a in alone] == [a.ids for a in together[:3]]


def test_unseeded_samples_differ(server, make_corpus):
    """P9: 32 at once, and again."""
    prompt = tuple(make_corpus().prompt(60))
    sampling = {"temperature": 1.0}
    asks = [Ask(prompt, 16, vericache, sampling) for vericache in alternate(32)]
    first, second = server.concurrently(asks), server.concurrently(asks[:8])
    assert len({a.ids for a in first}) >= 28
    assert not {a.ids for a in first} & {a.ids for a in second}
    assert sum(a.accepted for a in first) < sum(a.drafted for a in first)


def draw(server, prompt, temperature, vericache):
    """``DRAWS`` unseeded samples, and how often each run of tokens came."""
    found = []
    while len(found) < DRAWS:
        sampling = {"temperature": temperature, "n": min(DRAWS - len(found), 500)}
        body = Ask(prompt, TOKENS, vericache, sampling, {"return_logprob": False}).body()
        response = server.post("/generate", body)
        assert response.status_code == 200, response.text
        found += [Result.of(answer) for answer in response.json()]
    return found, Counter(answer.ids for answer in found)


@pytest.fixture
def prompt(tokenizer):
    """After it some runs of three tokens are common, and none nearly certain."""
    text = "Heads or tails?\nheads tails tails heads heads tails heads tails tails tails heads"
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def pvalue(one, other):
    """Of both counts coming from one distribution, by chi-square.

    A run of tokens that came often enough in both together has a column of its own. (Often enough
    in one of them would prefer those that came too often there.)
    """
    common = [run for run, count in (one + other).items() if count >= 10]
    assert len(common) >= 2, "nearly one outcome"
    rows = []
    for counter in (one, other):
        kept = [counter[run] for run in common]
        rows.append([*kept, counter.total() - sum(kept)])
    columns = [column for column in zip(*rows, strict=True) if sum(column)]
    return chi2_contingency(columns).pvalue


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_are_distributed_as_plain_ones(temperature, server, prompt):
    """P10: runs of tokens; tokens 2 and 3 come from drafts, exact, half good and garbage."""
    _, expected = draw(server, prompt, temperature, {"enabled": False})
    for compressor in ("identity", "snapkv", "random-kv"):
        vericache = {"compressor": compressor, "draft_len": TOKENS - 1}
        found, counts = draw(server, prompt, temperature, vericache)
        drafted = sum(answer.drafted for answer in found)
        assert drafted > 0
        if compressor != "identity":
            assert sum(answer.accepted for answer in found) < drafted
        p = pvalue(expected, counts)
        print(f"temperature {temperature}, {compressor}: {len(found)} draws, p = {p:.4f}")
        assert p > SIGNIFICANCE, compressor


def test_the_distribution_test_can_fail(server, prompt):
    """Negative control of P10: as many draws tell temperature 0.7 from 1."""
    cool, warm = (draw(server, prompt, t, {"enabled": False})[1] for t in (0.7, 1.0))
    assert pvalue(cool, warm) < SIGNIFICANCE


@pytest.mark.server(INCREMENTAL)
def test_unverified_samples_have_another_distribution(server, prompt):
    """Negative control of P10: drafts from garbage, let through."""
    _, expected = draw(server, prompt, 1.0, {"enabled": False})
    garbage = {"compressor": "random-kv", "ratio": 0.05, "unverified": True}
    _, lossy = draw(server, prompt, 1.0, garbage)
    assert pvalue(expected, lossy) < SIGNIFICANCE

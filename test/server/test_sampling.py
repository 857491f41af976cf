"""Seeds, filters and the distribution of samples (cases P7, P9, P10)."""

from collections import Counter

import pytest
from scipy.stats import chi2_contingency

from server.harness import Ask, Result
from server.serving import SERVING, alternate, assert_same

pytestmark = pytest.mark.server(SERVING)
DRAWS = 300
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
    """How often each run of the first tokens came in ``DRAWS`` unseeded samples."""
    sampling = {"temperature": temperature, "n": DRAWS}
    body = Ask(prompt, TOKENS, vericache, sampling, {"return_logprob": False}).body()
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    found = [Result.of(answer) for answer in response.json()]
    return found, Counter(answer.ids for answer in found)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_are_distributed_as_plain_ones(temperature, server, tokenizer):
    """P10: chi-square of runs of tokens; tokens 2 and 3 come from drafts."""
    text = "Heads or tails?\nheads tails tails heads heads tails heads tails tails tails heads"
    prompt = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    _, expected = draw(server, prompt, temperature, {"enabled": False})
    # Of its own each run that came often enough for chi-square, all others together.
    common = [run for run, count in expected.most_common() if count >= 5]
    assert len(common) >= 2, "nearly one outcome"

    def table(counts):
        kept = [counts[run] for run in common]
        return [*kept, DRAWS - sum(kept)]

    for compressor in ("identity", "snapkv", "random-kv"):
        vericache = {"compressor": compressor, "draft_len": TOKENS - 1}
        found, counts = draw(server, prompt, temperature, vericache)
        drafted = sum(answer.drafted for answer in found)
        assert drafted > 0
        if compressor != "identity":
            assert sum(answer.accepted for answer in found) < drafted
        columns = [c for c in zip(table(expected), table(counts), strict=True) if sum(c)]
        assert chi2_contingency(list(zip(*columns, strict=True))).pvalue > SIGNIFICANCE, compressor


def test_the_distribution_test_can_fail(server, tokenizer):
    """The same test tells temperature 0.7 from 1.4 with as many draws."""
    prompt = tuple(tokenizer.encode("Roll a die:\n3\n5\n1\n", add_special_tokens=False).ids)
    tables = [draw(server, prompt, t, {"enabled": False})[1] for t in (0.7, 1.4)]
    runs = [run for run, _ in tables[0].most_common(3)]
    rows = [[*(t[run] for run in runs), DRAWS - sum(t[run] for run in runs)] for t in tables]
    assert chi2_contingency(rows).pvalue < SIGNIFICANCE

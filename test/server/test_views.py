"""Views over edge lengths, without sinks, of shared prefixes; positions stay logical."""

import pytest

from server.comparing import assert_identical
from server.harness import Ask
from server.specs import DRAFTING, MAX_DRAFT_LEN, MIN_TOKENS, RATIO, WINDOW
from sglang_vericache import compressors

pytestmark = pytest.mark.server(DRAFTING["bfloat16"])


def test_exact_drafts_are_accepted_for_512_tokens(server, off, make_corpus):
    """K4: acceptance does not decay, because after every round the cache is where it should be."""
    ask = Ask(tuple(make_corpus().prompt(40)), 512, {"compressor": "identity", "draft_len": 16})
    found = server.answer(ask)
    assert_identical([found], off["bfloat16"].answers([ask]))
    assert found.accepted == found.drafted
    # All tokens but the prefill's; the first round is cut to any length, the last by the limit.
    assert found.meta["vericache"]["verify_passes"] <= -(-511 // 17) + 1
    assert found.drafted + found.meta["vericache"]["verify_passes"] == 511


def test_positions_after_tokens_were_dropped(server, off, make_corpus):
    """Z1: 27 of 263 tokens kept, the next one still stands at position 263.

    With all kept a drafted token is that of the full KV, sampled ones too. The positions of draft
    rows are checked in ``test_negative_controls.py``.
    """
    prompt = tuple(make_corpus().prompt(263))
    kept = {"compressor": "streaming", "ratio": RATIO, "min_tokens": 4}
    asks = [
        Ask(prompt, 48, {**kept, "draft_len": 4}),
        Ask(prompt, 48, {"compressor": "identity", "draft_len": 4}),
        Ask(
            prompt,
            48,
            {"compressor": "identity", "draft_len": 4},
            {"temperature": 1.0, "sampling_seed": 5},
        ),
    ]
    found = server.concurrently(asks)
    assert_identical(found, off["bfloat16"].answers(asks))
    assert 0 < found[0].accepted < found[0].drafted
    assert all(answer.accepted == answer.drafted > 0 for answer in found[1:])


@pytest.mark.parametrize("compressor", ["snapkv", "snapkv-per-head", "streaming", "random-kv"])
def test_contexts_shorter_than_window_and_budget(compressor, server, off, make_corpus):
    """Z3, with the window and the least budget of this server."""
    text = tuple(make_corpus().prompt(64))
    lengths = {1, 2, WINDOW - 1, WINDOW, WINDOW + 1, MIN_TOKENS - 1, MIN_TOKENS, MIN_TOKENS + 1}
    asks = [
        Ask(text[:length], 20, {"compressor": compressor, "draft_len": draft_len})
        for length in sorted(lengths)
        for draft_len in (1, MAX_DRAFT_LEN)
    ]
    found = server.concurrently(asks)
    assert_identical(found, off["bfloat16"].answers(asks))
    assert all(answer.drafted > 0 for answer in found)


def test_the_longest_request_ends_first(server, make_corpus):
    """K16: the others' rows stay theirs when 512 tokens leave a batch of 40, 40, 40; packed too."""
    corpus = make_corpus()
    corpus.prompt(6000)
    prompts = [tuple(corpus.prompt(length)) for length in (512, 40, 40, 40)]
    for compressor in (*compressors.names(), "snapkv+int4", "h2o+kivi2"):
        vericache = {"compressor": compressor, "draft_len": 5}
        asks = [Ask(p, 4 if len(p) == 512 else 24, vericache) for p in prompts]
        together = server.batch(asks)
        assert_identical(together, [server.answer(ask) for ask in asks], [compressor] * 4)
        assert all(answer.drafted > 0 for answer in together)


def test_dropping_the_sinks_costs_only_acceptance(server, off, make_corpus):
    """Z4, with real weights: attention sinks are what a toy model does not have."""
    prompts = [tuple(prompt) for prompt in make_corpus().prompts(8, 400)]
    rates = []
    for sinks in (4, 0):
        vericache = {"compressor": "streaming", "draft_len": 8, "sinks": sinks}
        asks = [Ask(prompt, 32, vericache) for prompt in prompts]
        found = server.concurrently(asks)
        assert_identical(found, off["bfloat16"].answers(asks))
        rates.append(sum(a.accepted for a in found) / sum(a.drafted for a in found))
    assert rates[1] < rates[0] < 1, rates


def test_lengths_are_logical(server, off, make_corpus):
    """Z8: usage counts the context, not the view; one prefix, several views at once."""
    corpus = make_corpus()
    shared = tuple(corpus.prompt(600))
    prompts = [shared + tuple(corpus.prompt(20)) for _ in range(3)]
    server.flush()
    server.warm(shared)
    names = ("streaming", "snapkv-per-head", "random-kv")
    asks = [
        Ask(prompt, 24, {"compressor": name, "draft_len": 4})
        for prompt, name in zip(prompts, names, strict=True)
    ]
    found = server.concurrently(asks)
    assert_identical(found, off["bfloat16"].answers(asks))
    for answer in found:
        assert answer.meta["cached_tokens"] == 600
        assert answer.meta["prompt_tokens"] == 620
        assert answer.meta["completion_tokens"] == 24
        assert answer.accepted < answer.drafted

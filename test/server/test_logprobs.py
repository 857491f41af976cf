"""Logprobs are those of the target, one a token, whatever was drafted (cases L1-L5)."""

import pytest

from server.harness import Ask
from server.serving import DRAFT_LEN, SERVING, alternate, assert_same

pytestmark = pytest.mark.server(SERVING)
PARTS = ("output_top_logprobs", "output_token_ids_logprobs")
ASKED = {"top_logprobs_num": 5, "token_ids_logprob": [0, 2, 1000]}


def assert_same_parts(found, expected, parts=PARTS):
    for a, b in zip(found, expected, strict=True):
        for part in parts:
            assert a.meta[part] == b.meta[part], part


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_position_equals_plain_decoding(temperature, server, without_drafts, make_corpus):
    """L1 and L4: top and chosen tokens too; random views among the compressors."""
    sampling = {"temperature": temperature, "sampling_seed": 5}
    prompts = make_corpus().prompts(6, 80)
    asks = [
        Ask(tuple(prompt), 40, vericache, sampling, ASKED)
        for prompt, vericache in zip(prompts, alternate(6), strict=True)
    ]
    found, expected = server.concurrently(asks), without_drafts.answers(asks)
    assert_same(found, expected, asks)
    assert_same_parts(found, expected)
    for answer in found:
        assert [len(entry) for entry in answer.meta["output_top_logprobs"]] == [5] * 40
        assert sum(value < -1e-3 for value in answer.logprobs) > 10, "logprobs of nothing"


def test_logprobs_come_from_the_target(server, without_drafts, make_corpus):
    """L4: garbage drafts, nearly all rejected."""
    asks = [
        Ask(tuple(prompt), 24, {"compressor": "random-kv", "draft_len": 4}, {}, ASKED)
        for prompt in make_corpus().prompts(3, 200)
    ]
    found, expected = server.concurrently(asks), without_drafts.answers(asks)
    assert_same(found, expected, asks)
    assert_same_parts(found, expected)
    assert sum(a.accepted for a in found) < 0.5 * sum(a.drafted for a in found)


def test_one_logprob_a_token(server, without_drafts, make_corpus):
    """L2: lengths 1, k, k + 1 and 64."""
    prompt = tuple(make_corpus().prompt(60))
    asks = [
        Ask(prompt, tokens, vericache)
        for tokens in (1, DRAFT_LEN, DRAFT_LEN + 1, 64)
        for vericache in alternate(3)
    ]
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    assert [len(a.logprobs) for a in found] == [ask.tokens for ask in asks]


def test_half_of_a_batch_with_logprobs(server, without_drafts, make_corpus):
    """L3: both halves are right."""
    asks = [
        Ask(tuple(prompt), 24, vericache, {}, {"return_logprob": i % 2 == 0})
        for i, (prompt, vericache) in enumerate(
            zip(make_corpus().prompts(8, 60), alternate(8), strict=True)
        )
    ]
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    assert [len(a.logprobs) for a in found] == [24, 0] * 4


@pytest.mark.parametrize("start", [0, 37])
def test_prompt_logprobs_on_a_prefix_hit(start, server, make_corpus):
    """L5: the second time most of the prompt is cached; its logprobs are the same."""
    prompt = tuple(make_corpus().prompt(120))
    fields = {"logprob_start_len": start, "top_logprobs_num": 2}
    server.flush()
    cold, warm = (server.ask(prompt, 8, fields=fields) for _ in range(2))
    off = server.ask(prompt, 8, vericache={"enabled": False}, fields=fields)
    assert warm.meta["cached_tokens"] == min(start, len(prompt) - 1)
    parts = ("input_token_logprobs", "input_top_logprobs", *PARTS[:1])
    assert len(cold.meta["input_token_logprobs"]) == len(prompt) - start
    assert_same_parts([warm, off], [cold, cold], parts)
    assert warm.logprobs == cold.logprobs == off.logprobs
    assert warm.drafted > 0

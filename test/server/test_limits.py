"""The end of the context, of the KV pool, and retraction (cases K11, K12, K14)."""

import itertools

import pytest

from server.comparing import assert_identical
from server.harness import Ask, RequestFailed
from server.specs import COMPRESSORS, CROWDED, DRAFTING, POOL_TOKENS, RETRACTING

CONTEXT = 8192
ROOMY = pytest.mark.server(DRAFTING["bfloat16"])
SMALL = pytest.mark.server(CROWDED)


@ROOMY
@pytest.mark.parametrize("short_by", [1, 0])
@pytest.mark.parametrize("generated", [8, 40])
def test_up_to_the_last_position(generated, short_by, server, without_drafts, make_corpus):
    """K11: prompt + max_tokens = context length, and one less."""
    prompt = tuple(make_corpus().prompt(CONTEXT - 8))[: CONTEXT - generated - short_by]
    server.warm(prompt)
    asks = [Ask(prompt, generated, {"compressor": name}) for name in COMPRESSORS]
    found = [server.answer(ask) for ask in asks]
    assert_identical(found, without_drafts.answers(asks))
    assert {answer.finish["type"] for answer in found} == {"length"}
    assert sum(answer.drafted for answer in found) > 0


@ROOMY
def test_more_than_the_context(server, make_corpus):
    """Refused by name, and nothing else happens."""
    prompt = tuple(make_corpus().prompt(CONTEXT))
    for tokens in (1, 10**9):
        with pytest.raises(RequestFailed) as refused:
            server.ask(prompt, tokens)
        assert refused.value.status == 400
        assert server.ask(prompt[:20], 4).finish["type"] == "length"


@pytest.mark.server(RETRACTING)
def test_retraction_changes_nothing(server, off, make_corpus):
    """K14: ten requests are retracted again and again; big-pool answers are the reference."""
    prompts = [tuple(prompt) for prompt in make_corpus().prompts(10, 50)]
    options = [
        {"compressor": COMPRESSORS[i % 5], "draft_len": (1, 4, 16)[i % 3]} for i in range(10)
    ]
    asks = [Ask(prompt, 120, options[i]) for i, prompt in enumerate(prompts)]
    streams = server.streams(asks)
    found = [chunks[-1] for chunks in streams]
    assert_identical(found, off["bfloat16"].answers(asks))
    assert sum(answer.meta["num_retractions"] for answer in found) >= 3
    assert all(len(answer.logprobs) == 120 for answer in found)
    for chunks in streams:
        assert len(chunks) > 5  # one for each verify pass
        for earlier, later in itertools.pairwise(chunks):
            assert later.ids[: len(earlier.ids)] == earlier.ids
            assert later.logprobs[: len(earlier.logprobs)] == earlier.logprobs
            assert later.text.startswith(earlier.text.rstrip("\ufffd"))


@SMALL
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_pool_smaller_than_one_request(compressor, server, off, make_corpus):
    """K12: what cannot fit ends early with a reason; the next request works."""
    corpus = make_corpus()
    vericache = {"compressor": compressor, "draft_len": 4}
    long = Ask(tuple(corpus.prompt(300)), 2 * POOL_TOKENS, vericache)
    short = Ask(tuple(corpus.prompt(24)), 12, vericache)
    try:
        found = server.answer(long)
    except RequestFailed as refused:
        assert "memory" in refused.text or "length" in refused.text, refused.text
    else:
        assert found.finish["type"] in ("length", "abort")
        assert 0 < len(found.ids) < POOL_TOKENS - 300
    with pytest.raises(RequestFailed) as refused:
        server.ask(corpus.prompt(POOL_TOKENS), 4)
    assert refused.value.status == 400
    assert_identical([server.answer(short)], off["bfloat16"].answers([short]))

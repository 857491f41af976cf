"""The end of the context, of the KV pool, and retraction (cases K11, K12, K14)."""

import itertools

import pytest

from server.comparing import assert_identical
from server.harness import Ask, RequestFailed
from server.specs import COMPRESSORS, CROWDED

pytestmark = pytest.mark.server(CROWDED)
CONTEXT, POOL = 640, 1024


@pytest.mark.parametrize("short_by", [0, 1, 2])
@pytest.mark.parametrize("generated", [1, 2, 7, 40])
def test_up_to_the_last_position(short_by, generated, server, without_drafts, make_corpus):
    """K11: prompt + max_tokens = context length and a little less."""
    prompt = tuple(make_corpus().prompt(CONTEXT - generated - short_by))
    asks = [Ask(prompt, generated, {"compressor": name}) for name in COMPRESSORS]
    server.warm(prompt)
    found = [server.answer(ask) for ask in asks]
    assert_identical(found, without_drafts.answers(asks))
    assert {answer.finish["type"] for answer in found} == {"length"}


def test_more_than_the_context(server, make_corpus):
    """Refused by name, and nothing else happens."""
    prompt = tuple(make_corpus().prompt(CONTEXT))
    for tokens in (1, CONTEXT, 10**9):
        with pytest.raises(RequestFailed) as refused:
            server.ask(prompt, tokens)
        assert refused.value.status == 400
        assert server.ask(prompt[:20], 4).finish["type"] == "length"


def test_retraction_changes_nothing(server, off, make_corpus):
    """K14: eight requests outgrow the pool again and again; big-pool answers are the reference."""
    prompts = [tuple(prompt) for prompt in make_corpus().prompts(8, 90)]
    asks = [
        Ask(prompt, 140, {"compressor": COMPRESSORS[i % 5], "draft_len": (1, 4, 16)[i % 3]})
        for i, prompt in enumerate(prompts)
    ]
    streams = server.streams(asks)
    found = [chunks[-1] for chunks in streams]
    assert_identical(found, off["bfloat16"].answers(asks))
    assert sum(answer.meta["num_retractions"] for answer in found) >= 3
    assert all(len(answer.logprobs) == 140 for answer in found)
    for chunks in streams:
        assert len(chunks) > 10
        for earlier, later in itertools.pairwise(chunks):
            assert later.ids[: len(earlier.ids)] == earlier.ids
            assert later.logprobs[: len(earlier.logprobs)] == earlier.logprobs
            assert later.text.startswith(earlier.text.rstrip("\ufffd"))


def test_a_pool_smaller_than_one_request(server, make_corpus):
    """K12: the request that cannot fit ends with an error; the next one works."""
    prompt = tuple(make_corpus().prompt(24))
    tokens = CONTEXT - len(prompt)
    before = server.ask(prompt, 30)
    together = [server.submit(Ask(prompt[i:], tokens)) for i in range(4)]
    ends = [future.result().finish["type"] for future in together]
    assert set(ends) <= {"length", "abort"}, ends
    after = server.ask(prompt, 30)
    assert_identical([after], [before])

"""X2: the same tokens as stock SGLang with a stock attention backend, in float32."""

import random

import pytest

from server.harness import Ask
from server.pool import ServerPool
from server.specs import COMPRESSORS, DRAFTING, STOCK

TOKENS = 64
# Logits of a 135M-parameter model in float32 differ by about 1e-5 between summation orders.
NOISE = 1e-3
pytestmark = pytest.mark.server(STOCK)


@pytest.fixture(scope="module")
def asks(make_corpus):
    rng, corpus = random.Random(5), make_corpus()
    top_two = {"top_logprobs_num": 2}
    return [
        Ask(tuple(corpus.prompt(rng.randint(16, 100))), TOKENS, fields=top_two) for _ in range(100)
    ]


def margin(answer, position):
    """Stock's logprob of the best token over the second best at an output position."""
    (best, *_), (second, *_) = answer.meta["output_top_logprobs"][position]
    return best - second


def test_tokens_equal_those_of_stock(server, pool: ServerPool, asks):
    stock = server.concurrently(asks)
    ours = pool.get(DRAFTING["float32"]).concurrently(
        Ask(ask.prompt, TOKENS, {"compressor": COMPRESSORS[i % 5], "draft_len": 4})
        for i, ask in enumerate(asks)
    )
    assert sum(a.drafted for a in ours) > sum(a.accepted for a in ours) > 0
    diverged = []
    for a, b in zip(ours, stock, strict=True):
        assert len(a.ids) == len(b.ids) == TOKENS
        at = next((i for i in range(TOKENS) if a.ids[i] != b.ids[i]), None)
        if at is not None:
            diverged.append(margin(b, at))
        same = TOKENS if at is None else at
        assert max(abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs, strict=False)) < NOISE
    print(f"{len(diverged)} of {len(asks)} diverge; margins {sorted(diverged)}")
    assert all(found < NOISE for found in diverged), sorted(diverged)

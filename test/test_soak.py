"""The soak's own judgement: what counts as a mismatch, and as growth."""

from dataclasses import replace

import pytest

from _catalogue import Answer
from soak import Watched

LENGTH = {"type": "length", "length": 3}
EXPECTED = Answer((5, 6, 7), (-0.1, -0.2, -0.3), "abc", LENGTH, {})


def cut(tokens, **changes):
    """What there is of the expected answer after some tokens."""
    ids, logprobs = EXPECTED.ids[:tokens], EXPECTED.logprobs[:tokens]
    return replace(Answer(ids, logprobs, "", {"type": "abort"}, {}), **changes)


@pytest.mark.parametrize(
    "answer", [EXPECTED, cut(0), cut(2), cut(2, finish=None), cut(3)], ids=lambda a: len(a.ids)
)
def test_what_is_equal(answer):
    assert answer.difference(EXPECTED) is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (replace(EXPECTED, ids=(5, 6, 8)), "unlike from token 2"),
        (replace(EXPECTED, logprobs=(-0.1, -0.20000001, -0.3)), "unlike from logprob 1"),
        (replace(EXPECTED, ids=(5, 6), logprobs=(-0.1, -0.2)), "2 tokens for 3"),
        (replace(EXPECTED, logprobs=(-0.1, -0.2)), "2 logprobs for 3"),
        (replace(EXPECTED, text="abd"), "'abd'"),
        (replace(EXPECTED, finish={"type": "stop", "matched": 7}), "stop"),
        (cut(2, ids=(5, 5)), "unlike from token 1"),
        (cut(2, logprobs=(-0.1, -0.1)), "unlike from logprob 1"),
        (cut(2, logprobs=(-0.1,)), "1 logprobs for 2"),
        (cut(3, ids=(5, 6, 7, 8)), "4 tokens for 3"),
    ],
)
def test_what_is_not(answer, words):
    assert words in answer.difference(EXPECTED)


def test_growth_is_told_from_noise():
    """From the second quarter on, without the climb before it."""
    flat = [(10.0 * i, 1000 + i % 3) for i in range(10, 40)]
    climb = [(10.0 * i, 100 * i) for i in range(10)]
    early, late = Watched(pss=climb + flat).levels()
    assert late / early == pytest.approx(1, abs=0.01)
    leaking = [(at, pss + 3 * i) for i, (at, pss) in enumerate(climb + flat)]
    early, late = Watched(pss=leaking).levels()
    assert late / early > 1.05

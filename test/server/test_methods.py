"""X0 and X1 with every method, where its view begins to be smaller than the context (case Z3).

Bytes, and that a larger budget keeps no less, are tested in ``test/compressors``.
"""

import pytest

from server.comparing import assert_identical
from server.harness import Ask
from server.specs import DRAFTING, MIN_TOKENS, WINDOW
from sglang_vericache import compressors

TOKENS, DRAFT_LEN = 10, 3
METHODS = (
    *compressors.names(),
    *("snapkv+pyramidkv", "h2o+adakv", "tova+chunkkv", "keydiff+calibrated"),
    *("tova+int4", "snapkv-per-head+pyramidkv+adakv+chunkkv+int8", "knorm+adakv"),
    *("snapkv+turbo4v2", "snapkv-per-head+adakv+kivi2", "tova+kivi4"),
)
# One token; window and budget, one less and more; a page of 16 more; long enough to drop most.
LENGTHS = (1, *(n + d for n in (MIN_TOKENS, WINDOW) for d in (-1, 0, 1)), 2 * WINDOW, 400)


@pytest.fixture(scope="module")
def prompts(make_corpus):
    text = make_corpus().prompts(len(LENGTHS), max(LENGTHS))
    return [tuple(prompt[:length]) for prompt, length in zip(text, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.server(spec)) for d, spec in DRAFTING.items()]
)
def test_nothing_changes(dtype, server, off, prompts):
    asked = {
        (method, len(prompt)): Ask(prompt, TOKENS, {"compressor": method, "draft_len": DRAFT_LEN})
        for method in METHODS
        for prompt in prompts
    }
    found = dict(zip(asked, server.concurrently(asked.values()), strict=True))
    assert_identical(found.values(), off[dtype].answers(asked.values()), found)
    assert all(answer.drafted >= DRAFT_LEN for answer in found.values())
    for method in METHODS:
        answers = [found[method, length] for length in LENGTHS]
        if compressors.find(method).drops:
            assert sum(a.accepted for a in answers) < sum(a.drafted for a in answers), method


def test_the_lengths_are_those_of_interest():
    budget = compressors.Settings(ratio=0.1, min_tokens=MIN_TOKENS).budget
    kept = [budget.tokens(length) for length in LENGTHS]
    assert kept[0] == 1 and MIN_TOKENS in kept and max(kept) > WINDOW

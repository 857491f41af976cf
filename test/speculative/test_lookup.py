"""Proposals from a request's own text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_vericache.speculative.lookup import CANDIDATES, LONGEST, ORDER, Found, Lookup

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def slowly(tokens, count):
    """The definition: of the latest places of the last tokens, that of the longest match."""
    end = len(tokens)
    places = [p for p in range(ORDER, end) if tokens[p - ORDER : p] == tokens[end - ORDER :]]
    best, start = 0, 0
    for place in places[::-1][:CANDIDATES]:
        match = 0
        while match < min(place, LONGEST) and tokens[place - match - 1] == tokens[end - match - 1]:
            match += 1
        if match > best:
            best, start = match, place
    if best == 0:
        return Found([], 0)
    text = list(tokens)
    while len(text) < start + count:
        text.append(text[start + len(text) - end])
    return Found(text[start : start + count], best)


@given(TOKENS, st.lists(st.tuples(TOKENS, TOKENS), max_size=4), st.integers(1, 20))
def test_it_finds_what_its_definition_says(prompt, rounds, count):
    lookup, output = Lookup(prompt), []
    for drafts, run in [([], []), *rounds]:
        for tokens in (drafts, []) if drafts else ([],):
            lookup.follow(len(prompt), output, tokens)
            assert len(lookup) == len(prompt) + len(output) + len(tokens)
            assert lookup.find(count) == slowly(prompt + output + tokens, count)
        lookup.follow(len(prompt), output, drafts)  # as a draft goes on
        output += run


@given(TOKENS)
def test_prompts_are_indexed_like_output(tokens):
    at_once, one_by_one = Lookup(tokens), Lookup([])
    one_by_one.follow(0, tokens)
    assert at_once.find(8) == one_by_one.find(8)


def test_a_quotation():
    prompt = [*range(100, 200), 1, 2, 3]
    lookup = Lookup(prompt)
    assert lookup.find(4) == Found([], 0)
    lookup.follow(len(prompt), [], range(140, 150))
    assert lookup.find(4) == Found([150, 151, 152, 153], 10)
    lookup.follow(len(prompt), [*range(140, 150), 150, 7])
    assert lookup.find(4) == Found([], 0)


def test_a_period():
    lookup = Lookup([5, 6, 7, 5, 6, 7, 5, 6, 7])
    assert lookup.find(8) == Found([5, 6, 7, 5, 6, 7, 5, 6], 6)


@pytest.mark.parametrize("length", [0, 1, ORDER - 1, ORDER])
def test_short_prompts(length):
    assert Lookup(range(length)).find(4) == Found([], 0)


def test_large_ids():
    tokens = [2**17 + i % 50 for i in range(200)]
    assert Lookup(tokens).find(3) == Found([tokens[0], tokens[1], tokens[2]], LONGEST)

"""Proposals from a request's own text: what followed the last time the same tokens came up.

Prompt lookup (n-gram) drafting costs no pass of the model. It is good where text repeats itself
(code, quotations, tool arguments) and silent elsewhere, so it goes before drafting, not in its
place: the planner takes a proposal when it expects more of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Tokens that must agree for a place to be considered.
ORDER = 3
# Earlier places of the same tokens that are compared, the latest first; with those that only have
# the same hash.
CANDIDATES, STEPS = 8, 32
# Agreeing tokens beyond this many tell no more.
LONGEST = 32
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class Found(NamedTuple):
    """What may follow.

    Attributes:
        tokens: the proposal.
        match: tokens before it that agree with the latest ones, at most ``LONGEST``.
    """

    tokens: list[int]
    match: int


NOTHING = Found([], 0)


class Lookup:
    """All tokens of a request, searchable by their last few.

    Eight bytes a token and a hash table of two to four entries a token; to find a proposal takes
    some ten microseconds whatever the length.

    Args:
        tokens: its prompt.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = array("i", tokens)
        # Generated tokens among them that are there to stay.
        self._sure = 0
        self._index_all()

    def __len__(self) -> int:
        return len(self._tokens)

    def follow(self, prompt: int, output: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Have the text be the prompt of that length, what was generated and what was drafted."""
        sure = prompt + self._sure
        new = [*output[self._sure :], *drafts]
        same = 0
        for old, token in zip(self._tokens[sure:], new, strict=False):
            if old != token:
                break
            same += 1
        while len(self._tokens) > sure + same:
            self._drop_last()
        for token in new[same:]:
            self._append(token)
        self._sure = len(output)
        if len(self._tokens) > len(self._latest):
            self._index_all()

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        self._earlier.append(0)
        place = len(self._tokens)
        if place >= ORDER:
            slot = self._slot(place)
            self._earlier[place] = int(self._latest[slot])
            self._latest[slot] = place

    def _drop_last(self) -> None:
        place = len(self._tokens)
        if place >= ORDER:
            self._latest[self._slot(place)] = self._earlier[place]
        self._tokens.pop()
        self._earlier.pop()

    def _slot(self, place: int) -> int:
        terms = (f * t for f, t in zip(_FACTORS, self._tokens[place - ORDER : place], strict=True))
        return int(_mix(sum(terms)) & self._mask)

    def find(self, count: int) -> Found:
        """Up to ``count`` tokens that followed the longest of the latest matches.

        A proposal that runs into the end of the text goes on in the period this implies.
        """
        tokens, best, start = self._tokens, 0, 0
        place, left = self._earlier[len(tokens)], CANDIDATES
        for _ in range(STEPS):
            if not (place and left and best < LONGEST):
                break
            match = self._match(place)
            left -= match >= ORDER  # others have the same hash only
            if match > best:
                best, start = match, place
            place = self._earlier[place]
        if best < ORDER:
            return NOTHING
        found = tokens[start : start + count].tolist()
        while len(found) < count:
            found.append(found[len(found) - (len(tokens) - start)])
        return Found(found, best)

    def _match(self, place: int) -> int:
        """Tokens before a place that equal the latest ones."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(place, LONGEST)
        for i in range(1, most + 1):
            if tokens[place - i] != tokens[end - i]:
                return i - 1
        return most

    def _index_all(self) -> None:
        """``_append`` for all tokens at once."""
        size = 1 << (2 * max(len(self._tokens), 128) - 1).bit_length()
        self._mask = size - 1
        # A place is where ORDER tokens end. The latest place of each hash, and by place the one
        # before it; 0 is none.
        self._latest = np.zeros(size, dtype=np.int32)
        self._earlier = array("i", bytes(4 * (len(self._tokens) + 1)))
        ids = np.array(self._tokens, dtype=np.int64)
        count = len(ids) - ORDER + 1
        if count < 1:
            return
        terms = (factor * ids[i : i + count] for i, factor in enumerate(_FACTORS))
        slots = _mix(sum(terms)) & self._mask
        order = np.argsort(slots, kind="stable")
        same = slots[order[1:]] == slots[order[:-1]]
        earlier = np.frombuffer(self._earlier, dtype=np.int32)
        earlier[order[1:][same] + ORDER] = order[:-1][same] + ORDER
        self._latest[slots[order]] = order + ORDER  # the last of equal ones stays


def _mix(value: Any) -> Any:
    """Bring high bits, in which ids differ, down to those that are used; int or int64."""
    return value ^ (value >> 17) ^ (value >> 34)

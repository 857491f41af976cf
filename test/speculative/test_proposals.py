"""Drafts that somebody else made: taken while the output agrees with them, then forgotten."""

from types import SimpleNamespace

import pytest

from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.platform import bootstrap

bootstrap.install()

from sglang_vericache.speculative.state import Requests  # noqa: E402

LIMIT = 4


class Req:
    """As much of SGLang's request as a state reads."""

    def __init__(self, max_new_tokens=100):
        self.rid, self.retraction_count, self.spec_num_cap_tokens = "a", 0, 0
        self.output_ids = [1]
        self.sampling_params = SimpleNamespace(custom_params=None, max_new_tokens=max_new_tokens)
        self.kv = SimpleNamespace(kv_committed_len=1000)

    def __hash__(self):
        return id(self)


def started(proposals, **options):
    requests = Requests(VeriCacheConfig(draft_len=LIMIT))
    req = Req(**options)
    requests.propose(req, proposals)
    (state,) = requests.running([req])
    state.take_proposals(10_000)
    return state


def test_the_first_token_comes_from_the_prefill():
    assert started([1, 2, 3]).drafts == [2, 3]
    assert started([9, 2, 3]).drafts == []
    assert started([]).drafts == []


def test_a_round_takes_as_many_as_it_may_hold():
    state = started([1, *range(2, 20)])
    assert state.drafts == [2, 3, 4, 5]
    state.follow([2, 3, 4, 5, 6])
    state.drafts = []
    state.take_proposals(10_000)
    assert state.drafts == [7, 8, 9, 10]


@pytest.mark.parametrize("run", [[2, 3, 8], [8], [2, 3, 4, 5, 8]])
def test_nothing_is_left_of_what_the_output_contradicts(run):
    state = started([1, *range(2, 20)])
    state.follow(run)
    state.drafts = []
    state.take_proposals(10_000)
    assert state.drafts == []


def test_drafts_in_hand_come_first():
    state = started([1, 2, 3])
    state.drafts = [7]
    state.take_proposals(10_000)
    assert state.drafts == [7]


def test_no_more_than_the_answer_may_have():
    assert started([1, 2, 3, 4, 5], max_new_tokens=3).drafts == [2]
    assert started([1, 2, 3], max_new_tokens=2).drafts == []


def test_each_request_its_own():
    requests = Requests(VeriCacheConfig(draft_len=LIMIT))
    first, second = Req(), Req()
    second.rid = "b"
    requests.propose(first, [1, 2])
    states = requests.running([first, second])
    assert [state.proposals for state in states] == [[2], []]
    first.retraction_count = 1  # it starts over, and nobody has drafted for it
    assert requests.running([first])[0].proposals == []

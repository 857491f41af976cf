"""One plan per iteration, for requests that come, go, stop early and run into their limit."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_vericache.core import Action, DraftState
from sglang_vericache.scheduler import CostModel, FixedLength, Link, Planner


def state(rid="a", drafted=0, limit=100, margins=()):
    return DraftState(rid, 5000, 500, drafted, limit, margins=margins)


def rounds(planner, count, **options):
    """Draft lengths of the next ``count`` rounds of a request that is alone."""
    lengths, drafted = [], 0
    while len(lengths) < count:
        (action,) = planner.plan([state(drafted=drafted, **options)])
        if action is Action.VERIFY:
            planner.settle("a", drafted, drafted)
            lengths.append(drafted)
            drafted = 0
        else:
            drafted += 1
        planner.observe(0.01)
    return lengths


@pytest.mark.parametrize("k", [0, 1, 4, 16])
def test_a_lone_request_drafts_k_tokens_a_round(k):
    assert rounds(Planner.fixed(k), 5) == [k] * 5


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_no_more_than_the_limit(limit):
    assert rounds(Planner.fixed(8), 3, limit=limit) == [limit] * 3


def test_a_limit_that_shrinks_within_a_round_verifies():
    planner = Planner.fixed(8)
    assert planner.plan([state()]) == [Action.DRAFT]
    assert planner.plan([state(drafted=1, limit=1)]) == [Action.VERIFY]
    assert rounds(planner, 2) == [8, 8]


class StopsAtCloseCalls(FixedLength):
    def extends(self, request):
        return all(margin > 1 for margin in request.margins)


def test_early_stop_verifies_and_frees_the_phase():
    planner = Planner(StopsAtCloseCalls(8), 8, CostModel())
    assert planner.plan([state(margins=[0.5])]) == [Action.DRAFT], "there is nothing to verify yet"
    assert planner.plan([state(drafted=1, margins=[2.0])]) == [Action.DRAFT]
    assert planner.plan([state(drafted=2, margins=[2.0, 0.5])]) == [Action.VERIFY]
    assert sum(planner.phases()) == 0
    assert rounds(planner, 2) == [8, 8]


@pytest.mark.parametrize(("batch", "k"), [(8, 1), (8, 4), (8, 8), (23, 4)])
def test_about_one_in_k_plus_1_verifies(simulation, batch, k):
    server = simulation(Planner.fixed(k))
    server.add(batch, 0.5)
    assert max(server.run(20 * (k + 1)).verifying) <= math.ceil(batch / (k + 1))


def test_verify_work_stays_spread_with_adaptive_lengths(simulation):
    server = simulation(Planner.adaptive(16), pair=1e-7)
    server.add(16, 0.9, context=30_000, view=1000)
    server.run(600)
    steady = server.verifying[200:]
    mean = sum(steady) / len(steady)
    assert 1 < mean < 8, "precondition: most requests draft"
    assert max(steady) <= 2 * mean + 2


def test_a_missing_request_is_forgotten():
    planner = Planner.fixed(3)
    planner.plan([state("a"), state("b")])
    planner.plan([state("b", drafted=1)])
    assert sum(planner.phases()) == 1
    assert planner.plan([]) == []
    assert sum(planner.phases()) == 0


def test_drafts_of_a_forgotten_round_are_verified_at_once():
    planner = Planner.fixed(8)
    planner.plan([state()])
    planner.plan([])
    assert planner.plan([state(drafted=1)]) == [Action.VERIFY]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_course_of_events(data):
    """Whatever happens: drafts stay within k and the limit, and every round ends."""
    k = data.draw(st.integers(0, 6))
    adaptive = data.draw(st.booleans())
    planner = Planner.adaptive(k) if adaptive else Planner.fixed(k)
    drafted: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        arriving = data.draw(st.sets(st.integers(0, 7), max_size=2))
        leaving = data.draw(st.sets(st.integers(0, 7), max_size=1))
        for rid in arriving:
            drafted.setdefault(rid, 0)
        for rid in leaving:
            drafted.pop(rid, None)
        limit = data.draw(st.integers(0, 9))
        margin = data.draw(st.floats(-5, 20))
        requests = [state(rid, n, max(limit, n), [margin] * n) for rid, n in drafted.items()]
        actions = planner.plan(requests)
        planner.observe(data.draw(st.floats(1e-4, 10)))
        for request, action in zip(requests, actions, strict=True):
            if action is Action.VERIFY:
                accepted = data.draw(st.integers(0, request.drafted))
                planner.settle(request.rid, request.drafted, accepted, request.margins)
                drafted[request.rid] = 0
            else:
                assert request.drafted < min(k, request.limit)
                drafted[request.rid] += 1
        assert sum(planner.phases()) <= len(drafted)


def test_copies_run_ahead_of_the_passes_that_need_them():
    """Two requests on the host: each copy takes two iterations, and only one runs at a time."""
    planner = Planner.fixed(15)
    link = Link(token_seconds=1e-6, room=12_000)
    drafted, copied, seen = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0), []
    for _ in range(120):
        states = [DraftState(r, 5000, 500, drafted[r], 100, load=5000) for r in "ab"]
        actions = planner.plan(states, link)
        copying = planner.copying()
        planner.observe(3e-3)
        seen.append(len(copying))
        for rid, action in zip("ab", actions, strict=True):
            copied[rid] += rid in copying
            drafted[rid] += 1
            if action is Action.VERIFY:
                if len(seen) > 40:
                    assert copied[rid] == 2, "the copy did not begin two iterations before"
                planner.settle(rid, drafted[rid] - 1, 0)
                drafted[rid] = copied[rid] = 0
    assert max(seen[40:]) == 1 and sum(seen[40:]) >= 16


def test_without_room_for_two_no_copy_is_booked_beside_another():
    planner = Planner.fixed(3)
    link = Link(token_seconds=1e-6, room=6_000)
    drafted = dict.fromkeys("abc", 0)
    for _ in range(40):
        states = [DraftState(r, 5000, 500, drafted[r], 100, load=5000) for r in "abc"]
        actions = planner.plan(states, link)
        planner.observe(6e-3)
        assert all(slots <= 6_000 for _, slots in planner.rings())
        for rid, action in zip("abc", actions, strict=True):
            drafted[rid] = 0 if action is Action.VERIFY else drafted[rid] + 1
            if action is Action.VERIFY:
                planner.settle(rid, 3, 3)


def test_requests_that_never_drafted_are_forgotten_too():
    planner = Planner.adaptive(8)
    for rid in range(100):
        planner.takes(DraftState(rid, 1000, 100, 0, 8, found=4, match=8), 1)
    planner.plan([])
    assert not planner._length._requests

"""How many requests may leave their full KV to the host before the link is the limit."""

import pytest

from sglang_vericache.core import Action, DraftState
from sglang_vericache.scheduler import Link, LinkLoad, Planner

TOKENS = 5000
LINK = Link(token_seconds=1e-6, room=10**6)


def test_one_request_is_how_the_link_gets_known():
    load = LinkLoad()
    assert load.carries(LINK, 0, TOKENS, 0.0)
    assert not load.carries(LINK, TOKENS, TOKENS, 1e-3), "no round has ended"
    load.settle(9)
    assert not load.carries(Link(0.0, 1), TOKENS, TOKENS, 1e-3), "no copy was timed"
    assert load.carries(LINK, TOKENS, TOKENS, 1e-3)


def test_busy_is_the_time_of_copies_over_that_of_a_round():
    load = LinkLoad()
    load.settle(9)
    assert load.busy(LINK, 2 * TOKENS, 2e-3) == pytest.approx(10e-3 / 20e-3)
    assert load.carries(LINK, 3 * TOKENS, TOKENS, 2e-3)
    assert not load.carries(LINK, 4 * TOKENS, 1, 2e-3)
    for _ in range(200):
        load.settle(19)
    assert load.carries(LINK, 6 * TOKENS, TOKENS, 2e-3), "longer rounds need it less often"


def rounds(planner, loads, count, iteration=1e-3):
    """``count`` iterations of requests with ``loads`` tokens on the host each."""
    drafted = dict.fromkeys(range(len(loads)), 0)
    for _ in range(count):
        states = [DraftState(i, TOKENS, 500, drafted[i], 9, load=loads[i]) for i in drafted]
        for i, action in enumerate(planner.plan(states, LINK)):
            if action is Action.VERIFY:
                planner.settle(i, drafted[i], drafted[i])
            drafted[i] = drafted[i] + 1 if action is Action.DRAFT else 0
        planner.observe(iteration)
    return planner


def test_the_planner_lets_go_as_many_as_the_link_carries():
    """Rounds of ten iterations of 1 ms; a copy takes 5 ms."""
    planner = rounds(Planner.fixed(9), [TOKENS, 0, 0], 60)
    assert planner.link_busy() == pytest.approx(0.5, rel=0.1)
    assert planner.carries(TOKENS * 0.9) and not planner.carries(TOKENS * 1.3)
    planner.leaves(1, TOKENS * 0.9)
    assert not planner.carries(TOKENS * 0.5), "the one that has just left counts"
    assert rounds(Planner.fixed(9), [TOKENS, 0, 0], 60, iteration=4e-3).carries(5 * TOKENS)


def test_without_copies_there_is_no_limit():
    planner = Planner.fixed(3)
    planner.plan([DraftState("a", TOKENS, 500, 0, 9)])
    assert planner.carries(10**9) and planner.link_busy() == 0.0


def test_drafts_of_an_overdue_request_cost_it_nothing(monkeypatch):
    """Nearly all rejected, they would end a round's credit; waiting is not its fault."""

    def drafts(counted):
        planner = Planner.adaptive(32)
        if counted:  # the negative control: as if it had chosen to draft them
            monkeypatch.setattr(planner._length, "overdue", lambda rid: None)
        drafted, total = 0, 0
        for _ in range(400):
            state = DraftState("a", 30_000, 600, drafted, 32)
            (action,) = planner.plan([state], LINK)
            if action is Action.VERIFY and 0 < drafted < 20:
                action = Action.DRAFT
                planner.revise([action])
            if action is Action.VERIFY:
                planner.settle("a", drafted, min(drafted, 1))
                total += drafted > 0
            drafted = drafted + 1 if action is Action.DRAFT else 0
            planner.observe(1e-2 if action is Action.DRAFT else 3e-2)
        return total

    assert drafts(counted=False) > 10 > 2 * drafts(counted=True)

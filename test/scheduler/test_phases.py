"""The wheel against a model of itself, and the spread it promises."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_vericache.scheduler import Copy, PhaseWheel

HORIZON, ROOM = 6, 10
RIDS = st.integers(0, 5)


class WheelMachine(RuleBasedStateMachine):
    """Requests join, re-book with another k, leave and come back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.wheel = PhaseWheel(HORIZON)
        self.wheel.room = ROOM
        self.ahead: dict[int, int] = {}

    @rule(rid=RIDS, k=st.integers(0, HORIZON - 1), slack=st.integers(0, HORIZON - 1))
    def book(self, rid, k, slack):
        shortest = max(k - slack, 0)
        if rid in self.ahead:
            with pytest.raises(ValueError, match="already"):
                self.wheel.book(rid, shortest, k)
            return
        loads = [self.wheel.load(i) for i in range(shortest, k + 1)]
        chosen = self.wheel.book(rid, shortest, k)
        assert shortest <= chosen <= k
        assert loads[chosen - shortest] == min(loads)
        assert min(loads) not in loads[chosen - shortest + 1 :]
        self.ahead[rid] = chosen

    @rule(
        rid=RIDS,
        k=st.integers(1, HORIZON - 1),
        tokens=st.integers(1, ROOM),
        windows=st.sampled_from([0.25, 0.5, 1, 1.5, 2, 3]),
    )
    def book_with_a_copy(self, rid, k, tokens, windows):
        """Reserves link and room, or nothing where there is no room."""
        if rid in self.ahead:
            return
        before = [self.wheel.reserved(i) for i in range(HORIZON)]
        chosen = self.wheel.book(rid, k, k, Copy(tokens, windows))
        assert chosen == k
        after = [self.wheel.reserved(i) for i in range(HORIZON)]
        begins = k - math.ceil(windows)
        if after == before:
            during = range(begins, k + 1)
            assert begins < 0 or any(before[j][1] + tokens > ROOM for j in during), "it would fit"
        else:
            link = [a[0] - b[0] for a, b in zip(after, before, strict=True)]
            assert sum(link) == windows and max(link) <= 1
            assert all(after[i][1] == before[i][1] + tokens for i in range(begins, k + 1))
        self.ahead[rid] = chosen

    @rule(rid=RIDS)
    def leave(self, rid):
        self.wheel.leave(rid)
        self.ahead.pop(rid, None)

    @rule()
    def verify_and_advance(self):
        due = [rid for rid in RIDS_ALL if self.wheel.is_due(rid)]
        assert due == [rid for rid in RIDS_ALL if self.ahead.get(rid) == 0]
        for rid in due:
            self.leave(rid)
        self.wheel.advance()
        self.ahead = {rid: ahead - 1 for rid, ahead in self.ahead.items()}

    @precondition(lambda self: 0 in self.ahead.values())
    @rule()
    def cannot_skip_a_due_request(self):
        with pytest.raises(AssertionError, match="still booked"):
            self.wheel.advance()

    @invariant()
    def consistent(self):
        self.wheel.check_integrity()
        rings = [self.wheel.reserved(i) for i in range(HORIZON)]
        assert all(slots <= ROOM for _, slots in rings)
        loads = [self.wheel.load(i) for i in range(HORIZON)]
        assert loads == [list(self.ahead.values()).count(i) for i in range(HORIZON)]


RIDS_ALL = range(6)
WheelMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestWheel = WheelMachine.TestCase


def verifying(arrivals: list[int], k: int, iterations: int, stagger: bool = True) -> list[int]:
    """Verify passes per iteration when a request arrives at each of ``arrivals``."""
    wheel = PhaseWheel(k + 1)
    counts = []
    running: set[int] = set()
    for now in range(iterations):
        for rid in running:
            if not wheel.is_booked(rid):
                wheel.book(rid, k, k)
        for rid, arrival in enumerate(arrivals):
            if arrival == now:
                wheel.book(rid, 0 if stagger else k, k)
                running.add(rid)
        due = [rid for rid in running if wheel.is_due(rid)]
        for rid in due:
            wheel.leave(rid)
        counts.append(len(due))
        wheel.advance()
    return counts


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("batch", [1, 2, 8, 23])
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_verify_passes_spread_evenly(k, batch, gap):
    steady = verifying([gap * i for i in range(batch)], k, gap * batch + 6 * (k + 1))[
        -3 * (k + 1) :
    ]
    assert sum(steady) == 3 * batch
    assert max(steady) == math.ceil(batch / (k + 1))
    assert max(steady) - min(steady) <= 1


def test_without_staggering_they_would_not():
    assert max(verifying([0] * 8, 7, 64, stagger=False)) == 8


def wheel_with_room() -> PhaseWheel:
    wheel = PhaseWheel(16)
    wheel.room = 100
    return wheel


def test_short_copies_share_an_iteration_of_the_link():
    wheel = wheel_with_room()
    booked = [wheel.book(rid, 8, 10, Copy(1, 0.25)) for rid in range(12)]
    assert sorted(booked) == [8] * 4 + [9] * 4 + [10] * 4
    assert [wheel.reserved(i)[0] for i in (7, 8, 9)] == [1, 1, 1]


def test_a_copy_goes_where_the_link_is_free_though_more_verify_there():
    wheel = wheel_with_room()
    wheel.book("a", 9, 9, Copy(1, 2.5))
    wheel.book("b", 6, 6)
    wheel.book("c", 6, 6)
    assert wheel.book("d", 6, 9, Copy(1, 2.5)) == 6
    assert max(wheel.reserved(i)[0] for i in range(16)) == 1


def test_without_a_free_place_it_goes_where_it_waits_for_least():
    wheel = wheel_with_room()
    wheel.book("a", 8, 8, Copy(1, 4))
    assert wheel.book("b", 6, 9, Copy(1, 4)) == 6, "the first two of its four windows are free"
    assert [wheel.reserved(i)[0] for i in range(2, 8)] == [1, 1, 2, 2, 1, 1]
    assert wheel.copying() == []
    wheel.advance()
    wheel.advance()
    assert wheel.copying() == ["b"], "it begins ahead all the same"


@pytest.mark.parametrize(("shortest", "longest"), [(-1, 2), (3, 2), (0, HORIZON)])
def test_bookings_outside_the_horizon_are_refused(shortest, longest):
    with pytest.raises(ValueError, match=r"outside 0\.\.5"):
        PhaseWheel(HORIZON).book("a", shortest, longest)

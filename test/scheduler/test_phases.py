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
        windows=st.integers(1, 3),
    )
    def book_with_a_copy(self, rid, k, tokens, windows):
        """Reserves link and room, or nothing."""
        if rid in self.ahead:
            return
        before = [self.wheel.reserved(i) for i in range(HORIZON)]
        chosen = self.wheel.book(rid, k, k, Copy(tokens, windows))
        assert chosen == k
        after = [self.wheel.reserved(i) for i in range(HORIZON)]
        if after == before:
            before_it, during = range(k - windows, k), range(k - windows, k + 1)
            assert (
                k < windows
                or any(before[j][0] for j in before_it)
                or any(before[j][1] + tokens > ROOM for j in during)
            ), "it would have fitted"
        else:
            reserved = range(chosen - windows, chosen + 1)
            assert all(after[i][1] == before[i][1] + tokens for i in reserved)
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
        assert all(copies <= 1 and slots <= ROOM for copies, slots in rings)
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


@pytest.mark.parametrize(("shortest", "longest"), [(-1, 2), (3, 2), (0, HORIZON)])
def test_bookings_outside_the_horizon_are_refused(shortest, longest):
    with pytest.raises(ValueError, match=r"outside 0\.\.5"):
        PhaseWheel(HORIZON).book("a", shortest, longest)

"""Whose turn it is: the control flow of staging, on a tree that only counts slots."""

from types import SimpleNamespace

import pytest

from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.core import Action, Counters
from sglang_vericache.platform import bootstrap
from sglang_vericache.scheduler import Planner

bootstrap.install()

from sglang_vericache.speculative.staging import PATIENCE  # noqa: E402
from sglang_vericache.speculative.tiers import Tiers  # noqa: E402

SIZE = 100
DRAFT, VERIFY, WAIT = Action.DRAFT, Action.VERIFY, Action.WAIT


class Tree:
    """Stands in for ``TieredCache``: prefixes of ``SIZE`` tokens in ``slots`` slots."""

    def __init__(self, slots):
        self.slots, self.holdings, self.stuck, self.refused = slots, {}, set(), False
        self.finished_copies, self.started, self.left, self.queued = 0, 0, {}, []
        self.loaded_share = 1.0
        self.token_to_kv_pool_allocator = SimpleNamespace(
            size=100 * SIZE, available_size=lambda: 90 * SIZE
        )

    def is_offloaded(self, req):
        return req in self.holdings and not self.holdings[req].staged

    def stage(self, req):
        if SIZE * (1 + sum(held.staged for held in self.holdings.values())) > self.slots:
            return None
        self.holdings[req].staged = True
        self.queued.append(self.holdings[req])
        return SIZE

    def may_read_host(self, req):
        return False

    def release(self, req):
        self.holdings[req].staged = False

    def finish_copies(self):
        self.finished_copies += 1

    def start_copies(self):
        for holding in self.queued:
            holding.copied_by = self.started
        index, self.queued = (self.started if self.queued else -1), []
        return index

    def comes_with(self, req, index):
        return 0 <= index == self.holdings[req].copied_by

    def copy_seconds_left(self, req):
        return self.left.get(req, 0.0)

    def await_copy(self, req):
        pass

    def copy_ahead(self, reqs):
        return sum(self.stage(req) or 0 for req in reqs)

    def can_offload(self, req):
        return True

    def evictable_size(self):
        return 0

    def host_has_room(self, tokens):
        return True


class Req:
    def __init__(self):
        self.kv = SimpleNamespace(cache_protected_len=SIZE)


@pytest.fixture
def setup():
    def make(requests, slots):
        tree = Tree(slots)
        states = [
            SimpleNamespace(
                **{"req": Req(), "serial": i, "drafts": [1], "has_view": True},
                **{"view_length": 50, "limit": 8, "unverified": False, "barred": False},
                committed=5000,
                dropper=SimpleNamespace(drops=True, codec=None),
            )
            for i in range(requests)
        ]
        for state in states:
            tree.holdings[state.req] = SimpleNamespace(staged=False, copied_by=-1)
        config = VeriCacheConfig(tier="host", staging="copy")
        tiers = Tiers(tree, None, config, Planner.fixed(1), Counters())
        return tiers.staging, tree, states

    return make


def test_who_waited_longest_goes_first(setup):
    """k = 1, three requests, room for one: nobody starves."""
    staging, tree, states = setup(3, SIZE)
    verified = {0: 0, 1: 0, 2: 0}
    for _ in range(30):
        wanted = [VERIFY if state.drafts else DRAFT for state in states]
        actions, *_ = staging.arrange(states, wanted, ())
        for state, action in zip(states, actions, strict=True):
            if action is VERIFY:
                verified[state.serial] += 1
                state.drafts = []
            elif action is DRAFT:
                state.drafts = [1]
    assert min(verified.values()) >= 8, verified
    assert not tree.stuck


def test_room_that_comes_back_is_no_reason_to_retract(setup):
    staging, tree, states = setup(2, SIZE)
    actions, loaded, *_ = staging.arrange(states, [VERIFY, VERIFY], ())
    assert actions == [VERIFY, WAIT] and loaded == SIZE
    assert not tree.stuck
    assert tree.finished_copies == 0, "others are not held up for it"


def test_nobody_can_go_on(setup):
    staging, tree, states = setup(3, SIZE - 1)
    actions, loaded, *_ = staging.arrange(states, [VERIFY, VERIFY, DRAFT], ())
    assert actions == [WAIT, WAIT, DRAFT] and loaded == 0
    assert tree.stuck == {states[0].req, states[1].req}
    assert tree.finished_copies == 1, "copies are waited for once an iteration"


def test_a_copy_ahead_is_not_released_and_takes_no_room_from_who_waits(setup):
    staging, tree, states = setup(2, 2 * SIZE)
    staging.arrange(states, [DRAFT, DRAFT], {1})
    assert tree.holdings[states[1].req].staged and not tree.holdings[states[0].req].staged
    staging.arrange(states, [DRAFT, DRAFT], {1})
    assert tree.holdings[states[1].req].staged
    tree.slots = SIZE
    actions, *_ = staging.arrange(states, [VERIFY, DRAFT], {1})
    assert actions[0] is WAIT
    tree.release(states[1].req)
    tree.slots = 0
    staging.arrange(states, [VERIFY, DRAFT], {1})
    assert not tree.holdings[states[1].req].staged


def test_plain_decoding_on_staged_kv_yields_after_a_while(setup):
    staging, tree, states = setup(2, SIZE)
    plain, _ = states
    staging.arrange(states, [VERIFY, DRAFT], ())
    plain.drafts = []
    history = [staging.arrange(states, [VERIFY, VERIFY], ()).actions for _ in range(PATIENCE + 1)]
    assert history[:PATIENCE] == [[VERIFY, WAIT]] * PATIENCE
    assert history[PATIENCE] == [WAIT, VERIFY]
    assert not tree.stuck


def test_only_residents_that_draft_from_less_are_expected_to_leave(setup):
    staging, tree, states = setup(2, SIZE - 1)
    resident = states[1]
    del tree.holdings[resident.req]
    staging.arrange(states, [VERIFY, VERIFY], ())
    assert not tree.stuck, "the resident will leave its KV to the host"
    resident.dropper.drops = False
    staging.arrange(states, [VERIFY, DRAFT], ())
    assert tree.stuck == {states[0].req}
    resident.dropper.codec = "int4"
    staging.arrange(states, [VERIFY, DRAFT], ())
    assert not tree.stuck, "its drafts need no slot of the KV pool"
    for name, value in {"unverified": True, "barred": True, "limit": 0, "view_length": 0}.items():
        before = getattr(resident, name)
        setattr(resident, name, value)
        staging.arrange(states, [VERIFY, DRAFT], ())
        assert tree.stuck == {states[0].req}, f"it never leaves: {name}"
        setattr(resident, name, before)


def test_who_comes_late_drafts_on_and_holds_up_nobody(setup):
    staging, tree, states = setup(3, 3 * SIZE)
    tree.left = {states[0].req: 0.5}
    wanted = [VERIFY, VERIFY, DRAFT]
    actions, loaded, copies, _ = staging.arrange(states, wanted, (), {0}, seconds=0.1)
    assert actions == [DRAFT, VERIFY, DRAFT]
    assert (loaded, copies) == (SIZE, 0)
    assert tree.holdings[states[0].req].copied_by == 0, "its pass, later, has to wait for it"
    actions, *_ = staging.arrange(states, wanted, (), (), seconds=0.1)
    assert actions[0] is WAIT, "it may draft no more"
    actions, loaded, *_ = staging.arrange(states, wanted, (), {0}, seconds=0.6)
    assert actions == wanted and loaded == 0, "what is left of it takes no longer than the pass"


def test_with_nothing_else_to_do_the_first_to_come_is_waited_for(setup):
    staging, tree, states = setup(2, 2 * SIZE)
    tree.left = {states[0].req: 0.5, states[1].req: 0.4}
    actions, *_ = staging.arrange(states, [VERIFY, VERIFY], (), (), seconds=0.1)
    assert actions == [WAIT, VERIFY]


def test_who_finds_no_room_drafts_on(setup):
    staging, _, states = setup(2, SIZE)
    actions, *_ = staging.arrange(states, [VERIFY, VERIFY], (), {1})
    assert actions == [VERIFY, DRAFT]


@pytest.mark.parametrize("has_view", [True, False])
def test_a_resident_that_only_looks_up_makes_room_for_who_waits(setup, has_view):
    """Its drafts are never its own, so it is never between two rounds."""
    _, tree, (waiting, resident) = setup(2, SIZE - 1)
    config = VeriCacheConfig(tier="auto", staging="copy")
    tiers = Tiers(tree, None, config, Planner.adaptive(8), Counters())
    del tree.holdings[resident.req]
    resident.has_view, resident.took_found, waiting.took_found = has_view, True, False
    for _ in range(PATIENCE):
        assert not tiers.should_leave(resident), "the device is nearly empty"
        tiers.recall_views([waiting, resident])
        tiers.staging.arrange([waiting, resident], [VERIFY, VERIFY], ())
    tiers.recall_views([waiting, resident])
    assert not resident.has_view, "it chooses one, and leaves"
    tiers.staging.waited = 0
    for _ in range(PATIENCE - 1):  # this round still has to be verified
        assert tiers.should_leave(resident)
        tiers.recall_views([resident])
    tiers.recall_views([resident])
    assert not tiers.should_leave(resident), "it did not draft"

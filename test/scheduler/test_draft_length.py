"""Draft lengths on simulated servers: near the best fixed one, never much slower than plain."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_vericache.core import DraftState
from sglang_vericache.scheduler import AdaptiveLength, CostModel, FixedLength, Link, Planner
from sglang_vericache.scheduler.agreement import Agreement, Confidence
from sglang_vericache.scheduler.draft_length import (
    LOSS_SHARE,
    MARGINS,
    MAX_CREDIT,
    START_CREDIT,
    best_length,
)


def gain(p, price, k):
    return sum(p**m for m in range(k + 1)) / (1 + k * price)


@given(p=st.floats(0, 1), price=st.floats(0.01, 2), k_max=st.integers(0, 32))
def test_best_length_is_the_argmax(p, price, k_max):
    k, best = best_length(p, price, k_max)
    assert best == pytest.approx(gain(p, price, k))
    assert best >= max(gain(p, price, other) for other in range(k_max + 1)) - 1e-9


def test_better_agreement_or_cheaper_drafts_never_shorten():
    by_agreement = [best_length(p / 20, 0.3, 32)[0] for p in range(21)]
    by_price = [best_length(0.9, 0.05 * c, 32)[0] for c in range(1, 30)]
    assert by_agreement == sorted(by_agreement) and by_agreement[0] == 0
    assert by_price == sorted(by_price, reverse=True) and by_price[-1] == 0


def test_agreement_counts_trials_up_to_the_first_rejection():
    estimate = Agreement(memory=1e9)
    assert estimate.mean(0.7) == pytest.approx(0.7)
    for _ in range(1000):
        estimate.record(drafted=8, accepted=3)
    assert estimate.mean(0.7) == pytest.approx(3 / 4, abs=1e-3)
    estimate.record(drafted=0, accepted=0)
    assert estimate.mean(0.7) == pytest.approx(3 / 4, abs=1e-3)


def test_agreement_forgets():
    estimate = Agreement(memory=24)
    for _ in range(100):
        estimate.record(4, 4)
    for _ in range(48):
        estimate.record(4, 0)
    assert estimate.mean(1.0) < 0.3


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_near_the_best_fixed_length(simulation, batch, agreement):
    def rate(planner):
        server = simulation(planner)
        server.add(batch, agreement)
        return server.run(600).rate

    fixed = {k: rate(Planner.fixed(k)) for k in (0, 1, 2, 4, 8, 16)}
    auto = rate(Planner.adaptive(32))
    assert auto >= 0.93 * max(fixed.values()), fixed
    assert auto >= 0.95 * fixed[0]
    # Precondition: the wrong length would have cost a lot.
    assert min(fixed.values()) < 0.95 * max(fixed.values())


def test_long_contexts_in_a_batch_gain(simulation):
    def rate(planner):
        server = simulation(planner, pair=1e-7)
        server.add(16, 0.95, context=30_000, view=3_000)
        return server.run(600).rate

    assert rate(Planner.adaptive(32)) > 1.4 * rate(Planner.fixed(0))


def test_requests_whose_kv_is_far_draft_longer(simulation):
    """As long as the link is busy; one that is hardly used costs nobody anything."""

    def mean_length(load, seconds=6e-6):
        link = Link(token_seconds=seconds, room=100_000)
        server = simulation(Planner.adaptive(32), link, loaded_key=seconds)
        requests = server.add(8, 0.97, load=load)
        server.run(400)
        rounds = [drafted for r in requests for drafted, _ in r.rounds[-10:]]
        return sum(rounds) / len(rounds)

    assert mean_length(6000) > 1.5 * mean_length(0) > 0
    assert mean_length(6000, seconds=1e-8) < 1.2 * mean_length(0)


def test_rounds_end_at_close_calls(simulation):
    """Tokens of two kinds, told apart by their margins: better than any fixed length."""
    rng = random.Random(1)
    easy = [rng.random() < 0.8 for _ in range(20_000)]

    def rate(planner, margin=None):
        server = simulation(planner, pair=2e-7)
        server.add(16, lambda i: 0.98 if easy[i] else 0.5, margin=margin)
        return server.run(800).rate

    fixed = {k: rate(Planner.fixed(k)) for k in (1, 2, 3, 4, 5, 6, 8, 12)}
    blind = rate(Planner.adaptive(16))
    seeing = rate(Planner.adaptive(16), margin=lambda i: 5.0 if easy[i] else 0.1)
    assert seeing > 1.04 * max(*fixed.values(), blind), (seeing, blind, fixed)


def test_confidence_is_learned_by_margin():
    confidence = Confidence(1e9, MARGINS)
    assert confidence.of(3.0, 0.7) == confidence.best(0.7) == pytest.approx(0.7)
    for _ in range(500):
        confidence.record([5.0, 0.1, 5.0], accepted=1)  # nothing is known of the last one
        confidence.record([5.0], accepted=1)
    assert confidence.of(4.5, 0.7) == confidence.best(0.7) > 0.99
    assert confidence.of(-1.0, 0.7) == confidence.of(0.2, 0.7) < 0.01
    assert confidence.of(0.6, 0.7) == pytest.approx(0.7), "a margin never seen"


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("context", [300, 6000])
def test_lookup_is_taken_where_it_gains_and_left_where_it_does_not(simulation, batch, context):
    def rate(chance, tokens=8):
        server = simulation(Planner.adaptive(16), pair=1e-7)
        view = context if context < 512 else 600
        found = (lambda _: (tokens, 10, chance)) if tokens else None
        server.add(batch, 0.9, context=context, view=view, found=found)
        return server.run(600).rate

    without = rate(0.0, tokens=0)
    assert rate(0.98) > 1.5 * without
    assert rate(0.0) > 0.97 * without, "learned to be wrong"
    assert rate(0.6) > 0.97 * without


def test_a_fixed_length_takes_nothing():
    assert FixedLength(4).takes(DraftState(0, 6000, 600, 0, 100, found=8, match=32), 1) == 0


def test_a_draft_pass_checks_what_probably_comes(simulation):
    server = simulation(Planner.adaptive(16), pair=1e-7)
    (request, *_) = server.add(16, 0.95)
    while not request.drafted or len(request.rounds) < 10:
        server.step()
    told = replace(request.state(), found=8, match=20)
    counts = []
    for p in (1.0, 0.7, 0.0):
        for _ in range(3000):
            server.planner.found(20, 1, int(server.random.random() < p))
        counts.append(server.planner.probes(told, 16))
    assert counts[0] > counts[1] >= 1 and counts[2] == 0
    assert server.planner.probes(replace(told, rid="unknown"), 16) == 0


def test_what_is_found_is_judged_by_the_match_before_it(simulation):
    """Where a long match is right and a short one wrong, both are learned without taking any."""
    server = simulation(Planner.adaptive(16), pair=1e-7)
    found = lambda position: (8, 20, 0.95) if position // 50 % 2 else (8, 3, 0.0)  # noqa: E731
    (request,) = server.add(1, 0.5, context=300, view=300, found=found)
    server.run(400)
    taken = [drafted for drafted, _ in request.rounds[-100:]]
    assert set(taken) == {0, 8}
    wrong = [drafted for drafted, accepted in request.rounds[-100:] if drafted and not accepted]
    assert len(wrong) < 10


def test_lookup_never_costs_more_than_the_credit(simulation):
    """Every proposal looks sure and is wrong: what is lost before that is learned is bounded."""
    server = simulation(Planner.adaptive(16), verify_row=5e-3)
    (request,) = server.add(1, 0.0, context=300, view=300, found=lambda _: (16, 32, 0.0))
    for _ in range(200):
        server.planner.found(32, 16, 16)
    server.run(300)
    assert any(drafted for drafted, _ in request.rounds), "precondition: it was believed"
    plain = simulation(Planner.adaptive(16), verify_row=5e-3)
    plain.add(1, 0.0, context=300, view=300)
    step = plain.run(300).seconds / 300
    assert server.seconds < 1.05 * plain.seconds + START_CREDIT * step


def test_a_view_as_large_as_the_context_never_drafts(simulation):
    server = simulation(Planner.adaptive(8))
    (request,) = server.add(1, 1.0, context=100, view=100)
    server.run(50)
    assert request.rounds == [(0, 0)] * 50
    fixed = simulation(Planner.fixed(8))
    (request,) = fixed.add(1, 1.0, context=100, view=100)
    fixed.run(50)
    assert request.rounds[-1] == (8, 8)


def test_compute_bound_batches_stop_drafting(simulation):
    server = simulation(Planner.adaptive(8), draft_row=1e-2, verify_row=1e-2)
    requests = server.add(8, 0.95)
    server.run(400)
    assert sum(drafted for r in requests for drafted, _ in r.rounds[-50:]) == 0


def test_a_request_that_turns_bad_stops_and_one_that_recovers_is_found(simulation):
    phases = {0: 0.95, 200: 0.0, 1200: 0.97}

    def agreement(position):
        return phases[max(start for start in phases if start <= position)]

    server = simulation(Planner.adaptive(16), pair=1e-7)
    (request,) = server.add(1, agreement, context=60_000, view=2_000)
    while request.output < 2000:
        server.step()
    drafted = dict.fromkeys(phases, 0)
    rounds = dict.fromkeys(phases, 0)
    position = 0
    for k, accepted in request.rounds:
        # The second half of each phase, when the estimate has caught up.
        start = max(start for start in phases if start <= position)
        end = min((s for s in phases if s > position), default=2000)
        if position > (start + end) / 2:
            drafted[start] += k
            rounds[start] += 1
        position += accepted + 1
    mean = {start: drafted[start] / rounds[start] for start in phases}
    assert mean[0] > 2
    assert 0 < mean[200] < 0.2, "plain decoding with a few probes"
    assert mean[1200] > 2


def test_no_flapping_at_break_even():
    """At a gain between 1 and the starting gain a request keeps doing what it did."""
    price, p = 0.5, 0.52  # gain(1) = 1.0133
    assert 1.0 < best_length(p, price, 8)[1] < 1.05
    for before in (False, True):
        length = AdaptiveLength(8, CostModel())
        length._prices = lambda *_: (0.4 * price, price)
        length.agreement = lambda rid: p if rid == "now" else 0.9
        request = DraftState("now", context=1000, view=100, drafted=0, limit=100)
        if before:
            length.agreement = lambda rid: 0.9
            assert length.choose(request, 1).longest > 0
            length.agreement = lambda rid: p
        assert (length.choose(request, 1).longest > 0) == before


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_loss_is_bounded_whatever_the_target_answers(data):
    """An adversary picks prices and accepts; spent <= (1 + share) * plain + credit, any prefix."""
    length = AdaptiveLength(16, CostModel())
    spent = plain = 0.0
    price = 0.3
    length._prices = lambda *_: (0.4 * price, price)
    length._probe_price = lambda *_: 0.1
    for _ in range(20):  # what is found is believed to be right
        length.found(20, 16, 16)
    for _ in range(data.draw(st.integers(1, 60))):
        price = data.draw(st.sampled_from([0.05, 0.2, 0.5, 0.9, 1.5]))
        limit = data.draw(st.integers(0, 20))
        request = DraftState(
            "a", context=5000, view=500, drafted=0, limit=limit, found=limit, match=20
        )
        taken = length.takes(request, 1) if data.draw(st.booleans()) else 0
        if taken:
            assert taken <= min(limit, 16)
            accepted = data.draw(st.integers(0, taken))
            length.settle("a", taken, accepted, taken=True)
            spent += 1 + taken * 0.4 * price
        else:
            shortest, longest = length.choose(request, 1)
            assert 0 <= shortest <= longest <= min(limit, 16)
            drafted = passes = probed = 0
            while drafted < longest:
                probes = length.probes(replace(request, drafted=drafted), 1)
                drafted += 1 + data.draw(st.integers(0, probes))
                passes, probed = passes + 1, probed + probes
                assert drafted <= longest
                if drafted >= shortest and data.draw(st.booleans()):
                    break
                if not length.extends(replace(request, drafted=drafted, margins=())):
                    break
            accepted = data.draw(st.integers(0, drafted))
            length.settle("a", drafted, accepted, passes=passes)
            spent += 1 + passes * 0.6 * price + drafted * 0.4 * price + probed * 0.1
        plain += accepted + 1
        assert spent <= (1 + LOSS_SHARE) * plain + START_CREDIT + 1e-9


def test_gained_credit_is_capped():
    """A long good run does not pay for a long bad one: losing needs at most the maximum credit."""
    length = AdaptiveLength(16, CostModel())
    length._prices = lambda *_: (0.1, 0.2)
    request = DraftState("a", context=5000, view=500, drafted=0, limit=100)
    for _ in range(200):
        k = length.choose(request, 1).longest
        length.settle("a", k, k)
    lost = 0.0
    for _ in range(200):
        k = length.choose(request, 1).longest
        length.settle("a", k, 0)
        lost += k * 0.2
    assert 0 < lost <= MAX_CREDIT + 200 * LOSS_SHARE


def test_fixed_length_obeys_the_limit():
    request = DraftState("a", context=5000, view=500, drafted=0, limit=3)
    assert FixedLength(8).choose(request, 1) == (3, 3)
    assert FixedLength(2).choose(request, 1) == (2, 2)

"""``benchmark/simulate.py``: nothing is lost, memory holds, and a figure of the paper comes out."""

import json

import pytest

import simulate
from _hardware import H100_NVL, LLAMA_70B, Server, agreement_of, expected_accepted
from _policies import Full, Ours, Paper, Resident
from _remote import Fleet, RemotePair, Scheme
from _simulation import Pool, Simulation, workload

SERVER = Server(H100_NVL.times(2), LLAMA_70B)
PROMPT, KEEP, AGREEMENT = 24_576, 0.2, 0.98


def policies(keep=KEEP):
    known = (SERVER, PROMPT, keep, AGREEMENT)
    return [Full(), Paper(*known, residents=0), Paper(*known), Ours(), Resident(), Resident(8)]


def load(count=12, wanted=96, agreement=AGREEMENT, keep=KEEP):
    return workload(count, PROMPT, wanted, agreement, keep)


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
def test_every_token_once_and_never_more_memory_than_there_is(policy):
    requests = load()
    outcome = Simulation(SERVER, policy, requests).run()
    assert outcome.tokens == sum(r.wanted for r in requests)
    assert all(r.output == r.wanted for r in requests)
    assert 0.5 * SERVER.capacity < outcome.peak_slots <= SERVER.capacity
    assert (outcome.drafted > outcome.accepted > 0) == (policy.limit > 0)
    assert (outcome.offloaded > 0) == isinstance(policy, Paper | Ours)
    if outcome.offloaded:
        assert outcome.ahead > 0 and outcome.late > 0


def test_memory_that_is_not_asked_for_would_overflow(monkeypatch):
    monkeypatch.setattr(Pool, "unpromised", 10**9)
    with pytest.raises(AssertionError):
        Simulation(SERVER, Full(), load()).run()


def test_a_request_that_never_fits_is_an_error():
    with pytest.raises(RuntimeError, match="does not fit"):
        Simulation(SERVER, Full(), workload(1, 10**6, 8, 1.0, 1.0)).run()


def test_the_seed_decides():
    first, again, other = (Simulation(SERVER, Ours(), load(), seed).run() for seed in (0, 0, 1))
    assert first == again != other


def gain(policy, agreement, keep, wanted=192):
    def rate(policy):
        outcome = Simulation(SERVER, policy, load(16, wanted, agreement, keep)).run()
        return outcome.tokens / outcome.seconds

    return rate(policy) / rate(Full())


@pytest.mark.parametrize("which", [2, 3, 4], ids=lambda i: policies()[i].name)
def test_no_gain_without_compression_and_agreement(which):
    assert gain(policies(keep=1.0)[which], agreement=0.0, keep=1.0, wanted=16) <= 1.0
    assert gain(policies()[which], AGREEMENT, KEEP) > 1.0


def test_a_figure_of_the_paper():
    """1.92x at a link 60 times slower than device memory."""
    server = Server(H100_NVL.times(2).with_ratio(60), LLAMA_70B)
    full, mixed = (simulate.simulate(server, simulate.policies(server)[i], 24) for i in (0, 2))
    assert mixed.rate / full.rate == pytest.approx(1.92, rel=0.15)
    slow = Server(H100_NVL.times(2).with_ratio(240), LLAMA_70B)
    slower = simulate.simulate(slow, simulate.policies(slow)[2], 24)
    assert slower.rate / full.rate < 1.92 * 0.85


def test_agreement_of_a_run_of_drafts():
    assert expected_accepted(agreement_of(19, 30), 30) == pytest.approx(19, abs=0.01)
    assert expected_accepted(1.0, 7) == 7


@pytest.mark.parametrize(("keep", "drafts"), [(1.0, 0), (0.3, 40)])
def test_remote_pair_commits_every_token(keep, drafts):
    requests = load(8, keep=keep)
    pair = RemotePair(SERVER, 1.2e9, 40e9, keep, drafts)
    assert pair.run(requests) > 0
    assert pair.tokens == sum(r.wanted for r in requests)


@pytest.mark.parametrize(("servers", "limit"), [(2, "links"), (40, "store")])
def test_a_fleet_reaches_what_arithmetic_allows(servers, limit):
    fleet = Fleet(store=10e9, link=1e9, tokens=500, scheme=Scheme("", 8e9, rate=100))
    assert (servers > fleet.knee == 10) == (limit == "store")
    assert 0.9 < fleet.run(servers) / fleet.bound(servers) < 1.03


def test_the_last_line_is_json(capsys):
    simulate.main(["--sweep", "remote", "--requests", "6"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["benchmark"] == "simulate"
    cells = figures["remote"]["cells"]
    assert list(cells) == [str(answer) for answer in simulate.ANSWERS]
    assert all(set(cell) == {s.model.name for s in simulate.SERVERS} for cell in cells.values())

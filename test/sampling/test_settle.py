"""Settling a run of drafts, row by row, against plain decoding (cases L2, P1, P2, P4, P5)."""

import random
from collections import Counter

import pytest
import torch

from sampling.fakes import EOS, VOCAB, Batch, Req
from sampling.loops import HashModel, run_drafted, run_plain
from sglang_vericache.sampling import penalties
from sglang_vericache.sampling.settle import RowLayout, settle

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 40
PENALTIES = [
    {},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -1.7, "presence_penalty": 0.4},
    {"presence_penalty": -1.1},
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 0.9, "frequency_penalty": 2.0, "presence_penalty": 0.3},
    {"min_new_tokens": 16},
    {"min_new_tokens": 9, "repetition_penalty": 1.6, "frequency_penalty": 0.1},
    {"logit_bias": {"7": -100.0, "11": 3.0}},
    {"logit_bias": {"5": 6.5}, "frequency_penalty": 0.45, "min_new_tokens": 3},
]
SAMPLING = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.9},
]
LOGPROBS = [
    {},
    {"return_logprob": True},
    {"top_logprobs_num": 3},
    {"token_ids_logprob": [1, EOS]},
    {"top_logprobs_num": 5, "token_ids_logprob": [2]},
]


def make_reqs(n=10):
    return [
        Req(
            sampling_seed=1000 + i,
            **PENALTIES[i % len(PENALTIES)],
            **SAMPLING[i % len(SAMPLING)],
            **LOGPROBS[i % len(LOGPROBS)],
        )
        for i in range(n)
    ]


def outputs(reqs):
    return [list(req.output_ids[:STEPS]) for req in reqs]


def logs(log, reqs):
    return [log[req][:STEPS] for req in reqs]


@pytest.fixture(scope="module")
def plain(sampler, one_thread):
    """Every request decoded alone, plainly."""
    reqs = make_reqs()
    log = {}
    for req in reqs:
        log.update(run_plain([req], HashModel(), sampler, STEPS))
    return reqs, log


def test_plain_batch_equals_plain_alone(plain, sampler):
    reqs = make_reqs()
    log = run_plain(reqs, HashModel(), sampler, STEPS)
    assert outputs(reqs) == outputs(plain[0])
    assert logs(log, reqs) == logs(plain[1], plain[0])


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("error", [0.0, 0.3, 3.0])
def test_drafted_equals_plain(plain, sampler, k, error):
    reqs = make_reqs()
    model, compressed = HashModel(), HashModel(error=error)

    def drafter(req, prefix, drafts):
        return compressed(prefix + drafts)

    log, accepted = run_drafted(reqs, model, drafter, sampler, STEPS, k)
    assert set(accepted) <= set(range(1, k + 2))
    assert outputs(reqs) == outputs(plain[0])
    assert logs(log, reqs) == logs(plain[1], plain[0])
    if error == 0.0:
        # The drafting rows share every rule and all noise: whatever was drafted is accepted.
        assert sum(accepted) / len(accepted) > k / 2
    elif k > 1:
        assert set(accepted) >= {1, 2}
        assert error == 3.0 or max(accepted) > 2


def test_a_draft_pass_that_checks_tokens_drafts_what_one_by_one_would(plain, sampler):
    """Its rows have the penalties, noise and limits of their depth: every draft is accepted."""
    reqs, model, rng = make_reqs(), HashModel(), random.Random(0)
    truth = {id(req): list(known.output_ids) for req, known in zip(reqs, plain[0], strict=True)}
    runs = []

    def prober(req, drafts):
        at = len(req.output_ids) + len(drafts)
        tokens = truth[id(req)][at : at + 4]
        if tokens and rng.random() < 0.5:  # one of them is wrong
            tokens[rng.randrange(len(tokens))] += 1
        runs.append(len(tokens))
        return tokens

    def drafter(req, prefix, drafts):
        return model(prefix + drafts)

    log, accepted = run_drafted(reqs, model, drafter, sampler, STEPS, 8, prober=prober)
    assert max(runs) == 4, "precondition: several rows"
    assert outputs(reqs) == outputs(plain[0])
    assert logs(log, reqs) == logs(plain[1], plain[0])
    one_by_one = run_drafted(make_reqs(), model, drafter, sampler, STEPS, 8)[1]
    assert sum(accepted) / len(accepted) > 0.9 * sum(one_by_one) / len(one_by_one) > 4


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_scripted_accept_lengths(plain, sampler, k):
    """P4: drafts that agree for 0..k tokens: lengths, counts and logprobs after every one."""
    truth = {}
    reqs = make_reqs()
    for req, known in zip(reqs, plain[0], strict=True):
        truth[req] = list(known.output_ids)
    rng = random.Random(k)
    agree = {}

    def drafter(req, prefix, drafts):
        if not drafts:
            agree[req] = rng.choice([k, rng.randint(0, k)])
        at = len(prefix) - 3 + len(drafts)
        token = truth[req][at] if at < len(truth[req]) else 0
        return token if len(drafts) < agree[req] else (token + 1) % VOCAB

    def counts_are_those_of_committed_tokens(reqs):
        for req in reqs:
            assert penalties.counts_of(req) == Counter(req.output_ids)

    log, accepted = run_drafted(
        reqs, HashModel(), drafter, sampler, STEPS, k, counts_are_those_of_committed_tokens
    )
    assert set(accepted) == set(range(1, k + 2))
    assert outputs(reqs) == outputs(plain[0])
    assert logs(log, reqs) == logs(plain[1], plain[0])


def test_every_parameter_has_an_effect(plain, sampler):
    """Otherwise the equalities above would hold without settling anything."""
    plainest = [Req(sampling_seed=1000 + i, **SAMPLING[i % len(SAMPLING)]) for i in range(10)]
    run_plain(plainest, HashModel(), sampler, STEPS)
    differs = [a != b for a, b in zip(outputs(plain[0]), outputs(plainest), strict=True)]
    assert differs == [bool(p) for p in PENALTIES]
    assert all(EOS not in outputs(plain[0])[i][:16] for i in (6,))
    assert EOS in outputs(plain[0])[6][16:]
    assert EOS not in outputs(plain[0])[8]


def test_stock_penalty_vector_is_not_exact(plain, sampler, monkeypatch):
    """Negative control: one vector for all rows of a request, as stock verification uses."""
    apply = penalties._apply_to_request

    def without_drafts(logits, req, drafts, first_depth):
        for row in range(logits.shape[0]):
            apply(logits[row : row + 1], req, [], 0)

    monkeypatch.setattr(penalties, "_apply_to_request", without_drafts)
    reqs = make_reqs()

    def drafter(req, prefix, drafts):
        return HashModel()(prefix + drafts)

    run_drafted(reqs, HashModel(), drafter, sampler, STEPS, 4)
    pairs = zip(outputs(reqs), outputs(plain[0]), strict=True)
    wrong = [i for i, (got, expected) in enumerate(pairs) if got != expected]
    assert len(wrong) >= 4
    assert all(PENALTIES[i] for i in wrong)


def test_wrong_positions_are_not_exact(plain, sampler):
    """Negative control: the noise of a token belongs to its position."""
    truth = list(plain[0][1].output_ids)  # temperature 0.8
    req = make_reqs()[1]
    batch = Batch([req])
    req.output_ids.extend(truth[:1])
    model = HashModel()
    drafts = [truth[1:9]]
    rows = [model(req.prefix + drafts[0][:d]) for d in range(9)]
    right = RowLayout.build(drafts, [True], [3], "cpu")
    assert settle(torch.stack(rows), right, batch, sampler).accept_len == [9]
    off_by_one = RowLayout.build(drafts, [True], [4], "cpu")
    assert settle(torch.stack(rows), off_by_one, batch, sampler).accept_len != [9]


def test_retracted_request_keeps_its_penalties(plain, sampler):
    """A retracted request is prefilled with its output: the next token is still plain's."""
    model = HashModel()
    for known in plain[0]:
        req = make_reqs()[plain[0].index(known)]
        req.output_ids.extend(known.output_ids[:20])
        log = run_plain([req], model, sampler, STEPS - 20)
        assert list(req.output_ids) == list(known.output_ids[:STEPS])
        assert log[req] == plain[1][known][20:STEPS]


def test_restored_penalizers_equal_advanced_ones(plain):
    for known in plain[0]:
        reqs = [Req(frequency_penalty=0.3), make_reqs()[plain[0].index(known)]]
        advanced = Batch(reqs).sampling_info.penalizer_orchestrator
        for token in known.output_ids:
            advanced.cumulate_output_tokens(torch.tensor([token, token]))
        for req in reqs:
            req.output_ids.extend(known.output_ids)
        restored = Batch(reqs).sampling_info.penalizer_orchestrator
        for kind, penalizer in advanced.penalizers.items():
            for name, value in vars(penalizer).items():
                if torch.is_tensor(value):
                    assert torch.equal(value, getattr(restored.penalizers[kind], name)), name


def test_draft_only_batch_and_lengths(sampler):
    reqs = [Req(temperature=0), Req(temperature=0, return_logprob=True)]
    for req in reqs:
        req.output_ids.append(9)
    batch = Batch(reqs)
    layout = RowLayout.build([[], [4, 5]], [False, False], [3, 3], "cpu")
    assert layout.positions.tolist() == [3, 5]
    assert layout.spans == [(0, 1), (1, 2)]
    settled = settle(torch.randn(2, VOCAB), layout, batch, sampler)
    assert settled.accept_len == [0, 0]
    assert [len(run) for run in settled.tokens] == [1, 1]
    assert settled.logprobs is None

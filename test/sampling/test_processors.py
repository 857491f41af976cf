"""Custom logit processors: once per committed position, as in plain decoding (case P6)."""

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sampling.fakes import VOCAB, Req
from sampling.loops import HashModel, run_drafted, run_plain

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 40
CALLS: list[tuple[str, int, list[int]]] = []


class Spy(CustomLogitProcessor):
    """Notes every call and biases by how often it has been called and by the output so far."""

    def __init__(self):
        self.calls = {}

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            req = params["__req__"]
            CALLS.append((req.rid, len(req.output_ids), list(req.output_ids)))
            seen = self.calls[req.rid] = self.calls.get(req.rid, 0) + 1
            logits[row, (seen * 37 + sum(req.output_ids)) % VOCAB] += params["strength"]
            logits[row, 3] = -float("inf")
        return logits


def make_reqs(processor):
    shapes = [
        {"temperature": 0},
        {"temperature": 0.9, "frequency_penalty": 0.4, "top_logprobs_num": 2},
        {"temperature": 1.0, "top_p": 0.9, "processor": None},
        {"temperature": 1.1, "min_p": 0.05, "min_new_tokens": 9, "return_logprob": True},
        {"temperature": 0, "processor": None, "return_logprob": True},
    ]
    reqs = []
    for i, shape in enumerate(shapes):
        shape = {"processor": processor, "custom_params": {"strength": 6.0}} | shape
        reqs.append(Req(sampling_seed=i, **shape))
    return reqs


def calls_of(reqs):
    """Per request: the outputs its processor saw, in order."""
    return [[seen for rid, _, seen in CALLS if rid == req.rid] for req in reqs]


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("error", [0.3, 3.0])
def test_processor_runs_once_per_committed_position(sampler, k, error):
    processor = Spy.to_str()
    plain, plain_log = make_reqs(processor), {}
    for req in plain:
        plain_log |= run_plain([req], HashModel(), sampler, STEPS)
    reqs = make_reqs(processor)
    CALLS.clear()
    truth = {req: list(known.output_ids) for req, known in zip(reqs, plain, strict=True)}
    compressed = HashModel(error=error)

    def drafter(req, prefix, drafts):
        at = len(prefix) - 3 + len(drafts)
        if req.custom_logit_processor and at < STEPS:
            # Drafting rows are not processed; a script stands for a view that foresees it.
            return (truth[req][at] + (at % 5 == 0)) % VOCAB
        return compressed(prefix + drafts)

    log, accepted = run_drafted(reqs, HashModel(), drafter, sampler, STEPS, k)
    assert max(accepted) > 1
    for req, known in zip(reqs, plain, strict=True):
        assert log[req][:STEPS] == plain_log[known][:STEPS]
        outputs = list(req.output_ids)
        seen = next(iter(calls_of([req])))
        if req.custom_logit_processor is None:
            assert seen == []
        else:
            assert seen == [outputs[:n] for n in range(len(outputs))]
            assert 3 not in outputs


def test_processor_has_an_effect(sampler):
    without, with_it = make_reqs(None), make_reqs(Spy.to_str())
    for reqs in (without, with_it):
        run_plain(reqs, HashModel(), sampler, STEPS)
    differs = [a.output_ids != b.output_ids for a, b in zip(without, with_it, strict=True)]
    assert differs == [True, True, False, True, False]


def test_no_call_behind_the_end(sampler):
    """A run that crosses max_new_tokens or an EOS is not processed behind it."""
    from sampling.fakes import Batch
    from sglang_vericache.sampling.settle import RowLayout, settle

    processor = Spy.to_str()
    for shape, expected in (
        ({"max_new_tokens": 4}, 3),
        ({"stop_token_ids": [50]}, 2),
        ({"stop_token_ids": [50], "ignore_eos": True}, 6),
    ):
        req = Req(temperature=0, processor=processor, custom_params={"strength": 0.0}, **shape)
        req.output_ids.append(20)
        batch = Batch([req])
        drafts = [40, 50, 60, 70, 80]
        logits = torch.zeros(6, VOCAB)
        logits[range(6), [*drafts, 90]] = 9.0
        CALLS.clear()
        layout = RowLayout.build([drafts], [True], [3], "cpu")
        settled = settle(logits, layout, batch, sampler)
        assert settled.accept_len == [expected]
        assert settled.tokens == [[*drafts, 90][:expected]]
        assert len(CALLS) == expected
        assert list(req.output_ids) == [20]

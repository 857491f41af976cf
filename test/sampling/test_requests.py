"""What is refused (case P3), and seeds of requests that bring none (case P9)."""

from types import SimpleNamespace

import pytest

from sampling.fakes import Batch, Req
from sglang_vericache.sampling.requests import assign_seed, check_supported, seed_of

CONFIG = SimpleNamespace(mode="off")


def make_request(params=None, **fields):
    return SimpleNamespace(sampling_params=params, **fields)


@pytest.mark.parametrize(
    "name",
    [
        "return_hidden_states",
        "return_sampling_mask",
        "return_routed_experts",
        "return_indexer_topk",
        "return_entropy",
        "watermark",
    ],
)
def test_unsupported_field_is_named(name):
    with pytest.raises(ValueError, match=rf"^{name}: not supported with --vericache off"):
        check_supported(make_request({}, **{name: True}), CONFIG)
    check_supported(make_request({}, **{name: None}), CONFIG)
    check_supported(make_request({}, **{name: False}), CONFIG)


def test_beam_search_and_watermark_in_params():
    for params in ({"beam_width": 2}, {"watermark": {"enabled": True}}):
        with pytest.raises(ValueError, match=next(iter(params))):
            check_supported(make_request(params), CONFIG)
    check_supported(make_request({"beam_width": 1}), CONFIG)
    with pytest.raises(ValueError, match="beam_width"):
        check_supported(make_request(Req(beam_width=3).sampling_params), CONFIG)


def test_everything_settled_is_accepted():
    check_supported(make_request(None), CONFIG)
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": 1,
        "repetition_penalty": 1.1,
        "min_new_tokens": 3,
        "logit_bias": {"1": 2.0},
        "json_schema": "{}",
        "stop": ["a"],
        "n": 3,
        "sampling_seed": 4,
        "custom_params": {"thinking_budget": 3, "vericache": {"enabled": False}},
    }
    fields = {"return_logprob": True, "top_logprobs_num": 4, "custom_logit_processor": "x"}
    check_supported(make_request(params, **fields), CONFIG)


def test_sglang_knows_the_fields_that_are_refused():
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_vericache.sampling import requests

    assert set(requests._UNSUPPORTED_FIELDS) <= set(GenerateReqInput.__dataclass_fields__)
    assert "beam_width" in SamplingParams.__struct_fields__


def test_assigned_seeds_are_independent():
    shared = Req(n=3).sampling_params
    samples = [SimpleNamespace(sampling_params=shared) for _ in range(3)]
    for sample in samples:
        assign_seed(sample)
    seeds = [sample.sampling_params.sampling_seed for sample in samples]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert shared.sampling_seed is None
    seeded = Req(sampling_seed=-5)
    assign_seed(seeded)
    assert seeded.sampling_params.sampling_seed == -5


def test_batches_carry_the_seed_of_every_request():
    reqs = [Req(sampling_seed=-(2**63)), Req(sampling_seed=2**63 - 1), Req(), Req()]
    seeds = Batch(reqs).sampling_info.sampling_seed.tolist()
    assert seeds[:2] == [-(2**63), 2**63 - 1]
    assert seeds[2] != seeds[3]
    assert seeds == Batch(reqs).sampling_info.sampling_seed.tolist() == [seed_of(r) for r in reqs]
    assert all(0 <= seed < 2**63 for seed in seeds[2:])

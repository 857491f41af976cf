"""Requests on their way through SGLang's tokenizer manager."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.requests import Request

from sglang_vericache.config import VeriCacheConfig, attach
from sglang_vericache.entrypoints import admission


def manager(config):
    server_args = SimpleNamespace()
    if config is not None:
        attach(server_args, config)
    return SimpleNamespace(server_args=server_args, model_config=SimpleNamespace(vocab_size=100))


ON, OFF, STOCK = manager(VeriCacheConfig()), manager(VeriCacheConfig(mode="off")), manager(None)


def tokenized(**params):
    return TokenizedGenerateReqInput(
        input_text="",
        input_ids=[1],
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(**params),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


def admit(server, request=None, **fields):
    obj = GenerateReqInput(text="", sampling_params={}, **fields)
    admission.admit(request or tokenized(), server, obj)


@pytest.mark.parametrize("server", [ON, OFF])
def test_options_are_checked(server):
    admit(server, tokenized(custom_params={"vericache": {"enabled": False}}))
    admit(server, tokenized(custom_params={"thinking_budget": 3}))
    admit(server)
    with pytest.raises(ValueError, match="enabeld"):
        admit(server, tokenized(custom_params={"vericache": {"enabeld": False}}))


@pytest.mark.parametrize("server", [ON, OFF])
@pytest.mark.parametrize("name", ["return_hidden_states", "return_entropy"])
def test_unsupported_parameter_is_named(server, name):
    with pytest.raises(ValueError, match=name):
        admit(server, **{name: True})


@pytest.mark.parametrize("token", [-1, 100])
def test_prompt_ids_outside_the_vocabulary_are_refused(token):
    request = tokenized()
    request.input_ids = [1, 99, token]
    with pytest.raises(ValueError, match=f"input_ids: token {token} "):
        admit(ON, request)


@pytest.mark.parametrize("top_k", [2**30 + 1, 2**63 - 1])
def test_a_top_k_of_more_than_32_bits_is_refused(top_k):
    """Stock makes it a tensor of int32, which ends the scheduler."""
    admit(ON, tokenized(top_k=-1))
    with pytest.raises(ValueError, match=f"top_k must be in 1..{2**30}, not {top_k}"):
        admit(ON, tokenized(top_k=top_k))


@pytest.mark.parametrize("n", [0, admission.MAX_SAMPLES + 1])
def test_too_many_samples_are_refused(n):
    admit(ON, tokenized(n=admission.MAX_SAMPLES))
    with pytest.raises(ValueError, match=f"n must be in 1..{admission.MAX_SAMPLES}, not {n}"):
        admit(ON, tokenized(n=n))


@pytest.mark.parametrize("num", [-1, 101])
def test_more_logprobs_than_tokens_are_refused(num):
    request = tokenized()
    request.top_logprobs_num = 100
    admit(ON, request)
    request.top_logprobs_num = num
    with pytest.raises(ValueError, match=f"top_logprobs_num must be in 0..100, not {num}"):
        admit(ON, request)


def test_inert_on_a_stock_server():
    request = tokenized(custom_params={"vericache": {"enabeld": False}})
    admit(STOCK, request, return_hidden_states=True)
    admission.seed_one(STOCK, request)
    assert request.sampling_params.sampling_seed is None


def test_other_requests_pass():
    admission.admit(SimpleNamespace(sampling_params=None), ON, None)
    admission.seed_one(ON, SimpleNamespace(sampling_params=None))


def test_every_unseeded_sample_gets_its_own_seed():
    shared = SamplingParams(temperature=1.0)
    samples = [tokenized() for _ in range(4)]
    for sample in samples:
        sample.sampling_params = shared
        admission.seed_one(ON, sample)
    batch = [tokenized() for _ in range(4)]
    admission.seed_batch(ON, batch)
    seeds = {sample.sampling_params.sampling_seed for sample in samples + batch}
    assert len(seeds) == 8 and None not in seeds
    assert shared.sampling_seed is None


def test_a_given_seed_is_kept():
    request = tokenized(sampling_seed=0)
    admission.seed_one(ON, request)
    assert request.sampling_params.sampling_seed == 0


class Serving:
    """Stands in for SGLang's OpenAI serving classes."""

    def __init__(self, server):
        self.tokenizer_manager = server

    def create_error_response(self, message):
        return message

    def handle(self, body, custom_params=None):
        async def original(serving, request, raw_request):
            return request.custom_params

        async def receive():
            return {"type": "http.request", "body": json.dumps(body).encode()}

        raw = Request({"type": "http", "headers": []}, receive)
        request = SimpleNamespace(custom_params=custom_params)
        return asyncio.run(admission.take_extra_body(original, self, request, raw))


def test_extra_body_of_openai_clients():
    asked = {"enabled": False}
    assert Serving(ON).handle({"vericache": asked}) == {"vericache": asked}
    merged = Serving(ON).handle({"vericache": asked}, {"thinking_budget": 3})
    assert merged == {"vericache": asked, "thinking_budget": 3}
    assert Serving(ON).handle({"vericache": None}, None) == {"vericache": None}
    assert Serving(ON).handle({}, None) is None
    assert "twice" in Serving(ON).handle({"vericache": asked}, {"vericache": asked})
    assert Serving(STOCK).handle({"vericache": asked}) is None

"""The promise on one server, in about a minute: drafting changes no token and no logprob bit."""

import pytest

from server.comparing import difference, plain
from server.harness import Ask
from server.specs import DRAFTING
from sglang_vericache.embedded_model import ensure_embedded_model

TOKENS = 24
SAMPLING = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "sampling_seed": 7},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 3},
    "penalties": {
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
        "min_new_tokens": 16,
    },
}
VIEWS = ({"compressor": "snapkv"}, {"compressor": "streaming"}, {"compressor": "random-kv"})

pytestmark = [pytest.mark.slow, pytest.mark.server(DRAFTING["bfloat16"])]


@pytest.fixture(scope="module")
def prompt(make_corpus):
    return tuple(make_corpus().prompt(1800))


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view["compressor"])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_drafting_changes_nothing(server, prompt, sampling, view):
    expected = server.answer(Ask(prompt, TOKENS, {"enabled": False}, sampling))
    found = server.answer(Ask(prompt, TOKENS, view | {"draft_len": 6}, sampling))
    assert expected.drafted == 0 and found.drafted >= 6
    assert len(expected.logprobs) == len(expected.ids) > 0
    assert difference(found, expected) is None


def test_neighbours_change_nothing(server, prompt):
    asks = [
        Ask(prompt[: 600 * (i + 1)], TOKENS, {"draft_len": 1 + 3 * i}, sampling)
        for i, sampling in enumerate(list(SAMPLING.values())[:3])
    ]
    together = server.concurrently(asks)
    for ask, found in zip(asks, together, strict=True):
        assert difference(found, server.answer(ask)) is None


def test_unverified_output_differs(server, prompt):
    """The negative control: with a poor view the drafts alone are not the full output."""
    full = server.answer(Ask(prompt, TOKENS, {"enabled": False}))
    lossy = server.answer(Ask(prompt, TOKENS, {"unverified": True, "compressor": "random-kv"}))
    assert difference(lossy, full) is not None


@pytest.mark.parametrize(
    "vericache",
    [{"ratio": -1}, {"ratio": 2}, {"draft_len": 1000}, {"compressor": "nope"}, {"nope": 1}, []],
)
def test_bad_options_are_refused_by_name(server, prompt, vericache):
    body = Ask(prompt[:50], 4).body()
    body["sampling_params"]["custom_params"] = {"vericache": vericache}
    response = server.post("/generate", body)
    assert response.status_code == 400
    assert "vericache" in response.text


@pytest.mark.parametrize("token", [-1, 1_000_000])
def test_ids_outside_the_vocabulary_are_refused(server, token):
    response = server.post("/generate", Ask((token,), 4).body())
    assert response.status_code == 400, response.text
    assert "input_ids" in response.text


def test_updated_weights_are_used(server, prompt, other_weights):
    """Kernels read packed copies of the weights, which must follow an update in place."""
    ask = Ask(prompt[:400], 12, {"draft_len": 4})
    before = server.answer(ask)
    try:
        server.update_weights(other_weights)
        after = server.answer(ask)
        assert difference(after, before) is not None
        assert difference(after, server.answer(plain(ask))) is None
    finally:
        server.update_weights(ensure_embedded_model())
    assert difference(server.answer(ask), before) is None


def test_nothing_leaks(server):
    server.check_idle()

"""The promise on one server, in about a minute: drafting changes no token and no logprob bit."""

import pytest

from server.comparing import difference
from server.harness import Ask
from server.specs import DRAFTING

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
    plain = server.answer(Ask(prompt, TOKENS, {"enabled": False}, sampling))
    drafted = server.answer(Ask(prompt, TOKENS, view | {"draft_len": 6}, sampling))
    assert plain.drafted == 0 and drafted.drafted >= 6
    assert len(plain.logprobs) == len(plain.ids) > 0
    assert difference(drafted, plain) is None


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


def test_nothing_leaks(server):
    server.check_idle()

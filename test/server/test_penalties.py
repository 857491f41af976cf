"""Penalties, biases, processors and refusals count committed tokens only (cases P1-P6)."""

import json

import pytest
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from server.harness import Ask, RequestFailed
from server.serving import CHAT_EOS, EOS, SERVING, alternate, assert_same

pytestmark = pytest.mark.server(SERVING)
PENALTIES = (
    {"frequency_penalty": 0.7},
    {"presence_penalty": 0.4},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
)


def test_penalties_equal_plain_decoding(server, without_drafts, make_corpus):
    """P1 and P4: alone and mixed, half of the drafts garbage.

    A logprob shifts with the count of every token, so equal bits mean equal counts.
    """
    prompts = make_corpus().prompts(2, 60)
    settings = [(tuple(p), penalty) for p in prompts for penalty in ({}, *PENALTIES)]
    asks = [
        Ask(prompt, 40, vericache, penalty, {"top_logprobs_num": 20})
        for (prompt, penalty), vericache in zip(
            settings, alternate(len(settings), draft_len=6), strict=True
        )
    ]
    found, expected = server.concurrently(asks), without_drafts.answers(asks)
    assert_same(found, expected, asks)
    tops = [[a.meta["output_top_logprobs"] for a in each] for each in (found, expected)]
    assert tops[0] == tops[1]
    for start in (0, 5):
        assert all(a.logprobs != found[start].logprobs for a in found[start + 1 : start + 5])


def test_counts_are_those_of_committed_tokens(server, make_corpus):
    """P4, by arithmetic: a penalty too small to change a token shifts its logprob by its count."""
    prompt = tuple(make_corpus().prompt(60)) * 2
    penalty, probe = 1e-2, [0]
    fields = {"token_ids_logprob": probe}
    asked = [
        Ask(prompt, 40, {"compressor": "random-kv", "draft_len": 6}, sampling, fields)
        for sampling in ({}, {"frequency_penalty": penalty})
    ]
    free, bound = server.concurrently(asked)
    assert free.accepted < free.drafted and bound.accepted < bound.drafted
    pairs = zip(free.ids, bound.ids, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), 40)
    assert same >= 10, "the penalty changed the text at once"

    def gaps(answer):
        probes = answer.meta["output_token_ids_logprobs"]
        return [v - p[0][0] for v, p in zip(answer.logprobs, probes, strict=True)]

    # The normaliser cancels in the gap to a token that never occurs (id 0).
    assert probe[0] not in free.ids
    shifts = [a - b for a, b in zip(gaps(free), gaps(bound), strict=True)][:same]
    counts = [free.ids[:i].count(token) for i, token in enumerate(free.ids[:same])]
    assert max(counts) > 0, "no token came twice"
    assert [round(shift / penalty) for shift in shifts] == counts


def test_min_new_tokens_hold_back_eos(server, without_drafts, tokenizer):
    """P1: EOS is first allowed as token 17, behind 16 others, and was wanted before."""
    prompt = tuple(tokenizer.encode(f"Yes.{CHAT_EOS}\n" * 12 + "Yes", add_special_tokens=False).ids)
    sampling = {"ignore_eos": False}
    asks = [
        Ask(prompt, 24, vericache, {**sampling, **more})
        for more in ({}, {"min_new_tokens": 16}, {"min_new_tokens": 16, **PENALTIES[3]})
        for vericache in alternate(3, draft_len=8)
    ]
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    assert all(len(a.ids) < 5 and a.ids[-1] == EOS for a in found[:3])
    assert all(EOS not in a.ids[:16] for a in found[3:])


def test_frequency_penalty_matters(server, without_drafts, make_corpus):
    """P2: -2 and +2 differ from each other and equal plain decoding."""
    prompt = tuple(make_corpus().prompt(60))
    asks = [
        Ask(prompt, 40, vericache, {"frequency_penalty": value})
        for value in (-2.0, 2.0)
        for vericache in alternate(3)
    ]
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    assert found[0].ids != found[3].ids


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("hidden-states", {"return_hidden_states": True}),  # refused by SGLang itself
        ("return_sampling_mask", {"return_sampling_mask": True}),
        ("return_routed_experts", {"return_routed_experts": True}),
        ("return_indexer_topk", {"return_indexer_topk": True}),
        ("return_entropy", {"return_entropy": True}),
        ("unverified", {"sampling_params": {"custom_params": {"vericache": {"unverified": True}}}}),
        ("budget", {"sampling_params": {"custom_params": {"vericache": {"budget": 1}}}}),
        ("draft_len", {"sampling_params": {"custom_params": {"vericache": {"draft_len": 17}}}}),
        ("compressor", {"sampling_params": {"custom_params": {"vericache": {"compressor": "x"}}}}),
    ],
)
def test_what_is_not_honoured_is_refused(name, body, server):
    """P3: HTTP 400 with the name of the parameter, and the server goes on."""
    response = server.post("/generate", {"text": "Hello", **body})
    assert response.status_code == 400, response.text
    assert name in response.text


def test_logit_bias(server, without_drafts, make_corpus):
    """P5: -100 never, +100 always."""
    prompt = tuple(make_corpus().prompt(60))
    favourite = str(without_drafts.answers([Ask(prompt, 24)])[0].ids[3])
    asks = [
        Ask(prompt, 24, vericache, {"logit_bias": {favourite: value}})
        for value in (-100.0, 100.0)
        for vericache in alternate(3)
    ]
    found = server.concurrently(asks)
    expected = without_drafts.answers(asks)
    assert_same(found, expected, asks)
    assert all(int(favourite) not in a.ids for a in found[:3])
    assert all(set(a.ids) == {int(favourite)} for a in found[3:])


# Forbids one token and appends the length of the output to a file at every call. Run as if it were
# a main program, since that is what dill sends by value: the server does not know the tests.
SPY = """
class Spy(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            with open(params["path"], "a") as file:
                print(len(params["__req__"].output_ids), file=file)
            row[params["forbidden"]] = float("-inf")
        return logits
"""
_program = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor}
exec(SPY, _program)
Spy = _program["Spy"]


def test_a_processor_that_does_not_load_is_refused(server):
    """Stock's scheduler would end with the error."""
    text = json.dumps({"callable": "00"})
    body = Ask("Hello", 4, fields={"custom_logit_processor": text}).body()
    response = server.post("/generate", body)
    assert response.status_code == 400, response.text
    assert "custom_logit_processor" in response.text
    assert len(server.ask("Hello", 4).ids) == 4


def test_a_processor_sees_every_committed_position_once(
    server, without_drafts, make_corpus, tmp_path
):
    """P6: in order, no position skipped, none of a rejected draft."""
    prompt = tuple(make_corpus().prompt(60))
    forbidden = without_drafts.answers([Ask(prompt, 24)])[0].ids[3]
    found = []
    options = [{"enabled": False}, *alternate(3, draft_len=8)]
    for i, vericache in enumerate(options):
        path = tmp_path / str(i)
        params = {"path": str(path), "forbidden": forbidden, "vericache": vericache}
        ask = Ask(prompt, 24, None, {"custom_params": params},
                  {"custom_logit_processor": Spy.to_str()})  # fmt: skip
        found.append(server.answer(ask))
        assert path.read_text().split() == [str(n) for n in range(24)], vericache
    assert_same(found[1:], found[:1] * 3, [ask] * 3)
    assert forbidden not in found[0].ids


def test_parameters_of_the_wrong_kind_are_refused(server):
    """P3: the answer says what is wrong; nothing is decoded with another value."""
    for sampling in ({"temperature": -1}, {"top_p": 2}, {"no_such_parameter": 1}):
        body = {"text": "Hello", "sampling_params": {"max_new_tokens": 4, **sampling}}
        response = server.post("/generate", body)
        assert response.status_code == 400, response.text
        assert next(iter(sampling)) in json.dumps(response.json())


def test_refusals_leave_requests_beside_them_alone(server):
    """One bad request in a stream of good ones."""
    with pytest.raises(RequestFailed):
        server.ask("Hello", vericache={"ratio": -1})
    assert len(server.ask("Hello", 4).ids) == 4

"""What must make the comparison fail does (case E5), and drafts spoilt on purpose (K5, Z1).

The server carries the plugin of ``saboteur/``, which acts on requests with certain ids.
"""

import json
from dataclasses import replace

import pytest

from server.comparing import assert_identical, difference
from server.harness import Ask
from server.specs import DRAFTING, SABOTEUR_PATH

SABOTEUR = replace(DRAFTING["bfloat16"], env=(("PYTHONPATH", SABOTEUR_PATH),))
MARK = "saboteur:"
pytestmark = pytest.mark.server(SABOTEUR)


def reports(server, rid):
    lines = server.process.log.read_text(errors="replace").splitlines()
    found = [json.loads(line.split(MARK, 1)[1]) for line in lines if MARK in line]
    return [report for report in found if report["rid"] == rid]


@pytest.mark.parametrize("draft_len", [0, 4])
def test_one_perturbed_k_row_is_noticed(draft_len, server, off, make_corpus):
    prompt = tuple(make_corpus().prompt(300))
    ask = Ask(prompt, 16, {"draft_len": draft_len})
    expected = off["bfloat16"].answers([ask])
    assert_identical([server.answer(ask)], expected)
    spoilt = server.answer(replace(ask, fields={"rid": f"perturb-{draft_len}"}))
    assert difference(spoilt, expected[0]) is not None
    server.flush()  # the perturbed row is in the prefix cache
    assert_identical([server.answer(ask)], expected)


def test_lossy_output_is_noticed(server, off, make_corpus):
    """Were unverified drafts let through, the comparison would tell."""
    asks = [Ask(tuple(p), 24, {"unverified": True}) for p in make_corpus().prompts(4, 500)]
    found, expected = server.concurrently(asks), off["bfloat16"].answers(asks)
    assert all(difference(a, b) is not None for a, b in zip(found, expected, strict=True))


def test_one_other_token_is_noticed(server, off, make_corpus):
    """A prompt that differs in one early token has other logprobs at every position."""
    prompt = tuple(make_corpus().prompt(300))
    other = (*prompt[:7], prompt[7] + 1, *prompt[8:])
    found, expected = server.ask(other, 16), off["bfloat16"].answers([Ask(prompt, 16)])
    assert difference(found, expected[0]) is not None


@pytest.mark.parametrize("compressor", ["identity", "snapkv"])
def test_every_partial_accept_leaves_a_clean_cache(compressor, server, off, make_corpus):
    """K5 and Z1: drafts are spoilt at every position in turn.

    With exact drafts the accepted count is then known: a row of a rejected draft seen by a later
    round would spoil a draft earlier than the script does.
    """
    draft_len, scripts = 6, ("0,1,2,3,4,5,6", "6,0,5,1,4,2,3", "3,3,0,6")
    prompts = make_corpus().prompts(len(scripts), 200)
    asks = [
        Ask(
            tuple(prompt),
            60,
            {"compressor": compressor, "draft_len": draft_len},
            fields={"rid": f"script-{script}-{compressor}"},
        )
        for prompt, script in zip(prompts, scripts, strict=True)
    ]
    found = server.concurrently(asks)
    assert_identical(found, off["bfloat16"].answers(asks))

    seen = set()
    for ask in asks:
        passes = reports(server, ask.fields["rid"])
        for step in passes:
            assert step["committed"] == step["sequence"] - 1
            assert step["tail_end"] == step["committed"] + step["drafts"] + 1
            verifies = step["accepted"] >= 0
            # A row stands where its token does in the text, however little its view lists.
            assert step["position"] == step["committed"] + (0 if verifies else step["drafts"])
            assert step["tail_start"] == (0 if verifies else step["view_length"])
            if not verifies:
                continue
            assert step["accepted"] <= min(step["wrong_at"], step["drafts"])
            if compressor == "identity":
                assert step["accepted"] == min(step["wrong_at"], step["drafts"])
            seen.add((step["accepted"], step["drafts"]))
        assert sum(step["accepted"] + 1 for step in passes if step["accepted"] >= 0) == 59
    assert {(a, draft_len) for a in range(draft_len + 1)} <= seen or compressor != "identity"

"""``benchmark/fidelity.py``: its controls come out as they must, and so do its sums."""

from pathlib import Path

import pytest
import torch

import fidelity
import prompts
from _fidelity import Outcome, chains, choose, measure, summary, survival
from _fidelity_tasks import TASKS, TaskTexts
from _offline import Chain, OfflineModel, _visible, per_head
from sglang_vericache.compressors import Settings, create
from sglang_vericache.core import DraftView
from sglang_vericache.embedded_model import ensure_embedded_model

PROMPT, TEXT = 400, 24


@pytest.fixture(scope="module")
def reference():
    """The embedded model, and a prompt of source with its greedy text."""
    path = ensure_embedded_model()
    model = OfflineModel(path)
    ids = prompts.load_tokenizer(path).encode(prompts.source("tarfile")).ids[:PROMPT]
    layers, first = model.prefill(ids, query_rows=16)
    found = model.reference(layers, model.continue_greedily(layers, first, TEXT))
    assert found.length == PROMPT and found.rows == TEXT
    return model, found


def outcome(reference, method, ratio, refresh=False):
    settings = Settings(ratio=ratio, min_tokens=0)
    return measure(*reference, create(method, settings), settings.budget, {}, refresh)


def figures(reference, method, ratio):
    return summary([outcome(reference, method, ratio)])


@pytest.mark.slow
def test_controls_and_order_of_methods(reference):
    full = figures(reference, "identity", 1)
    assert full["agreement"] == full["identical_unverified"] == full["kv_share"] == 1
    assert full["accepted_8"] == 8 and full["kl"] < 1e-5
    assert full["kv_bytes"] == PROMPT * 2 * 3 * 64 * 2 * 30

    packed = figures(reference, "int8", 1)
    assert packed["kv_bytes"] == PROMPT * 2 * 3 * (64 + 4) * 30
    assert 0 < packed["kl"] < 0.02

    good, bad = (figures(reference, method, 0.02) for method in ("snapkv", "random-kv"))
    assert good["kv_bytes"] == bad["kv_bytes"] == full["kv_bytes"] / 50
    assert bad["agreement"] < good["agreement"] < 1 and bad["kl"] > good["kl"] > packed["kl"]
    assert bad["identical_unverified"] == 0


@pytest.mark.slow
def test_one_pass_tells_what_decoding_from_the_view_would(reference):
    """Token by token, each row fed the draft's own tokens, up to the first wrong one."""
    model, found = reference
    settings = Settings(ratio=0.05, min_tokens=0)
    dropper = create("snapkv-per-head", settings)
    view = choose(dropper, found.prompt, settings.budget, {}, model.rotary)
    right = 0
    while right < found.rows:
        logits = model.draft(found, [(view, [Chain(0, right + 1)])])
        if int(logits[-1].argmax()) != found.tokens[right + 1]:
            break
        right += 1
    assert 0 < right < found.rows
    assert outcome(reference, "snapkv-per-head", 0.05).unverified == right


@pytest.mark.slow
def test_refresh_chooses_from_verified_text(reference):
    once, anew = (outcome(reference, "snapkv", 0.05, refresh) for refresh in (False, True))
    assert len(once.drafts) == len(anew.drafts) == 2
    assert once.drafts[0] == anew.drafts[0] and once.kl != anew.kl
    fixed = [outcome(reference, "streaming", 0.05, refresh) for refresh in (False, True)]
    assert fixed[0] == fixed[1]


def test_lists_of_different_lengths():
    even, uneven = torch.tensor([[1, 4, 6]]), torch.tensor([[1, 4, 6], [2, 2, 2]])
    view = DraftView((even, uneven), 7, ((3,), (3, 1)))
    assert [rows.tolist() for rows in per_head(view, 0, 2)] == [[1, 4, 6]] * 2
    assert [rows.tolist() for rows in per_head(view, 1, 2)] == [[1, 4, 6], [2]]


def test_rows_see_verified_text_before_their_draft_and_their_own_draft():
    seen = _visible([Chain(0, 2), Chain(1, 2)], viewed=0, tail=3)
    assert seen.int().tolist() == [
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1, 1],
    ]
    assert _visible([Chain(1, 1)], viewed=1, tail=3).int().tolist() == [[0, 0, 0, 1]]


def test_expected_accepted_tokens():
    assert survival([[True, True], [True, False]], 2) == [1, 0.5]
    assert survival([[False, True], [False, True]], 2) == [0, 0]
    # The end of the text cut one draft off, so only the other tells about its second token.
    assert survival([[True], [True, False]], 2) == [1, 0]
    assert survival([[True], [True]], 2) == [1]
    assert chains(40) == [Chain(0, 16), Chain(16, 16), Chain(32, 8)]


def test_table_and_rows_of_several_runs():
    outcomes = [Outcome([[True] * 16], [0.5] * 16, 16, 16, 10, 100)]
    row = {"task": "code", "method": "snapkv", "budget": 0.1} | summary(outcomes)
    assert row["accepted_16"] == 16 and row["identical_unverified"] == 1
    line = "| snapkv | 10% | 0.00 MB | 0.100 | 1.000 | 8.0 | 16.0 | 100% | 0.500 |"
    assert fidelity.table([row]).splitlines()[-1] == line
    other, again = row | {"task": "needle"}, row | {"kl": 0.1}
    assert fidelity._replaced([other, row], [again]) == [again, other]


def test_a_needle_is_in_its_prompt(tmp_path: Path):
    from transformers import AutoTokenizer

    texts = TaskTexts(AutoTokenizer.from_pretrained(ensure_embedded_model()))
    for task in TASKS:
        (case,) = texts.cases(task, 1, 300)
        assert 300 <= len(case.ids) < 600
        assert (case.fact is not None) == (task == "needle")
        assert not case.fact or texts.decode(case.ids).count(case.fact) == 1

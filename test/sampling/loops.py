"""Plain decoding and drafted decoding of the same requests over a model made of hashes."""

import functools
import hashlib
import random
from collections import defaultdict

import torch

from sampling.fakes import EOS, VOCAB, Batch, Req, plain_step, record_logprobs


class HashModel:
    """Logits as a pure function of the prefix, with the ties that bf16 gives a real model.

    Args:
        error: standard deviation of the difference to the model with ``error=0``: a compressed
            view of the same context.
    """

    def __init__(self, vocab: int = VOCAB, error: float = 0.0, favourite: int | None = EOS):
        self.vocab = vocab
        self.error = error
        self.favourite = favourite

    def __call__(self, prefix: list[int]) -> torch.Tensor:
        logits = self._noise(prefix, "target") * 2.5
        if self.favourite is not None:
            logits[self.favourite] += 4  # often the best token: penalties have something to do
        logits[prefix[-1]] += 3
        if self.error:
            logits += self._noise(prefix, "error") * self.error
        return logits.bfloat16().float()

    def _noise(self, prefix: list[int], salt: str) -> torch.Tensor:
        return _noise_of(f"{salt} {list(prefix)}", self.vocab)


@functools.lru_cache(maxsize=400)
def _noise_of(text: str, vocab: int) -> torch.Tensor:
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(vocab, generator=generator)


def run_plain(reqs: list[Req], model, sampler, steps: int) -> dict:
    """Decode ``steps`` tokens of every request plainly; what each was told, per request."""
    log = defaultdict(list)
    batch = Batch(reqs, model.vocab)
    for step in range(steps):
        logits = torch.stack([model(req.prefix) for req in reqs])
        tokens, output = plain_step(batch, logits, sampler, prefill=step == 0)
        for i, (req, token) in enumerate(zip(reqs, tokens, strict=True)):
            value = float(output.next_token_logprobs[i]) if req.return_logprob else None
            record_logprobs(log, req, output, i, token, value)
            _append(req, token)
    return log


def run_drafted(
    reqs: list[Req],
    model,
    drafter,
    sampler,
    steps: int,
    k: int,
    check=None,
    seed: int = 0,
    prober=None,
) -> tuple[dict, list[int]]:
    """Decode with staggered drafting and verification.

    Args:
        drafter: called with a request, its committed prefix and its drafts so far; returns the
            logits of the drafting row, or a token id to draft without sampling.
        check: called after every iteration with the requests.
        prober: called with a request and its drafts; returns tokens that the draft pass checks.

    Returns:
        What each request was told, and the accepted lengths of all verifications.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from sglang_vericache.sampling.settle import RowLayout, settle, write_logprobs

    rng = random.Random(seed)
    log = defaultdict(list)
    accepted = []
    batch = Batch(reqs, model.vocab)
    logits = torch.stack([model(req.prefix) for req in reqs])
    tokens, output = plain_step(batch, logits, sampler, prefill=True)
    for i, (req, token) in enumerate(zip(reqs, tokens, strict=True)):
        value = float(output.next_token_logprobs[i]) if req.return_logprob else None
        record_logprobs(log, req, output, i, token, value)
        _append(req, token)

    drafts = [[] for _ in reqs]
    targets = [rng.choice([k, rng.randint(0, k)]) for _ in reqs]
    while min(len(req.output_ids) for req in reqs) < steps:
        verifying = [len(d) >= target for d, target in zip(drafts, targets, strict=True)]
        scripted = {}
        probes = [[] for _ in reqs]
        rows = []
        for i, (req, verifies) in enumerate(zip(reqs, verifying, strict=True)):
            if verifies:
                rows += [model(req.prefix + drafts[i][:d]) for d in range(len(drafts[i]) + 1)]
                continue
            if prober is not None and req.grammar is None:
                probes[i] = prober(req, drafts[i])[: targets[i] - len(drafts[i]) - 1]
            for d in range(len(probes[i])):
                rows.append(drafter(req, req.prefix, drafts[i] + probes[i][:d]))
            drafted = drafter(req, req.prefix, drafts[i] + probes[i])
            if isinstance(drafted, int):
                scripted[i] = drafted
                drafted = model(req.prefix + drafts[i])
            rows.append(drafted)
        lengths = [len(req.prefix) - 1 for req in reqs]
        layout = RowLayout.build(drafts, verifying, lengths, "cpu", probes)
        before = [req.output_ids[:] for req in reqs]
        settled = settle(torch.stack(rows), layout, batch, sampler)
        assert [req.output_ids for req in reqs] == before
        output = LogitsProcessorOutput(next_token_logits=None)
        write_logprobs(output, settled.logprobs, len(reqs), k + 1)
        for i, req in enumerate(reqs):
            if not verifying[i]:
                assert settled.accept_len[i] == 0
                run = settled.tokens[i]
                assert run[:-1] == probes[i][: len(run) - 1]
                drafts[i] = [*drafts[i], *([scripted[i]] if i in scripted else run)]
                continue
            accepted.append(settled.accept_len[i])
            assert len(settled.tokens[i]) == settled.accept_len[i]
            for offset, token in enumerate(settled.tokens[i]):
                value = float(output.next_token_logprobs[i, offset]) if req.return_logprob else None
                record_logprobs(log, req, output, i * (k + 1) + offset, token, value)
                _append(req, token)
            drafts[i] = []
            targets[i] = rng.choice([k, rng.randint(0, k)])
        if check is not None:
            check(reqs)
    return log, accepted


def _append(req: Req, token: int) -> None:
    req.output_ids.append(token)
    if req.grammar is not None and not req.grammar.is_terminated():
        req.grammar.accept_token(token)

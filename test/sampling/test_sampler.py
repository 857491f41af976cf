import random

import pytest
import torch

from sampling.fakes import VOCAB, Batch, Req
from sglang_vericache.sampling import filtering

KINDS = {
    "greedy": {"temperature": 0},
    "greedy with temperature": {"temperature": 0.6, "top_k": 1},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.9},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k and top_p": {"temperature": 1.3, "top_k": 50, "top_p": 0.7},
    "nearly all": {"temperature": 1.0, "top_p": 0.99999},
}
MIN_P = {"min_p": {"temperature": 1.1, "min_p": 0.05}}


def make_logits(rows, vocab=VOCAB, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    return logits.bfloat16().float() if ties else logits


def forward(sampler, reqs, logits, positions, vocab=VOCAB):
    """Token ids and, per request, everything it is told about its token."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    batch = Batch(reqs, vocab)
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    token_ids = sampler(
        output,
        batch.sampling_info,
        batch.return_logprob,
        batch.top_logprobs_nums,
        batch.token_ids_logprobs,
        torch.tensor(positions),
    )
    told = []
    for row, req in enumerate(reqs):
        entry = {}
        if req.return_logprob:
            entry["logprob"] = float(output.next_token_logprobs[row])
        if req.top_logprobs_num:
            entry["top"] = output.next_token_top_logprobs_val[row].tolist()
            entry["top ids"] = output.next_token_top_logprobs_idx[row].tolist()
        if req.token_ids_logprob is not None:
            entry["ids"] = output.next_token_token_ids_logprobs_val[row].tolist()
        told.append(entry)
    return token_ids.tolist(), told


def logprob_variants(i):
    return [
        {},
        {"return_logprob": True},
        {"top_logprobs_num": 1 + i % 7},
        {"token_ids_logprob": [i, 17, 300]},
        {"top_logprobs_num": 3, "token_ids_logprob": [5]},
    ][i % 5]


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def samplers(request, sampler, stock_sampler, monkeypatch):
    for module in (sampler, stock_sampler):
        monkeypatch.setattr(module, "enable_deterministic", request.param)
    return sampler, stock_sampler


@pytest.mark.parametrize("original_logprob", [False, True])
def test_row_equals_stock_sampler_alone(samplers, original_logprob, monkeypatch):
    from sglang.srt.layers import sampler as stock

    monkeypatch.setattr(stock, "SGLANG_RETURN_ORIGINAL_LOGPROB", original_logprob)
    rows, stock_rows = samplers
    kinds = list(KINDS.values()) * 10
    logits = make_logits(len(kinds))
    positions = [random.Random(i).randrange(10_000) for i in range(len(kinds))]

    def make(i):
        return Req(sampling_seed=i * 7919 - 300, **kinds[i], **logprob_variants(i))

    reqs = [make(i) for i in range(len(kinds))]
    token_ids, told = forward(rows, reqs, logits, positions)
    for i in range(len(kinds)):
        alone = forward(stock_rows, [make(i)], logits[i : i + 1], [positions[i]])
        assert (token_ids[i], told[i]) == (alone[0][0], alone[1][0]), kinds[i]
    assert len(set(token_ids)) > len(kinds) // 4


def test_stock_sampler_depends_on_neighbours(stock_sampler):
    """Negative control: what the row rules are for."""
    reqs = [Req(sampling_seed=i, **params) for i, params in enumerate(KINDS.values())] * 10
    logits, positions = make_logits(len(reqs)), list(range(len(reqs)))
    together, _ = forward(stock_sampler, reqs, logits, positions)
    alone = [
        forward(stock_sampler, [req], logits[i : i + 1], [positions[i]])[0][0]
        for i, req in enumerate(reqs)
    ]
    assert together != alone


def test_neighbours_do_not_matter(sampler):
    kinds = [*KINDS.values(), *MIN_P.values()]
    logits = make_logits(40, ties=True)
    reqs = [
        Req(sampling_seed=i, **kinds[i % len(kinds)], **logprob_variants(i))
        for i in range(len(logits))
    ]
    positions = list(range(100, 100 + len(reqs)))
    token_ids, told = forward(sampler, reqs, logits, positions)
    for trial in range(30):
        rng = random.Random(trial)
        rows = rng.sample(range(len(reqs)), rng.randint(1, 12))
        got = forward(sampler, [reqs[i] for i in rows], logits[rows], [positions[i] for i in rows])
        assert got[0] == [token_ids[i] for i in rows]
        assert got[1] == [told[i] for i in rows]


def test_min_p_with_a_seed(sampler):
    """Stock refuses the pair; the rule is its unseeded filter and its seeded draw."""
    from sglang.srt.layers.sampler import multinomial_with_seed

    for seed in range(50):
        req = Req(sampling_seed=seed, temperature=1.2, min_p=0.2, top_k=40)
        logits = make_logits(1, seed=seed)
        weights, order = torch.softmax(logits / 1.2, -1).sort(descending=True)
        weights[:, 40:] = 0
        weights[weights < weights[:, :1] * 0.2] = 0
        drawn = multinomial_with_seed(
            weights.double().log(), torch.tensor([seed]), torch.tensor([9])
        )
        assert forward(sampler, [req], logits, [9])[0] == [int(order[0, drawn])]


@pytest.mark.parametrize("params", [{"min_p": 1.0}, {"top_k": 1}], ids=str)
def test_degenerate_filters_mean_greedy(sampler, params):
    logits = make_logits(64, ties=True)
    logits[:, 100] = logits[:, 400] = logits.max() + 1  # tied: the lower id is greedy's
    reqs = [Req(temperature=1.0, sampling_seed=i, **params) for i in range(64)]
    assert forward(sampler, reqs, logits, list(range(64)))[0] == [100] * 64
    reqs = [Req(temperature=1.0, sampling_seed=i, min_p=0.99) for i in range(64)]
    assert set(forward(sampler, reqs, logits, list(range(64)))[0]) == {100, 400}


def test_seeds(sampler):
    logits = make_logits(1).repeat(32, 1)

    def run(seeds):
        reqs = [Req(temperature=1.9, sampling_seed=seed) for seed in seeds]
        return forward(sampler, reqs, logits, [50] * 32)[0]

    assert run(range(32)) == run(range(32))
    assert len(set(run([3] * 32))) == 1
    assert len(set(run([None] * 32))) > 8
    unseeded = Req(temperature=1.0)
    assert (
        forward(sampler, [unseeded], logits[:1], [4])[0]
        == forward(sampler, [Req(temperature=0), unseeded], logits[:2], [4, 4])[0][1:]
    )


def test_equal_logprobs_rank_by_token_id(sampler):
    logits = torch.zeros(2, VOCAB)
    logits[:, 300] = logits[:, 200] = 4.0
    reqs = [Req(temperature=0, top_logprobs_num=n) for n in (4, 9)]
    _, told = forward(sampler, reqs, logits, [0, 0])
    assert told[0]["top ids"] == [200, 300, 0, 1]
    assert told[1]["top ids"][:4] == told[0]["top ids"]


@pytest.mark.parametrize("vocab", [17, VOCAB, 49152])
def test_ranking_candidates_equals_ranking_everything(vocab):
    settings = [
        (top_k, top_p, min_p)
        for top_k in (1, 3, 50, 1 << 30)
        for top_p in (0.1, 0.9, 0.999, 1.0)
        for min_p in (0.0, 0.1, 1.0)
    ][:: 7 if vocab == 49152 else 1]
    for scale in (0.01, 1.0, 4.0):
        for ties in (False, True):
            logits = make_logits(1, vocab, seed=int(scale * 100), ties=ties) * scale
            probs = torch.softmax(logits, -1)
            columns = [torch.tensor(c) for c in zip(*settings, strict=True)]
            ranked = filtering.rank(probs.repeat(len(settings), 1), *columns)
            for i, setting in enumerate(settings):
                few = filtering.rank_row(probs[0], *setting)
                n = few.weights.shape[0]
                assert torch.equal(few.weights, ranked.weights[i, :n]), (setting, scale)
                kept = few.weights > 0
                assert torch.equal(few.token_ids[kept], ranked.token_ids[i, :n][kept])
                assert not ranked.weights[i, n:].any(), (setting, scale)


def test_unseeded_batch_is_refused(sampler):
    batch = Batch([Req(temperature=1.0)])
    batch.sampling_info.sampling_seed = None
    params = sampler.row_params(batch.sampling_info)
    with pytest.raises(RuntimeError, match="install_seeds"):
        sampler.sample_rows(make_logits(1), params, torch.tensor([1]))


def test_kinds_follow_the_batch(sampler):
    """The kinds are remembered per batch: merging and filtering must not leave old ones behind."""
    info = Batch([Req(top_k=4), Req(temperature=0)]).sampling_info
    assert sampler.row_params(info).kinds.tolist() == [2, 0]
    other = Batch([Req(temperature=0.5)])
    info.merge_batch(other.sampling_info)
    assert sampler.row_params(info).kinds.tolist() == [2, 0, 1]
    keep = torch.tensor([1, 2])
    info.filter_batch([1, 2], keep)
    assert sampler.row_params(info).kinds.tolist() == [0, 1]
    assert len(info.sampling_seed) == 2


def test_rows_of_nan_yield_tokens(sampler):
    reqs = [Req(sampling_seed=1, **params) for params in (*KINDS.values(), *MIN_P.values())]
    logits = torch.full((len(reqs), VOCAB), torch.nan)
    token_ids, _ = forward(sampler, reqs, logits, [1] * len(reqs))
    assert all(0 <= token < VOCAB for token in token_ids)

"""Every row is sampled as stock samples it alone (cases P7, P9, P10)."""

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


class FilteredByTokenId:
    """Stock's filters and stock's draw, with the noise given to token ids instead of ranks."""

    def __init__(self):
        from sglang.srt.layers import sampler

        self.filter = sampler.top_k_top_p_min_p_sampling_from_probs_torch
        self.draw = sampler.multinomial_with_seed

    def __call__(self, probs, top_ks, top_ps, min_ps, need_min_p, seed, positions, **kwargs):
        _, ranked, token_ids, _ = self.filter(
            probs, top_ks, top_ps, min_ps, need_min_p, None, positions, return_filtered_probs=True
        )
        kept = torch.zeros_like(ranked).scatter_(1, token_ids.long(), ranked)
        return self.draw(torch.log(kept), seed, positions).view(-1)


@pytest.mark.parametrize("original_logprob", [False, True])
def test_row_equals_stock_sampler_alone(samplers, original_logprob, monkeypatch):
    from sglang.srt.layers import sampler as stock

    monkeypatch.setattr(stock, "SGLANG_RETURN_ORIGINAL_LOGPROB", original_logprob)
    monkeypatch.setattr(stock, "top_k_top_p_min_p_sampling_from_probs_torch", FilteredByTokenId())
    rows, stock_rows = samplers
    kinds = [*KINDS.values(), *MIN_P.values()] * 10
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


def test_token_and_rank_noise_draw_from_the_same_distribution(sampler):
    """Filtered tokens differ from stock's for a seed, not in how often they come."""
    params = {"temperature": 1.5, "top_p": 0.8, "top_k": 4}
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, [3, 50, 200, 400, 500]] = torch.tensor([2.0, 2.4, 1.7, 1.0, 0.9])
    draws = 3000
    reqs = [Req(sampling_seed=i, **params) for i in range(draws)]
    drawn, _ = forward(sampler, reqs, logits.repeat(draws, 1), [8] * draws)
    kept = [3, 50, 200, 400]
    probs = torch.softmax(logits[0] / 1.5, -1)[kept]
    assert probs.sum() > 0.8 > probs[:3].sum()
    expected = probs / probs.sum() * draws
    counts = torch.tensor([drawn.count(token) for token in kept])
    assert counts.sum() == draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.27  # 3 degrees, p = 0.001


def test_views_that_swap_ranks_still_agree(sampler):
    """Why noise belongs to token ids: a draft from slightly other logits is mostly right."""
    params = {"temperature": 0.8, "top_p": 0.9}
    logits = make_logits(300)
    drafted = logits + make_logits(300, seed=1) * 0.1
    reqs = [Req(sampling_seed=i, **params) for i in range(300)]
    exact, _ = forward(sampler, reqs, logits, [5] * 300)
    draft, _ = forward(sampler, reqs, drafted, [5] * 300)
    agreed = sum(a == b for a, b in zip(exact, draft, strict=True)) / 300
    assert 0.8 < agreed < 1.0


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
def test_filtering_candidates_equals_filtering_everything(vocab):
    settings = [
        (top_k, top_p, min_p)
        for top_k in (1, 3, 50, 1 << 30)
        for top_p in (0.1, 0.9, 0.999, 1.0)
        for min_p in (0.0, 0.1, 1.0)
    ][:: 5 if vocab == 49152 else 1]
    sizes = set()
    for scale in (0.01, 1.0, 4.0):
        for ties in (False, True):
            logits = make_logits(1, vocab, seed=int(scale * 100), ties=ties) * scale
            probs = torch.softmax(logits, -1)
            columns = [torch.tensor(c) for c in zip(*settings, strict=True)]
            expected = filtering.filter_rows(probs.repeat(len(settings), 1), *columns)
            for row, setting in enumerate(settings):
                kept, token_ids = filtering.filter_row(probs[0], *setting)
                assert token_ids.tolist() == expected[row].nonzero().view(-1).tolist(), setting
                assert torch.equal(kept, expected[row][token_ids])
                sizes.add(len(token_ids))
    assert min(sizes) == 1
    assert max(sizes) == vocab


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

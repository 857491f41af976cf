"""Noise of a seed, a position and a token: the draw of stock, token by token (cases P9, P10)."""

import math

import numpy as np
import pytest
import torch

from sampling.murmur import hash_key, murmur3_32
from sglang_vericache.sampling import seeded

SEEDS = [0, 1, 42, 2**32 - 1, 2**40 + 12345, 2**63 - 1, -1, -(2**63)]


def test_reference_hash_has_the_published_value():
    assert murmur3_32(b"hello") == 0x248BFA47
    assert murmur3_32(b"hello, world") == 0x149BBB7F


@pytest.mark.parametrize("seed", SEEDS)
def test_hash_is_murmur3_of_seed_position_column(seed):
    tokens = np.array([0, 1, 2, 31, 977, 49151, 2**20])
    hashed = seeded.hash_tokens(seed, 131071, tokens)
    assert hashed.tolist() == [hash_key(seed, 131071, token) for token in tokens.tolist()]
    assert not np.array_equal(hashed, seeded.hash_tokens(seed, 131070, tokens))


def make_probs(vocab, spread):
    probs = torch.softmax(torch.randn(len(SEEDS), vocab) * spread, -1)
    probs[:, vocab // 2 + 1 :: 3] = 0.0
    return probs


def draw(probs, position):
    rows = zip(probs, SEEDS, strict=True)
    return [seeded.draw_row(row, seed, position) for row, seed in rows]


def stock_draw(probs, position):
    from sglang.srt.layers.sampler import multinomial_with_seed

    seeds = torch.tensor(SEEDS)
    positions = torch.full_like(seeds, position)
    return multinomial_with_seed(torch.log(probs), seeds, positions).view(-1).tolist()


@pytest.mark.parametrize("vocab", [1, 2, 33, 1000, 49152])
def test_draw_equals_the_stock_draw(vocab):
    torch.manual_seed(vocab)
    for position, spread in ((0, 0.1), (5, 3.0), (70000, 20.0)):
        probs = make_probs(vocab, spread)
        assert draw(probs, position) == stock_draw(probs, position)


def test_left_out_tokens_change_nothing():
    probs = make_probs(1000, 2.0)
    for row, seed in enumerate(SEEDS):
        kept = np.flatnonzero(probs[row].numpy())
        assert 0 < kept.size < 1000
        for position in range(20):
            drawn = seeded.draw_row(probs[row][torch.from_numpy(kept)], seed, position, kept)
            assert drawn == seeded.draw_row(probs[row], seed, position)


def test_narrowing_the_contest_changes_nothing(monkeypatch):
    """With bounds that are often too narrow, the whole row is looked at instead."""
    contests = []
    best_of = seeded._best_of

    def counting(probs, hashed, columns):
        contests.append(len(columns))
        return best_of(probs, hashed, columns)

    monkeypatch.setattr(seeded, "_best_of", counting)
    monkeypatch.setattr(seeded, "_FAR", 0.5)
    monkeypatch.setattr(seeded, "_LOUD", 2.0)
    monkeypatch.setattr(seeded, "_LOUD_HASH", np.uint32(2**32 * math.exp(-math.exp(-2.0))))
    probs = make_probs(1000, 2.0)
    for position in range(50):
        assert draw(probs, position) == stock_draw(probs, position)
    whole = contests.count(1000)
    assert 0 < whole < len(contests) / 2


def test_near_ties_are_decided_by_the_stock_arithmetic(monkeypatch):
    # Every token is a candidate: only the exact evaluation decides.
    monkeypatch.setattr(seeded, "_MARGIN", 1e9)
    probs = make_probs(500, 1.0)
    assert draw(probs, 3) == stock_draw(probs, 3)


def test_rows_without_numbers_do_not_fail():
    """Stock yields some token for a row of NaN; so must this, not an exception."""
    assert 0 <= seeded.draw_row(torch.full((100,), torch.nan), 1, 1) < 100


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = 20_000
    counts = np.bincount([seeded.draw_row(probs, seed, 11) for seed in range(draws)], minlength=4)
    expected = probs.numpy() * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001
    # Negative control: the test tells this distribution from a slightly different one.
    other = np.array([0.48, 0.32, 0.15, 0.05]) * draws
    assert float(((counts - other) ** 2 / other).sum()) > 16.27

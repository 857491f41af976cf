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
    columns = [0, 1, 2, 31, 977, 49151]
    hashed = seeded.hash_columns(seed, 131071, 49152)
    assert [int(hashed[c]) for c in columns] == [hash_key(seed, 131071, c) for c in columns]
    assert not np.array_equal(hashed, seeded.hash_columns(seed, 131070, 49152))


def make_probs(columns, dtype, spread):
    probs = torch.softmax(torch.randn(len(SEEDS), columns, dtype=dtype) * spread, -1)
    probs[:, columns // 2 + 1 :: 3] = 0.0
    return probs


def stock_draw(probs, seeds, positions):
    from sglang.srt.layers.sampler import multinomial_with_seed

    return multinomial_with_seed(torch.log(probs), seeds, positions).view(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 2, 33, 1000, 49152])
def test_draw_equals_the_stock_draw(dtype, columns):
    torch.manual_seed(columns)
    seeds = torch.tensor(SEEDS)
    for position, spread in ((0, 0.1), (5, 3.0), (70000, 20.0)):
        probs = make_probs(columns, dtype, spread)
        positions = torch.full_like(seeds, position)
        assert torch.equal(
            seeded.draw(probs, seeds, positions), stock_draw(probs, seeds, positions)
        )


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
    probs = make_probs(1000, torch.float32, 2.0)
    for position in range(50):
        positions = torch.full((len(SEEDS),), position)
        assert torch.equal(
            seeded.draw(probs, torch.tensor(SEEDS), positions),
            stock_draw(probs, torch.tensor(SEEDS), positions),
        )
    whole = contests.count(1000)
    assert 0 < whole < len(contests) / 2


def test_near_ties_are_decided_by_the_stock_arithmetic(monkeypatch):
    # Every column is a candidate: only the exact evaluation decides.
    monkeypatch.setattr(seeded, "_MARGIN", 1e9)
    probs, seeds, positions = (
        make_probs(500, torch.float32, 1.0),
        torch.tensor(SEEDS),
        torch.arange(8),
    )
    assert torch.equal(seeded.draw(probs, seeds, positions), stock_draw(probs, seeds, positions))


def test_rows_without_numbers_do_not_fail():
    """Stock yields some token for a row of NaN; so must this, not an exception."""
    probs = torch.full((1, 100), torch.nan)
    assert 0 <= int(seeded.draw(probs, torch.tensor([1]), torch.tensor([1]))) < 100


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

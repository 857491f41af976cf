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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [1, 2, 33, 1000, 49152])
def test_draw_equals_the_stock_draw(dtype, columns):
    from sglang.srt.layers.sampler import multinomial_with_seed

    torch.manual_seed(columns)
    logprobs = torch.log_softmax(torch.randn(len(SEEDS), columns, dtype=dtype) * 3, -1)
    logprobs[:, columns // 2 + 1 :: 3] = -torch.inf
    seeds = torch.tensor(SEEDS)
    for position in (0, 5, 70000):
        positions = torch.full_like(seeds, position)
        expected = multinomial_with_seed(logprobs, seeds, positions).view(-1)
        assert torch.equal(seeded.draw(logprobs, seeds, positions), expected)


def test_near_ties_are_decided_by_the_stock_arithmetic(monkeypatch):
    from sglang.srt.layers.sampler import multinomial_with_seed

    # Every column is a candidate: only the exact evaluation decides.
    monkeypatch.setattr(seeded, "_MARGIN", 1e9)
    logprobs = torch.log_softmax(torch.randn(8, 500), -1)
    seeds, positions = torch.tensor(SEEDS), torch.arange(8)
    expected = multinomial_with_seed(logprobs, seeds, positions).view(-1)
    assert torch.equal(seeded.draw(logprobs, seeds, positions), expected)


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = 20_000
    counts = np.bincount(
        [seeded.draw_row(probs.log().numpy(), seed, 11) for seed in range(draws)], minlength=4
    )
    expected = probs.numpy() * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001
    # Negative control: the test tells this distribution from a slightly different one.
    other = np.array([0.48, 0.32, 0.15, 0.05]) * draws
    assert float(((counts - other) ** 2 / other).sum()) > 16.27

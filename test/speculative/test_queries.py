"""Queries are kept as long as they are among the latest, with their positions."""

import pytest
import torch

from sglang_vericache.speculative.queries import RecentQueries


def numbered(start: int, end: int) -> torch.Tensor:
    """Queries ``[2, n, 1, 1]`` whose entries are their positions."""
    return torch.arange(start, end, dtype=torch.float32).view(1, -1, 1, 1).repeat(2, 1, 1, 1)


def test_positions_follow_the_queries_over_gaps():
    recent = RecentQueries()
    assert not recent
    for start, end in ((0, 100), (100, 102), (110, 113)):
        recent.append(numbered(start, end), end, window=8)
    queries, positions = recent.last(8)
    assert positions.tolist() == [97, 98, 99, 100, 101, 110, 111, 112]
    assert queries.shape == (2, 8, 1, 1)
    assert queries[1].flatten().tolist() == positions.tolist()
    assert recent.last(2)[1].tolist() == [111, 112]
    assert len(recent.last(99)[1]) == len(recent)


@pytest.mark.parametrize("window", [1, 8, 64])
def test_no_more_is_kept_than_twice_the_window(window):
    recent = RecentQueries()
    for start in range(0, 300, 3):
        recent.append(numbered(start, start + 3), start + 3, window)
        assert min(window, start + 3) <= len(recent) < 2 * max(window, 2)
    assert recent.last(window)[1].tolist() == list(range(300 - window, 300))


def test_a_slice_does_not_keep_the_whole_pass_alive():
    recent, queries = RecentQueries(), numbered(0, 1000)
    recent.append(queries[:, -4:], 1000, window=4)
    kept, _ = recent.last(4)
    assert queries.untyped_storage().nbytes() > 100 * kept.untyped_storage().nbytes()

"""Selection against a plain sort, with ties, NaN and every protected share."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_vericache.compressors import (
    Dropper,
    Protected,
    before,
    compress,
    keep_best,
    summed_attention,
)
from sglang_vericache.core import Budget, DraftView

SCORES = st.sampled_from([0.0, 0.5, 1.0, -2.0, float("nan"), float("-inf"), float("inf")])


def reference(row: list[float], count: int, protected: Protected) -> list[int]:
    """Positions by (protected sinks, protected recent, score, lower position), one at a time."""
    length = len(row)
    sinks = list(range(length))[: protected.sinks]
    wanted = max(protected.recent, int(protected.recent_share * count))
    recent = [t for t in range(length)[::-1] if t >= length - wanted and t not in sinks]
    value = [float("-inf") if x != x else x for x in row]
    rest = sorted(set(range(length)) - set(sinks) - set(recent), key=lambda t: (-value[t], t))
    return sorted((sinks + recent + rest)[:count])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_matches_a_sort(data):
    row = data.draw(st.lists(SCORES, min_size=1, max_size=24))
    count = data.draw(st.integers(0, len(row)))
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    protected = Protected(data.draw(st.integers(0, 26)), data.draw(st.integers(0, 26)), share)
    # An infinite score competes with protection; no method returns one.
    row = [1.5 if x == float("inf") else x for x in row]
    kept = keep_best(torch.tensor([row, row[::-1]]), count, protected)
    assert kept.dtype == torch.int32
    assert kept.tolist() == [
        reference(row, count, protected),
        reference(row[::-1], count, protected),
    ]


def test_scores_are_not_changed():
    scores = torch.tensor([[1.0, float("nan"), 3.0]])
    before = scores.clone()
    keep_best(scores, 2, Protected(1, 1))
    assert torch.equal(scores.nan_to_num(-1), before.nan_to_num(-1))


def test_wrong_shape_is_refused(context):
    class Wrong(Dropper):
        name = "wrong"

        def score(self, ctx):
            return torch.zeros(ctx.num_kv_heads, ctx.length)

    with pytest.raises(ValueError, match=r"wrong: scores \[2, 50\], expected \[1, 50\]"):
        compress(Wrong(), [context(50)], Budget(0.5))

    class Right(Wrong):
        per_head = True

    compress(Right(), [context(50)], Budget(0.5)).check_integrity()


@pytest.mark.parametrize(
    "lists", [[[3, 3]], [[4, 2]], [[0, 9]], [[-1, 2]]], ids=["twice", "order", "high", "low"]
)
def test_integrity_check_finds_a_bad_list(lists):
    with pytest.raises(AssertionError):
        DraftView((torch.tensor(lists, dtype=torch.int32),), 9).check_integrity()


def test_attention_is_causal_softmax():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, 8, generator=generator)
    keys = torch.randn(10, 2, 8, generator=generator)
    expected = torch.zeros(4, 10)
    for i in range(3):
        for head in range(4):
            seen = 10 - 3 + i + 1
            logits = keys[:seen, head // 2] @ queries[i, head] / 8**0.5
            expected[head, :seen] += logits.softmax(0)
    torch.testing.assert_close(summed_attention(queries, keys), expected)


def test_more_queries_than_tokens_are_refused():
    with pytest.raises(ValueError, match="3 queries for a context of 2 tokens"):
        summed_attention(torch.zeros(3, 1, 8), torch.zeros(2, 1, 8))


def test_what_a_view_lists_before_a_position():
    even = torch.tensor([[0, 3, 4, 8, 9]], dtype=torch.int32)
    ragged = torch.tensor([[0, 3, 7, 7], [6, 7, 8, 9], [1, 2, 3, 5]], dtype=torch.int32)
    view = DraftView((even, ragged), 10, ((5,), (3, 4, 4)))
    view.check_integrity()
    found = before(view, 7)
    found.check_integrity()
    assert found.length == 7 and found.list_lengths == ((3,), (2, 1, 4))
    assert found.layers[0].tolist() == [[0, 3, 4]]
    assert found.layers[1].tolist() == [[0, 3, 3, 3], [6, 6, 6, 6], [1, 2, 3, 5]]
    whole = before(view, 10)
    assert all(map(torch.equal, whole.layers, view.layers)) and whole.counts == view.counts
    few = before(view, 1)
    assert few.list_lengths == ((1,), (1, 0, 0)) and few.layers[0].tolist() == [[0]]
    assert before(DraftView((even,), 10), 4).counts == ()

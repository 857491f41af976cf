"""What a compressed copy has of a prefix, and what must be copied to make it whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.parts import Parts, copy_held

HEADS, SIZE = 2, 4


class Pool:
    """Keys and values that name their token, layer and head; 0 where nothing was written."""

    def __init__(self, slots, layers):
        self.start_layer = 0
        self.buffers = [torch.zeros(2, slots, HEADS, SIZE) for _ in range(layers)]

    def get_kv_buffer(self, layer):
        return self.buffers[layer].unbind()

    def write(self, layer, head, slots, tokens):
        self.buffers[layer][:, slots, head] = (
            tokens[None, :, None] + 1.0 + 1000 * layer + 100 * head
        )


@st.composite
def views(draw):
    """A view, its prefix's length (all whole pages of what it was chosen from) and page size."""
    page = draw(st.sampled_from([1, 2, 4]))
    pages = draw(st.integers(1, 8))
    length = pages * page + draw(st.integers(0, page - 1))
    by_head = draw(st.booleans())
    layers, counts = [], []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, length))
        lists = [sorted(draw(st.permutations(range(length)))[:count])]
        counts.append((count,))
        if by_head:
            fewer = draw(st.integers(min(count, 1), count))
            other = sorted(draw(st.permutations(range(length)))[:fewer])
            lists.append(other + other[-1:] * (count - fewer))
            counts[-1] = (count, fewer)
        layers.append(torch.tensor(lists, dtype=torch.int32).view(len(lists), count))
    view = DraftView(tuple(layers), length, tuple(counts))
    view.check_integrity()
    return view, pages * page, page


@given(views(), st.data())
def test_both_parts_together_are_the_prefix(given_view, data):
    """Each token of each layer comes exactly once, from the copy or from the host, and is right."""
    view, length, page = given_view
    layers = len(view.layers)
    start = data.draw(st.integers(0, length // page)) * page
    copy = 100 + torch.randperm(view.length)
    host, target = 50 + torch.randperm(length), torch.randperm(50)[:length]
    pool, host_pool = Pool(200, layers), Pool(200, layers)
    for layer, positions in enumerate(view.layers):
        for head in range(HEADS):
            listed = positions[min(head, len(positions) - 1)].long()
            pool.write(layer, head, copy[: len(listed)], listed)
            host_pool.write(layer, head, host, torch.arange(length))

    parts = Parts(view, length, page)
    held, lacking = (
        parts.held(copy, target[start:]),
        parts.lacking(host[start:], target[start:]),
    )
    copy_held(pool, held)
    for layer, (way, ours) in enumerate(zip(lacking, held, strict=True)):
        assert sorted([*way.target, *ours.target]) == sorted(target[start:])
        pool.buffers[layer][:, way.target] = host_pool.buffers[layer][:, way.source]
        assert torch.equal(
            pool.buffers[layer][:, target[start:]], host_pool.buffers[layer][:, host[start:]]
        )


@pytest.mark.parametrize(("page", "lacking"), [(1, 4), (4, 8)])
def test_whole_pages_are_left_out(page, lacking):
    kept = torch.tensor([[0, 1, 2, 3, 4, 7, 9, 11, 12, 13, 14, 15]], dtype=torch.int32)
    parts = Parts(DraftView((kept,), 16), 16, page)
    (way,) = parts.lacking(torch.arange(16), torch.arange(16))
    assert len(way.source) == lacking


def test_a_token_that_one_head_lacks_is_copied():
    kept = torch.tensor([[0, 2, 3], [0, 1, 3]], dtype=torch.int32)
    (way,) = Parts(DraftView((kept,), 4), 4, 1).lacking(torch.arange(4), torch.arange(4))
    assert way.source.tolist() == [1, 2]

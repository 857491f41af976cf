"""The pool of packed KV: which slots are free, and what is written where."""

import pytest
import torch

from sgl_kernel_ext import CODECS
from sgl_kernel_ext.reference.packed import unpack
from sglang_vericache.mem_cache.packed import PackedPool


def make(tokens=10, codec="int4"):
    return PackedPool(CODECS[codec], tokens, 2, 3, 64, torch.device("cpu"))


def test_slots_are_handed_out_once():
    pool = make()
    first, second = pool.alloc(4), pool.alloc(6)
    assert first is not None and second is not None and pool.available() == 0
    pool.check_integrity([first, second])
    assert pool.alloc(1) is None and pool.alloc(0) is not None
    pool.free(first)
    assert pool.alloc(5) is None and pool.available() == 4
    pool.check_integrity([second])
    third = pool.alloc(3)
    pool.check_integrity([third, second])


def test_used_slots_are_used_again_before_others():
    """So that a pool takes no more memory than was ever in use at once."""
    pool = make()
    first = pool.alloc(4)
    pool.free(first)
    assert pool.alloc(4).tolist() == first.tolist()


def test_blocks_are_handed_out_whole():
    pool = make(70, "kivi4")
    assert pool.tokens == pool.available() == 96
    first, second = pool.alloc(33), pool.alloc(1)
    assert first is not None and second is not None and pool.available() == 0
    for slots, size in ((first, 64), (second, 32)):
        assert torch.equal(slots % 32, torch.arange(size, dtype=torch.int32) % 32)
    pool.check_integrity([first, second])
    with pytest.raises(AssertionError):
        pool.check_integrity([first, second[:1]])
    assert pool.alloc(1) is None
    pool.free(first)
    assert pool.alloc(65) is None and pool.available() == 64
    third = pool.alloc(64)
    assert third is not None and set(third.tolist()) == set(first.tolist())


@pytest.mark.parametrize("held", [lambda a, b: [a], lambda a, b: [a, b, b[:1]]])
def test_lost_and_doubled_slots_are_found(held):
    pool = make()
    first, second = pool.alloc(4), pool.alloc(3)
    with pytest.raises(AssertionError):
        pool.check_integrity(held(first, second))


def test_sizes_in_bytes():
    assert make(codec="int8").token_bytes == 2 * 2 * 3 * 68
    assert make(codec="int4").nbytes == 10 * 2 * 2 * 3 * 40
    pool = make(33, codec="kivi2")
    assert pool.nbytes == 64 * 2 * 2 * 3 * 24 == sum(t.nbytes for p in pool.layers for t in p[:2])


def test_a_layer_is_written_and_no_other():
    pool = make(codec="int8")
    for layer in pool.layers:
        layer.keys.zero_(), layer.values.zero_()
    keys, values = torch.randn(2, 3, 3, 64, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([7, 0, 4], dtype=torch.int32)
    pool.write(1, keys, values, slots)
    for (buffer, codec), rows in zip(pool.layers[1].parts, (keys, values), strict=True):
        found = unpack(buffer[slots.long()], 64, codec)
        torch.testing.assert_close(found, rows, atol=0.02, rtol=0.01)
        assert (buffer.flatten(1) != 0).any(1).sum() == 3
    assert not any(buffer.any() for buffer in pool.layers[0][:2])

"""The compiled decoder stack against the loop of single ops that defines it: the same bits."""

from dataclasses import replace

import pytest
import torch

from sgl_kernel_ext import (
    Decoder,
    DecoderLayer,
    DecoderRows,
    DecoderShape,
    ViewPool,
    pack_weight,
)
from sgl_kernel_ext._loader import cpu_module

pytestmark = pytest.mark.skipif(cpu_module() is None, reason="no compiled kernels")
HEADS, KV_HEADS, DIM, HIDDEN, INNER, SLOTS, LAYERS = 6, 2, 16, 48, 80, 64, 3


def make(dtype, bias):
    generator = torch.Generator().manual_seed(1)

    def rand(*sizes):
        return (torch.rand(sizes, generator=generator) - 0.5).to(dtype)

    def weight(n, k):
        return pack_weight(rand(n, k), rand(n) if bias else None)

    layers = [
        DecoderLayer(
            input_norm=rand(HIDDEN),
            post_norm=rand(HIDDEN),
            qkv=weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            out=weight(HIDDEN, HEADS * DIM),
            gate_up=weight(2 * INNER, HIDDEN),
            down=weight(HIDDEN, INNER),
            k_pool=rand(SLOTS, KV_HEADS, DIM),
            v_pool=rand(SLOTS, KV_HEADS, DIM),
        )
        for _ in range(LAYERS)
    ]
    shape = DecoderShape(HEADS, KV_HEADS, DIM, DIM**-0.5, 1e-5, True)
    cache = torch.rand(100, DIM, generator=generator)
    return Decoder(shape, layers, rand(HIDDEN), cache), rand(7, HIDDEN)


def rows(views, captured, elsewhere=False):
    """Two groups: four verify rows over 20 keys, three over 9; the first reads a view if asked,
    perhaps in another pool."""
    table = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))[:60].int().view(2, 30)
    start, length = torch.zeros(LAYERS, 2, 1, dtype=torch.int64), torch.zeros(LAYERS, 2, 1).int()
    length[:, 0] = torch.tensor([[3], [5], [4]])
    pools = torch.rand(LAYERS, 2, SLOTS, KV_HEADS, DIM, generator=torch.Generator().manual_seed(4))
    return DecoderRows(
        req_to_token=table,
        q_indptr=torch.tensor([0, 4, 7], dtype=torch.int32),
        req_row=torch.tensor([1, 0], dtype=torch.int32),
        tail_start=torch.tensor([10, 0], dtype=torch.int32),
        tail_end=torch.tensor([20, 9], dtype=torch.int32),
        view_indices=table[1, :6].clone() if views else None,
        view_start=start if views else None,
        view_len=length if views else None,
        view_pools=[[ViewPool(k, v)] for k, v in pools.to(elsewhere)] if elsewhere else (),
        view_pool=torch.tensor([1, 0], dtype=torch.int32) if elsewhere else None,
        captured=torch.tensor([3, 4, 6]) if captured else None,
    )


def run(forward, decoder, hidden, given):
    for layer in decoder.layers:  # every run starts from the same pools
        generator = torch.Generator().manual_seed(3)
        for pool in (layer.k_pool, layer.v_pool):
            pool.copy_(torch.rand(pool.shape, generator=generator))
    slots = torch.cat([given.req_to_token[1, 16:20], given.req_to_token[0, 6:9]]).long()
    positions = torch.tensor([16, 17, 18, 19, 6, 7, 8])
    out, queries = forward(hidden.clone(), positions, slots, given)
    pools = [pool.clone() for layer in decoder.layers for pool in (layer.k_pool, layer.v_pool)]
    return [out, *queries, *pools]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_one_call_equals_the_loop(dtype, views, captured, bias):
    decoder, hidden = make(dtype, bias)
    given = rows(views, captured)
    expected = run(decoder._loop, decoder, hidden, given)
    found = run(decoder.forward, decoder, hidden, given)
    assert decoder._compiled is not None
    assert len(found) == len(expected) == 1 + 2 * LAYERS + (LAYERS if captured else 0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert expected[0].isfinite().all() and expected[0].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_in_another_pool(dtype):
    decoder, hidden = make(dtype, False)
    given = rows(True, False, elsewhere=dtype)
    expected = run(decoder._loop, decoder, hidden, given)
    found = run(decoder.forward, decoder, hidden, given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    fewer = replace(given, view_pools=given.view_pools[1:])
    with pytest.raises(ValueError, match="view_pools"):
        decoder.forward(hidden, torch.zeros(7), torch.zeros(7), fewer)


def test_views_matter():
    """Negative control: the view changes the result, and so does the pool it is in."""
    decoder, hidden = make(torch.float32, False)
    given = rows(False, False), rows(True, False), rows(True, False, elsewhere=torch.float32)
    outs = [run(decoder.forward, decoder, hidden, each)[0] for each in given]
    for one, other in ((0, 1), (1, 2)):
        assert not torch.equal(outs[one][:4], outs[other][:4])
        assert torch.equal(outs[one][4:], outs[other][4:]), "the second group has no view"


def test_overwritten_weights_are_seen():
    decoder, hidden = make(torch.bfloat16, False)
    given = rows(True, False)
    before = run(decoder.forward, decoder, hidden, given)
    weight = decoder.layers[1].down
    weight.overwrite(weight.unpack() * 2)
    after = run(decoder.forward, decoder, hidden, given)
    assert not torch.equal(before[0], after[0])
    expected = run(decoder._loop, decoder, hidden, given)
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("q_indptr", torch.tensor([0, 7], dtype=torch.int32), ValueError),
        ("tail_end", torch.tensor([20.0, 9.0]), TypeError),
        ("tail_end", torch.tensor([40, 9], dtype=torch.int32), ValueError),
        ("view_start", torch.zeros(LAYERS, 2, 1, dtype=torch.int32), TypeError),
    ],
)
def test_wrong_rows_are_refused(field, value, error):
    decoder, hidden = make(torch.float32, False)
    given = DecoderRows(**(vars(rows(True, False)) | {field: value}))
    with pytest.raises(error, match=field.split("_")[0]):
        run(decoder.forward, decoder, hidden, given)

"""Layers chosen from together keep what each keeps alone."""

import pytest
import torch

from sglang_vericache.compressors import Dropper, compress, select
from sglang_vericache.core import Budget

LENGTH = 60
# Runs of equal counts, broken by layers that keep all, none and another number.
COUNTS = (9, 9, 9, LENGTH, LENGTH, 9, 0, 0, 30, 9)


class ByKeys(Dropper):
    name = "by-keys"

    def count(self, ctx, budget):
        return COUNTS[ctx.layer]

    def score(self, ctx):
        norms = ctx.keys().norm(dim=-1).T
        return norms if self.per_head else norms.mean(dim=0, keepdim=True)


class PerHead(ByKeys):
    per_head = True


class Uneven(PerHead):
    floor_share = 0.2


@pytest.mark.parametrize("dropper", [ByKeys, PerHead, Uneven])
@pytest.mark.parametrize("most", [1, 2 * 2 * LENGTH, select.MOST_SCORES])
def test_groups_change_nothing(context, monkeypatch, dropper, most):
    monkeypatch.setattr(select, "MOST_SCORES", most)
    layers = [context(LENGTH, layer=i, num_layers=len(COUNTS)) for i in range(len(COUNTS))]
    together = compress(dropper(), layers, Budget(0.5)).layers
    alone = [compress(dropper(), [ctx], Budget(0.5)).layers[0] for ctx in layers]
    assert len(together) == len(COUNTS) and all(map(torch.equal, together, alone))
    assert not torch.equal(together[0], together[1]), "precondition: layers differ"


def test_layers_may_differ_in_kv_heads(context):
    layers = [context(LENGTH, layer=i, num_layers=3, kv_heads=n) for i, n in enumerate((1, 2, 3))]
    assert [len(x) for x in compress(PerHead(), layers, Budget(0.5)).layers] == [1, 2, 3]

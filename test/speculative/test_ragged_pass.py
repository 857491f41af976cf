"""Rows of a pass: what its bounds promise to a kernel that cannot look."""

from types import SimpleNamespace

import torch

from sglang_vericache.core import Action, DraftView
from sglang_vericache.mem_cache.views import ViewStore
from sglang_vericache.platform import bootstrap

bootstrap.install()

from sglang_vericache.attention.rows import full_rows  # noqa: E402
from sglang_vericache.speculative.ragged_pass import RaggedPass  # noqa: E402


def state(committed, view_length, drafts, probes=()):
    return SimpleNamespace(
        req=SimpleNamespace(output_ids=[5]),
        **{"committed": committed, "view_length": view_length, "published": committed},
        **{"drafts": list(drafts), "probes": list(probes), "unverified": False},
    )


def test_the_longest_run_is_known():
    store = ViewStore(rows=3, layers=2, heads=1, capacity=8, device="cpu")
    lists = (torch.arange(4, dtype=torch.int32)[None],) * 2
    store.put(1, DraftView(lists, 90), torch.arange(90, dtype=torch.int32))
    states = [state(40, 0, [1, 2]), state(100, 90, [1], [7, 8]), state(3, 0, [])]
    actions = [Action.VERIFY, Action.DRAFT, Action.VERIFY]
    made = RaggedPass.build(states, actions, [False] * 3, torch.arange(3), store)
    lengths = made.rows.tail_end - made.rows.tail_start
    assert lengths.tolist() == [43, 14, 4]
    assert made.rows.longest == 43
    batch = SimpleNamespace(
        seq_lens=torch.tensor([7, 300]),
        seq_lens_cpu=torch.tensor([7, 300]),
        req_pool_indices=torch.tensor([0, 2]),
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )
    assert full_rows(batch).longest == 300
    batch.seq_lens_cpu = None
    assert full_rows(batch).longest is None

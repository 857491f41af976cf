"""ragged_attention on the CPU: microseconds a layer, against memory and against torch's SDPA.

Each case runs over ``--layers`` distinct KV pools, as a forward pass does, so that short lists are
not read from the cache again. The op, a plain read of as many bytes (``torch.sum``) and torch's
gather + SDPA alternate over ``--rounds`` and the best round counts, so that another load on the
machine hits all alike. Slots are pages of 64 in shuffled order. Bytes are those of plain keys, also
where the op reads packed ones. Prints one table and, as the last line, the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sgl_kernel_ext
from sgl_kernel_ext import ViewPool

CASES = {  # name: (groups, rows of each, keys of each, pool of all keys but the rows' own)
    "decode 1x8192": (1, 1, 8192, "main"),
    "decode 8x6000": (8, 1, 6000, "main"),
    "draft 8x600": (8, 1, 600, "main"),
    "draft 8x600, view": (8, 1, 600, "other"),
    **{f"draft 8x6000, {name}": (8, 1, 6000, name) for name in sgl_kernel_ext.CODECS},
    "verify 9 rows": (1, 9, 6000, "main"),
    "verify 9 rows, view": (1, 9, 6000, "other"),
    "verify 8x5 rows": (8, 5, 6000, "main"),
    "verify 8x5 rows, view": (8, 5, 6000, "other"),
    "prefill 2048 rows": (1, 2048, 6000, "main"),
}
PAGE = 64


@dataclass(frozen=True)
class Layer:
    """Arguments of one call; ``views`` has those of the views."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    req_to_token: Tensor
    q_indptr: Tensor
    req_row: Tensor
    tail_start: Tensor
    tail_end: Tensor
    scale: float
    views: dict[str, Any]

    def attend(self) -> Tensor:
        arguments = vars(self) | self.views
        del arguments["views"]
        return sgl_kernel_ext.ragged_attention(**arguments)

    def read(self) -> Tensor:
        count = int(self.tail_end.sum())
        return sum(pool.view(torch.int64)[:count].sum() for pool in (self.k_pool, self.v_pool))

    def sdpa(self) -> list[Tensor]:
        """Every group by itself: the first rows of a causal chunk see too much, at equal cost."""
        outputs = []
        for group, row in enumerate(self.req_row.tolist()):
            slots = self.req_to_token[row, : self.tail_end[group]]
            q = self.q[self.q_indptr[group] : self.q_indptr[group + 1]]
            k, v = (pool[slots].transpose(0, 1)[None] for pool in (self.k_pool, self.v_pool))
            q = q.transpose(0, 1)[None]
            outputs.append(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3], metavar=("HQ", "HKV"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)

    print(f"{'':23} {'ours us':>9} {'read us':>9} {'SDPA us':>9} {'GB/s':>6} {'GMAC/s':>7}")
    cells = {}
    for name in args.cases:
        groups, rows, keys, home = CASES[name]
        layers = [
            build(groups, rows, keys, home, *args.heads, args.head_dim, dtype)
            for _ in range(1 if rows > keys // 100 else args.layers)
        ]
        ours, read, sdpa = (
            us / len(layers)
            for us in best_of(
                args.rounds,
                lambda layers=layers: [layer.attend() for layer in layers],
                lambda layers=layers: [layer.read() for layer in layers],
                lambda layers=layers: [layer.sdpa() for layer in layers],
            )
        )
        width = args.head_dim * dtype.itemsize
        gigabytes = groups * keys * 2 * args.heads[1] * width / ours / 1e3
        products = groups * rows * (keys - (rows - 1) / 2)  # pairs of a row and a key it sees
        macs = products * args.heads[0] * 2 * args.head_dim / ours / 1e3
        print(f"{name:23} {ours:9.0f} {read:9.0f} {sdpa:9.0f} {gigabytes:6.1f} {macs:7.1f}")
        cells[name] = {
            "ours_us": round(ours, 1),
            "read_us": round(read, 1),
            "sdpa_us": round(sdpa, 1),
            "gb_per_s": round(gigabytes, 2),
            "gmac_per_s": round(macs, 2),
        }
    print(
        json.dumps(
            {"benchmark": "attention", **vars(args), **sgl_kernel_ext.active(), "cells": cells}
        )
    )


def build(
    groups: int,
    rows: int,
    keys: int,
    home: str,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> Layer:
    pages = torch.randperm(groups * (keys // PAGE + 1))
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).int()
    table = slots.view(groups, -1)
    k_pool, v_pool = (torch.randn(slots.numel(), kv_heads, dim).to(dtype) for _ in range(2))
    in_view, views = 0, {}
    if home != "main":
        in_view = keys - rows
        views = {
            "view_indices": table[:, :in_view].flatten(),
            "view_start": torch.arange(groups)[:, None] * in_view,
            "view_len": torch.full((groups, 1), in_view, dtype=torch.int32),
            "view_pools": [other_pool(k_pool, v_pool, home)],
            "view_pool": torch.ones(groups, dtype=torch.int32),
        }
    return Layer(
        q=torch.randn(groups * rows, heads, dim).to(dtype),
        k_pool=k_pool,
        v_pool=v_pool,
        req_to_token=table,
        q_indptr=torch.arange(groups + 1, dtype=torch.int32) * rows,
        req_row=torch.arange(groups),
        tail_start=torch.full((groups,), in_view),
        tail_end=torch.full((groups,), keys),
        scale=dim**-0.5,
        views=views,
    )


def other_pool(k_pool: Tensor, v_pool: Tensor, home: str) -> ViewPool:
    """The same keys and values again, packed if ``home`` is a codec."""
    if home == "other":
        return ViewPool(k_pool.clone(), v_pool.clone())
    slots, heads, dim = k_pool.shape
    pool = sgl_kernel_ext.packed_pool(sgl_kernel_ext.CODECS[home], slots, heads, dim)
    sgl_kernel_ext.pack_kv(k_pool, v_pool, pool, torch.arange(slots, dtype=torch.int32))
    return pool


def best_of(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Least microseconds of each call over alternating rounds, after one unmeasured round."""
    best = [float("inf")] * len(calls)
    for measured in range(rounds + 1):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if measured:
                best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
    return best


if __name__ == "__main__":
    main()

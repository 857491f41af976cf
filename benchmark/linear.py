"""Row-invariant linear against torch's ``F.linear``: microseconds a call, on the CPU.

The shapes are the linears of the default model. Both ops alternate over ``--rounds`` and the best
round counts, so that another load on the machine hits both alike. Prints one table and, as the
last line, the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import sgl_kernel_ext

SHAPES = {  # name: (K, N)
    "qkv": (576, 960),
    "o": (576, 576),
    "gate_up": (576, 3072),
    "down": (1536, 576),
    "lm_head": (576, 49152),
}
ROWS = [1, 2, 4, 8, 16, 64, 512, 2048]
MAX_LM_HEAD_ROWS = 64  # only sampled rows get logits
ROUND_SECONDS = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)

    print(f"{'':8} {'K':>5} {'N':>6} {'M':>5} {'ours us':>10} {'torch us':>10} {'ratio':>6} GMAC/s")
    cells = {}
    for name, (k, n) in SHAPES.items():
        weight = torch.randn(n, k).to(dtype)
        packed = sgl_kernel_ext.pack_weight(weight)
        for m in args.rows:
            if name == "lm_head" and m > MAX_LM_HEAD_ROWS:
                continue
            x = torch.randn(m, k).to(dtype)
            ours, theirs = _best_of(
                args.rounds,
                lambda x=x, packed=packed: sgl_kernel_ext.linear(x, packed),
                lambda x=x, weight=weight: F.linear(x, weight),
            )
            cells[f"{name} M={m}"] = {"ours_us": round(ours, 1), "torch_us": round(theirs, 1)}
            print(
                f"{name:8} {k:5} {n:6} {m:5} {ours:10.1f} {theirs:10.1f} {theirs / ours:6.2f} "
                f"{m * n * k / ours / 1e3:6.0f}"
            )
    run = {"dtype": args.dtype, "rounds": args.rounds, "torch": torch.__version__}
    print(json.dumps({"cells": cells, "run": run | sgl_kernel_ext.active()}))


def _best_of(rounds: int, *ops: Callable[[], object]) -> list[float]:
    """Microseconds a call of each op, the best of ``rounds``."""
    best = [float("inf")] * len(ops)
    for _ in range(rounds):
        for i, op in enumerate(ops):
            calls, start = 0, time.perf_counter()
            while (passed := time.perf_counter() - start) < ROUND_SECONDS or not calls:
                op()
                calls += 1
            best[i] = min(best[i], passed / calls * 1e6)
    return best


if __name__ == "__main__":
    main()

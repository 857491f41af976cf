"""Draft-and-verify decoding simulated on the hardware of the VeriCache paper (arXiv 2605.17613).

The real planner, reserve rings and draft lengths decide; devices, links and memory are models
(``_hardware.py``: assumptions and their sources). Six sweeps:

    decode     long contexts, full KV in host memory: three models on the paper's servers
    memory     the share of device memory that is left for KV
    link       how much slower the link is than device memory
    agreement  how often drafts are right, with all KV on the device: fixed and adaptive lengths
    remote     prefixes in a remote store, verified by a server near it
    fleet      1 to 1,000 servers that share the store

Every figure that the paper reports is shown beside it. Prints one table for each sweep and, as the
last line, the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _hardware import (
    GB,
    GH200,
    H100_NVL,
    LLAMA_70B,
    MISTRAL_24B,
    QWEN_32B,
    RTX_PRO_6000,
    Server,
    agreement_of,
)
from _policies import Full, Ours, Paper, Policy, Resident
from _remote import Fleet, RemotePair, Scheme
from _simulation import Outcome, Simulation, workload

# The paper's example request: 4 GB of KV at 24B.
PROMPT = 24_576
# Prompts of the memory sweep; not in the paper. Few of them fit where little is left for KV.
MEMORY_PROMPT = 20_480
# Not in the paper: tokens of an answer.
NEW_TOKENS = 512
KEEP = 0.2
DRAFTS = 25
# Of 30 drafts survive 19 (32B) and 23 (70B); not given for 24B, taken in between.
AGREEMENT = {
    MISTRAL_24B.name: agreement_of(21, 30),
    QWEN_32B.name: agreement_of(19, 30),
    LLAMA_70B.name: agreement_of(23, 30),
}
SERVERS = [
    Server(RTX_PRO_6000, MISTRAL_24B),
    Server(RTX_PRO_6000, QWEN_32B),
    Server(H100_NVL.times(2), LLAMA_70B),
]
PAIR = H100_NVL.times(2)
# 4-bit codes with a 16-bit scale and zero for each group of 32 (KIVI).
KIVI_KEEP, REMOTE_DRAFTS = 0.3125, 40
SLOW, FAST = 1.2 * GB, 40 * GB
ANSWERS = (384, 512, 768, 1024)
SHARES, RATIOS = (0.74, 0.6, 0.5, 0.4, 0.3, 0.2), (60, 45, 30, 20, 10)
AGREEMENTS = (0.99, 0.97, 0.95, 0.9, 0.8, 0.6)
FLEET, STORE = (1, 3, 10, 30, 100, 300, 1000), 120 * GB

Figures = dict[str, Any]


def simulate(
    server: Server,
    policy: Policy,
    requests: int,
    agreement: float | None = None,
    prompt: int = PROMPT,
) -> Outcome:
    """The workload of a sweep on one server."""
    p = AGREEMENT[server.model.name] if agreement is None else agreement
    return Simulation(server, policy, workload(requests, prompt, NEW_TOKENS, p, KEEP)).run()


def policies(server: Server, prompt: int = PROMPT) -> list[Policy]:
    """Those compared; the first one is the baseline."""
    known = (server, prompt, KEEP, AGREEMENT[server.model.name], DRAFTS)
    return [Full(), Paper(*known, residents=0), Paper(*known), Ours(), Resident()]


def compare(server: Server, requests: int, prompt: int = PROMPT) -> Figures:
    """All policies on one server."""
    return gains(
        {
            policy.name: simulate(server, policy, requests, prompt=prompt)
            for policy in policies(server, prompt)
        }
    )


def gains(outcomes: dict[str, Outcome]) -> Figures:
    """Rates, and their gain over the first one."""
    base = next(iter(outcomes.values())).rate
    return {
        name: {
            "rate": round(outcome.rate, 1),
            "gain": round(outcome.rate / base, 2),
            "batch": round(outcome.batch, 1),
            "offloaded": round(outcome.offloaded, 1),
            "draft_length": round(outcome.draft_length, 1),
            "stalled": round(outcome.stalled / outcome.seconds, 2),
        }
        for name, outcome in outcomes.items()
    }


def decode(requests: int) -> Figures:
    servers = [*SERVERS, Server(GH200, QWEN_32B)]
    cells = {f"{s.model.name}, {s.device.name}": compare(s, requests) for s in servers}
    table("decode: gain over full KV", cells)
    gains = [cell["paper, mixed"]["gain"] for cell in list(cells.values())[: len(SERVERS)]]
    return {
        "cells": cells,
        "reproduced": reproduced(("smallest", 1.92, min(gains)), ("largest", 2.73, max(gains))),
    }


def memory(requests: int) -> Figures:
    server = Server(PAIR, LLAMA_70B)
    cells = {
        share: compare(server.with_kv_share(share), requests, MEMORY_PROMPT) for share in SHARES
    }
    table("memory: gain by KV share of device memory", cells)
    first, *_, last = (cell["paper, mixed"]["gain"] for cell in cells.values())
    figures = reproduced(("0.74", 1.61, first), ("0.2", 2.71, last))
    return {"cells": cells, "reproduced": figures}


def link(requests: int) -> Figures:
    cells = {
        ratio: compare(Server(PAIR.with_ratio(ratio), LLAMA_70B), requests) for ratio in RATIOS
    }
    table("link: gain by ratio of memory to link bandwidth", cells)
    first, *_, last = (cell["paper, mixed"]["gain"] for cell in cells.values())
    return {"cells": cells, "reproduced": reproduced(("60", 1.92, first), ("10", 3.01, last))}


def agreement(requests: int) -> Figures:
    """Draft lengths alone: nothing leaves the device."""
    server = Server(PAIR, MISTRAL_24B)
    cells = {
        p: gains(
            {
                policy.name: simulate(server, policy, requests, p)
                for policy in (Full(), Resident(8), Resident(25), Resident())
            }
        )
        for p in AGREEMENTS
    }
    table("agreement: gain by per-token agreement", cells)
    return {"cells": cells, "reproduced": []}


def remote(requests: int) -> Figures:
    """The paper gives a range over its tasks, not the length of their answers."""
    cells: Figures = {}
    for answer in ANSWERS:
        cells[answer] = {}
        for server in SERVERS:
            full, drafted = (
                remote_rate(server, drafts, requests, answer) for drafts in (0, REMOTE_DRAFTS)
            )
            gain = round(drafted / full, 2)
            cells[answer][server.model.name] = {"rate": round(drafted, 1), "gain": gain}
    table("remote: gain over fetching full KV, by tokens of an answer", cells)
    first, *_, last = ([c["gain"] for c in cell.values()] for cell in cells.values())
    figures = ((f"{ANSWERS[0]}", 2.11, max(first)), (f"{ANSWERS[-1]}", 1.33, min(last)))
    return {"cells": cells, "reproduced": reproduced(*figures)}


def remote_rate(server: Server, drafts: int, requests: int, answer: int = NEW_TOKENS) -> float:
    keep = KIVI_KEEP if drafts else 1.0
    load = workload(requests, PROMPT, answer, AGREEMENT[server.model.name], keep)
    return RemotePair(server, SLOW, FAST, keep, drafts).run(load)


def fleet(requests: int) -> Figures:
    """Servers of the 70B model; what each can do alone comes from the other sweeps."""
    server = Server(PAIR, LLAMA_70B)
    kv = PROMPT * server.model.token_bytes
    full = simulate(server, Full(), requests).rate
    offloaded = simulate(server, Ours(), requests).rate
    near = remote_rate(server, REMOTE_DRAFTS, requests)
    schemes = [
        Scheme("full KV", kv, full),
        Scheme("compressed, verified near the store", KIVI_KEEP * kv, near),
        Scheme("compressed first, full KV later", (1 + KIVI_KEEP) * kv, offloaded),
    ]
    cells: Figures = {}
    for scheme in schemes:
        one = Fleet(STORE, SLOW, NEW_TOKENS, scheme)
        cells[scheme.name] = {
            "knee": round(one.knee),
            "bound": {n: round(one.bound(n)) for n in FLEET},
            "rate": {n: round(Fleet(STORE, SLOW, NEW_TOKENS, scheme).run(n)) for n in FLEET},
        }
    print(
        f"\nfleet: tokens/s of N servers, store of {STORE / GB:g} GB/s (knee: store is the limit)"
    )
    print(f"{'':36}{'knee':>6}" + "".join(f"{n:>8}" for n in FLEET))
    for name, cell in cells.items():
        print(f"{name:36}{cell['knee']:6}" + "".join(f"{r:8}" for r in cell["rate"].values()))
    return {"cells": cells}


def reproduced(*figures: tuple[str, float, float]) -> list[Figures]:
    """Figures of the paper beside the simulated ones, printed and as JSON."""
    rows = []
    for name, paper, simulated in figures:
        off = round(100 * (simulated / paper - 1))
        print(f"  {name:>9}: paper {paper:.2f}, simulated {simulated:.2f} ({off:+d} %)")
        rows.append({"figure": name, "paper": paper, "simulated": simulated, "off_percent": off})
    return rows


def table(title: str, rows: dict[Any, Figures]) -> None:
    columns = list(next(iter(rows.values())))
    print(f"\n{title}")
    print(f"{'':34}" + "".join(f"{name:>25}" for name in columns))
    for label, cell in rows.items():
        entries = (f"{c['rate']:.0f}/s {c['gain']:.2f}x" for c in cell.values())
        print(f"{label!s:34}" + "".join(f"{entry:>25}" for entry in entries), flush=True)


SWEEPS: dict[str, Callable[[int], Figures]] = {
    "decode": decode,
    "memory": memory,
    "link": link,
    "agreement": agreement,
    "remote": remote,
    "fleet": fleet,
}


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    names = list(SWEEPS) if args.sweep == "all" else [args.sweep]
    figures = {name: SWEEPS[name](args.requests) for name in names}
    if args.plots:
        from _plots import draw

        draw(figures, args.plots)
    run = {
        "requests": args.requests,
        "prompt": PROMPT,
        "new_tokens": NEW_TOKENS,
        "keep": KEEP,
        "drafts": DRAFTS,
        "agreement": {name: round(p, 4) for name, p in AGREEMENT.items()},
    }
    print(json.dumps({"benchmark": "simulate", "run": run, **figures}))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sweep", choices=[*SWEEPS, "all"], default="all", help="default: all")
    add("--requests", type=int, default=80, help="of every simulated run (default: 80)")
    add("--plots", type=Path, metavar="DIR", help="write one PNG a sweep there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

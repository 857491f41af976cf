"""Soak: one server with a tier under mixed load, every answer compared bit for bit (case H2).

Chats, long documents that share prefixes, short prompts, greedy and sampled, under cache salts,
with every compressor and draft length by request, some without drafts; clients that leave, and
aborts by id at random times. The device's KV pool holds the contexts of a few requests, the host's
some times that. References are the answers to the same requests without drafts, on the same server,
asked once before the load. Now and then the load pauses, and no slot may be taken then.

Exit status 1: a mismatch, a request that failed, a slot taken when idle, memory that grew, or a run
that did not show what it is for (nothing offloaded, nothing rejected, nobody aborted, ...). The
last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

import prompts as texts
from _catalogue import Conversation, draw
from _engines import Engine, vericache
from _sweep import acceptance, counters, say
from _traffic import Client, Refused, Traffic, Way
from servers import Server
from sglang_vericache.compressors import names
from sglang_vericache.embedded_model import ensure_embedded_model

SAMPLE_SECONDS = 10.0
IDLE_SECONDS = 60.0
MOST_GROWTH = 0.05
# SGLang's own checks of every slot after every iteration; a violation ends the server.
CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
# A plugin that delays and corrupts copies between the tiers.
SABOTEUR = Path(__file__).parents[1] / "test" / "server" / "saboteur"
SPOILED = "saboteur: copies are spoiled"


@dataclass
class Watched:
    """What was seen of the server.

    Attributes:
        pss: seconds and proportional set size in bytes of all its processes, every 10 s.
        idle: what was still taken at each pause; empty if nothing was.
        seconds: length of the load, pauses included.
        counters: change of VeriCache's counters over the load.
        spoiled: whether copies were delayed or corrupted.
    """

    pss: list[tuple[float, int]] = field(default_factory=list)
    idle: list[dict[str, int]] = field(default_factory=list)
    seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    spoiled: bool = False

    def levels(self) -> tuple[float, float]:
        """Median PSS of the second quarter and of the last tenth, in bytes."""
        at = len(self.pss)
        quarter = self.pss[at // 4 : max(at // 2, at // 4 + 1)]
        last = self.pss[-max(3, at // 10) :]
        early, late = ([pss for _, pss in part] for part in (quarter, last))
        return statistics.median(early), statistics.median(late)


def main() -> None:
    args = _arguments()
    model = args.model_path or ensure_embedded_model()
    conversations = draw(texts.load_tokenizer(model), args.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as store:
        engine = _engine(args, model, store)
        with Server(engine.command, env=engine.env, name="soak") as server:
            report, faults = asyncio.run(_soak(server, conversations, args))
            text = json.dumps(report)
            if args.json:
                args.json.write_text(text + "\n")
            print(text)
            if faults:
                sys.exit("; ".join(faults))  # inside, so that the server's log is kept


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30, help="of load, after the references (default: 30)")
    add("--tier", choices=("host", "auto", "remote"), default="host", help="default: host")
    add("--staging", choices=("copy", "in-place"), default="copy", help="default: copy")
    add("--concurrency", type=int, default=32, help="clients (default: 32)")
    add("--delay-ms", type=float, default=50, help="most delay of a layer's copy (default: 50)")
    add("--corrupt", type=float, default=0, help="share of copies to corrupt: it must fail then")
    add("--seed", type=int, default=0, help="of the load (default: 0)")
    add("--pause", type=float, default=150, help="seconds between idle points (default: 150)")
    add("--cap", type=int, default=16_384, help="device slots for KV (default: 16384)")
    add("--host-ratio", type=float, default=3, help="host slots by device slots (default: 3)")
    add("--draft-len", type=int, default=12, help="most drafts of a round (default: 12)")
    adaptive = "adaptive draft lengths and lookup, where --draft-len is the most"
    add("--adaptive", action="store_true", help=adaptive)
    add("--dtype", default="bfloat16", help="default: bfloat16")
    add("--model-path", type=Path, help="default: the embedded model")
    add("--json", type=Path, metavar="FILE", help="also write the JSON line there")
    return parser.parse_args()


def _engine(args: argparse.Namespace, model: Path, store: str) -> Engine:
    flags = (
        *("--vericache-tier", args.tier, "--vericache-staging", args.staging),
        *("--vericache-draft-len", "auto" if args.adaptive else str(args.draft_len)),
        *("--vericache-max-draft-len", str(args.draft_len)),
        *("--vericache-settings", json.dumps({"min_tokens": 16, "window": 16})),
        *("--max-total-tokens", str(args.cap), "--hicache-ratio", str(args.host_ratio)),
        *("--vericache-packed-tokens", str(args.cap // 4)),
        *(("--page-size", "64") if args.tier == "remote" else ()),
    )
    path = os.pathsep.join(filter(None, [str(SABOTEUR), os.environ.get("PYTHONPATH")]))
    env = {
        **CHECKS,
        "PYTHONPATH": path,
        "SABOTEUR_COPY_DELAY": str(args.delay_ms / 1e3),
        "SABOTEUR_COPY_FAULTS": str(args.corrupt),
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": store,
    }
    engine = vericache("on", model, args.dtype, flags)
    return Engine("soak", engine.command, engine.api, {**engine.env, **env})


async def _soak(
    server: Server, conversations: list[Conversation], args: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """The report, and what is wrong."""
    wait = aiohttp.ClientTimeout(total=1200)
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits, timeout=wait, read_bufsize=1 << 20) as http:
        client = Client(http, server.url)
        await asyncio.gather(*(c.answer(client.reference) for c in conversations))
        say(f"{sum(len(c.requests) for c in conversations)} references")
        await _touch(client, conversations)
        say("both pools have been written to")
        compressors = [*names(), "snapkv+int4"]
        traffic = Traffic(client, conversations, args.seed, compressors, args.draft_len)
        watched = await _load(server, client, traffic, args)
    return _report(traffic, watched, args), _faults(traffic, watched, args)


async def _touch(client: Client, conversations: list[Conversation]) -> None:
    """Have every page of both pools written once: memory that is never used is never allocated."""
    tiers = (await client.get("/vericache"))["ranks"][0]["tiers"]
    left = tiers["device"] + tiers["host"]
    documents = [c.requests[0] for c in conversations if c.kind == "document"]
    for salt in range(left):
        for request in documents:
            if left <= 0:
                return
            await client.ask(request, Way(salt=f"touch-{salt}"))
            left -= len(request.prompt)


async def _load(
    server: Server, client: Client, traffic: Traffic, args: argparse.Namespace
) -> Watched:
    watched, tally = Watched(), traffic.tally
    before = await asyncio.to_thread(counters, server.url)
    started = time.monotonic()
    pause_at = args.pause
    async with asyncio.TaskGroup() as clients:
        for number in range(args.concurrency):
            clients.create_task(traffic.work(number))
        while (now := time.monotonic() - started) < 60 * args.minutes:
            if now >= pause_at:
                await traffic.drain()
                watched.idle.append(await _idle(client, flush=len(watched.idle) % 2 == 1))
                say(f"{now:.0f} s: idle, {watched.idle[-1] or 'nothing taken'}; {tally.requests}")
                pause_at = time.monotonic() - started + args.pause
                traffic.resume()
            await asyncio.sleep(SAMPLE_SECONDS)
            memory = await asyncio.to_thread(server.memory)
            watched.pss.append((round(time.monotonic() - started, 1), memory.pss))
        await traffic.drain()
        traffic.end()
    watched.seconds = time.monotonic() - started
    after = await asyncio.to_thread(counters, server.url)
    watched.counters = {name: value - before.get(name, 0) for name, value in after.items()}
    watched.idle.append(await _idle(client, flush=True))
    watched.spoiled = SPOILED in server.log.read_text(errors="replace")
    return watched


async def _idle(client: Client, flush: bool) -> dict[str, int]:
    """What is still taken of an idle server a minute later: slots and requests, by name.

    Args:
        flush: empty the cache too; then every slot of both pools must be free.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        if flush:
            try:
                await client.post("/flush_cache?timeout=30", {})
            except Refused as error:
                say(f"not flushed: {error}")
        load = (await client.get("/v1/loads"))["loads"][0]
        tiers = (await client.get("/vericache"))["ranks"][0]["tiers"]
        taken = {
            name: load[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        }
        taken |= {name: tiers[name] for name in ("compressed", "offloaded", "staged")}
        if flush:
            taken |= {pool: tiers[pool] - tiers[f"{pool}_free"] for pool in ("device", "host")}
        taken = {name: value for name, value in taken.items() if value}
        if not taken or time.monotonic() > deadline:
            return taken
        await asyncio.sleep(0.2)


def _growth(watched: Watched) -> float:
    early, late = watched.levels()
    return late / early - 1


def _faults(traffic: Traffic, watched: Watched, args: argparse.Namespace) -> list[str]:
    tally, change = traffic.tally, watched.counters
    wrong = {
        f"{tally.mismatches} mismatches": tally.mismatches,
        f"{tally.failed} requests failed": tally.failed,
        f"taken when idle: {watched.idle}": any(watched.idle),
        f"memory grew by {_growth(watched):.1%}": _growth(watched) > MOST_GROWTH,
    }
    moved = change["host_reads"] if args.staging == "in-place" else change["staged_tokens"]
    shown = {
        "nothing was offloaded": change["offloads"],
        "no verify pass read full KV from the host": moved,
        "nothing was drafted, accepted and rejected": change["drafted"] > change["accepted"] > 0,
        "no prompt was found on the host": tally.host_hits,
        "nothing was aborted": tally.cut["abort"],
        "nobody left": tally.cut["leave"],
        "no copy was late": watched.spoiled or not (args.delay_ms or args.corrupt),
        "nothing was drafted before full KV arrived": args.tier != "remote" or change["proposed"],
    }
    return [text for text, bad in wrong.items() if bad] + [t for t, ok in shown.items() if not ok]


def _report(traffic: Traffic, watched: Watched, args: argparse.Namespace) -> dict[str, Any]:
    tally, requests = traffic.tally, traffic.tally.requests.total()
    early, late = watched.levels()
    return {
        "minutes": round(watched.seconds / 60, 2),
        "requests": requests,
        "by_kind": dict(tally.requests),
        "requests_per_s": round(requests / watched.seconds, 3),
        "aborted": tally.cut.total(),
        "by_way": dict(tally.cut),
        "mismatches": tally.mismatches,
        "failed": tally.failed,
        "pss_start": int(early),
        "pss_end": int(late),
        "pss_growth": round(_growth(watched), 4),
        "slots_leaked": sum(sum(taken.values()) for taken in watched.idle),
        "idle": watched.idle,
        "retractions": tally.retractions,
        "host_hits": tally.host_hits,
        "acceptance": acceptance(watched.counters),
        "counters": watched.counters,
        "examples": tally.examples,
        "pss": watched.pss,
        "run": {key: str(value) for key, value in vars(args).items()},
    }


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)

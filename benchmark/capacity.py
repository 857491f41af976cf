"""Requests in flight and output tokens/s when the device holds only two of their contexts.

The device's KV pool is capped. Every prompt has been seen before and is in host memory (HiCache).
A server with VeriCache off, same kernels and same host memory, runs the same requests. The rate is
output tokens over the time from sending to the last token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prompts as texts
from _client import stream_all
from _engines import Engine, vericache
from _sweep import counters, say
from servers import Server
from sglang_vericache.embedded_model import ensure_embedded_model

POLL_SECONDS = 0.05


@dataclass
class Outcome:
    """What one server did.

    Attributes:
        rates: output tokens/s of every repetition.
        ids: token ids of every request.
        in_flight: most requests running at once.
        peak_tokens: most device slots holding anything at once.
        retractions: as the server counts them in its answers.
        counters: change of VeriCache's counters.
    """

    rates: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    in_flight: int = 0
    peak_tokens: int = 0
    retractions: int = 0
    counters: dict[str, int] = field(default_factory=dict)


class Watch(threading.Thread):
    """Polls a server's load until stopped."""

    def __init__(self, url: str, outcome: Outcome):
        super().__init__(daemon=True)
        self._url, self._outcome, self._ended = url, outcome, threading.Event()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            rank = _get(f"{self._url}/vericache")["ranks"][0]
            load = _get(f"{self._url}/v1/loads")["loads"][0]
            tiers = rank.get("tiers")
            used = tiers["device"] - tiers["device_free"] if tiers else load["num_used_tokens"]
            self._outcome.peak_tokens = max(self._outcome.peak_tokens, used)
            self._outcome.in_flight = max(self._outcome.in_flight, load["num_running_reqs"])


def main() -> None:
    args = _arguments()
    model = args.model_path or ensure_embedded_model()
    corpus = texts.Corpus(texts.load_tokenizer(model))
    prompts = corpus.prompts(args.requests, args.context)
    limits = (
        *("--max-total-tokens", str(args.cap)),
        *("--hicache-ratio", str(2 * args.requests * args.context / args.cap)),
    )
    off = vericache("off", model, args.dtype, ("--enable-hierarchical-cache", *limits))
    drafting = (
        *("--vericache-tier", "host", "--vericache-compressor", args.compressor),
        *("--vericache-ratio", args.ratio, "--vericache-draft-len", args.draft_len),
        *("--vericache-staging", args.staging),
    )
    on = vericache("on", model, args.dtype, (*drafting, *limits))
    plain, tiered = (_run(engine, prompts, args) for engine in (off, on))
    ratio = max(tiered.rates) / max(plain.rates)
    identical = plain.ids == tiered.ids
    token_bytes = _bytes_per_token(model, args.dtype)
    for name, outcome in (("off", plain), ("on", tiered)):
        print(
            f"{name:>4}: {max(outcome.rates):6.1f} output tokens/s, {outcome.in_flight} in flight, "
            f"{outcome.peak_tokens} of {args.cap} device slots, {outcome.retractions} retractions"
        )
    print(f"on/off {ratio:.2f}, identical: {identical}")
    result = {
        "in_flight": tiered.in_flight,
        "retractions": tiered.retractions,
        "ratio": round(ratio, 3),
        "identical": identical,
        "peak_device_kv_bytes": tiered.peak_tokens * token_bytes,
        "cap_bytes": args.cap * token_bytes,
        "off": {"rates": plain.rates, "in_flight": plain.in_flight},
        "on": {"rates": tiered.rates, "counters": tiered.counters},
        "run": {key: str(value) for key, value in vars(args).items()},
    }
    text = json.dumps(result)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    if not identical:
        sys.exit("VeriCache's token ids differ from those of the server without it")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cap", type=int, default=16_384, help="device slots for KV (default: 16384)")
    add("--requests", type=int, default=8, help="at once (default: 8)")
    add("--context", type=int, default=6000, help="tokens of each prompt (default: 6000)")
    add("--new-tokens", type=int, default=128, help="of each answer (default: 128)")
    add("--repeats", type=int, default=3, help="of the whole run, the best counts (default: 3)")
    add("--compressor", default="snapkv", help="default: snapkv")
    add("--ratio", default="0.1", help="kept share of a draft view (default: 0.1)")
    add("--draft-len", default="auto", help="tokens per draft, or auto (default: auto)")
    add("--staging", choices=("copy", "in-place"), default="in-place", help="default: in-place")
    add("--dtype", default="bfloat16", help="default: bfloat16")
    add("--model-path", type=Path, help="default: the embedded model")
    add("--json", type=Path, metavar="FILE", help="also write the JSON line there")
    return parser.parse_args()


def _run(engine: Engine, prompts: list[list[int]], args: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    say(f"{engine.name}: starting")
    # The command's own pool size comes first; the last one given counts.
    with Server(engine.command, env=engine.env, name=engine.name) as server:
        for prompt in prompts:
            stream_all(server.url, engine.api, [prompt], 1)
        say(f"{engine.name}: {len(prompts)} prompts are warm")
        before = counters(server.url)
        for _ in range(args.repeats):
            with Watch(server.url, outcome):
                started = time.perf_counter()
                streams = stream_all(server.url, engine.api, prompts, args.new_tokens)
                seconds = time.perf_counter() - started
            ids = [stream.ids for stream in streams]
            assert not outcome.ids or ids == outcome.ids, "repetitions differ in their token ids"
            outcome.ids = ids
            if any(stream.cached < len(prompts[0]) - 1 for stream in streams):
                raise RuntimeError(f"{engine.name}: a prompt was not cached")
            outcome.retractions += sum(stream.retractions for stream in streams)
            outcome.rates.append(round(len(prompts) * args.new_tokens / seconds, 2))
            say(f"{engine.name}: {outcome.rates[-1]:.1f} output tokens/s")
        after = counters(server.url)
    outcome.counters = {name: value - before.get(name, 0) for name, value in after.items()}
    return outcome


def _bytes_per_token(model: Path, dtype: str) -> int:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or size // config["num_attention_heads"]
    width = 4 if dtype == "float32" else 2
    return int(2 * config["num_hidden_layers"] * heads * head_dim * width)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)

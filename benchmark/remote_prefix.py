"""Prompts whose KV is in a remote store only: drafting meanwhile against fetching first.

Every prompt has been seen before; then device and host forget it. Two ways to answer it again:

    fetch   VeriCache off: fetch the full KV from the store, then decode
    remote  --vericache-tier remote: fetch the compressed copy, draft on it while the full KV comes
            in, verify what was drafted

The store's link is throttled to each of the given rates. Times are those of one request after the
other, from sending: to its first token, which is verified in both ways, and to its last. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import prompts as texts
from _client import Stream, stream_all
from _engines import Engine, vericache
from _sweep import counters, say
from servers import Server, free_port
from sglang_vericache.embedded_model import ensure_embedded_model

SCRIPT = Path(__file__).parents[1] / "scripts" / "mooncake_store.py"
EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
PAGE = 64
# Nothing was written to the store for this long: all is there.
QUIET_SECONDS = 2.0


@dataclass
class Outcome:
    """What one server did with one rate of the link.

    Attributes:
        first, total: seconds to the first and to the last token, of every answer.
        ids: token ids of the answers, by prompt.
        counters: change of VeriCache's counters.
    """

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def medians(self) -> dict[str, float]:
        """Median seconds."""
        return {
            "first_token_s": round(statistics.median(self.first), 3),
            "total_s": round(statistics.median(self.total), 3),
        }


def main() -> None:
    args = _arguments()
    model = args.model_path or ensure_embedded_model()
    corpus = texts.Corpus(texts.load_tokenizer(model))
    prompts = corpus.prompts(args.requests, args.context)
    rows = {}
    identical = True
    with _store(args) as (flags, env):
        _run(_engine("remote", model, args, flags, env, 0.0), prompts, args, fill=True)
        for rate in args.rates:
            outcomes = {
                name: _run(_engine(name, model, args, flags, env, rate), prompts, args)
                for name in ("fetch", "remote")
            }
            fetch, remote = outcomes["fetch"], outcomes["remote"]
            identical &= fetch.ids == remote.ids
            ratio = statistics.median(fetch.total) / statistics.median(remote.total)
            rows[str(rate)] = {
                "fetch": fetch.medians(),
                "remote": remote.medians(),
                "speedup": round(ratio, 3),
                "identical": fetch.ids == remote.ids,
                "counters": {
                    name: remote.counters[name]
                    for name in ("provisional", "proposed", "drafted", "accepted")
                },
            }
            print(
                f"{rate:>5} GB/s: fetch {fetch.medians()}, remote {remote.medians()}, "
                f"{ratio:.2f}x, identical: {fetch.ids == remote.ids}"
            )
    if not any(row["counters"]["proposed"] for row in rows.values()):
        raise RuntimeError("nothing was drafted before the full KV had arrived")
    result = {
        "store": args.store,
        "rates": rows,
        "identical": identical,
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
    add("--store", choices=("file", "mooncake"), default="file", help="default: file")
    rates = [0.1, 0.5, 1.0]
    add("--rates", type=float, nargs="+", default=rates, help="GB/s (default: 0.1 0.5 1)")
    add("--requests", type=int, default=4, help="prompts (default: 4)")
    add("--context", type=int, default=6000, help="tokens of each prompt (default: 6000)")
    add("--new-tokens", type=int, default=64, help="of each answer (default: 64)")
    add("--repeats", type=int, default=3, help="of every prompt (default: 3)")
    add("--compressor", default="snapkv", help="default: snapkv")
    add("--ratio", default="0.1", help="kept share of the compressed copy (default: 0.1)")
    add("--dtype", default="bfloat16", help="default: bfloat16")
    add("--model-path", type=Path, help="default: the embedded model")
    add("--json", type=Path, metavar="FILE", help="also write the JSON line there")
    return parser.parse_args()


@contextlib.contextmanager
def _store(args: argparse.Namespace) -> Iterator[tuple[dict[str, object], dict[str, str]]]:
    """A store for the run: settings of the backend, and environment of the servers."""
    if args.store == "file":
        with tempfile.TemporaryDirectory() as folder:
            yield {}, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": folder}
        return
    port = free_port()
    command = [sys.executable, str(SCRIPT), "--port", str(port), "--metrics-port"]
    command += [str(free_port()), "--segment-port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            flags = shlex.split(process.stdout.readline())
            if not flags:
                raise RuntimeError("the Mooncake store ended before it was ready")
            settings = json.loads(flags[flags.index(EXTRA_CONFIG) + 1])
            yield settings, {}
        finally:
            process.terminate()


def _engine(
    name: str,
    model: Path,
    args: argparse.Namespace,
    settings: dict[str, object],
    env: dict[str, str],
    rate: float,
) -> Engine:
    extra = settings | {"vericache": {"link_gb_per_s": rate}}
    flags = (
        *("--page-size", str(PAGE), "--hicache-ratio", "2"),
        *("--max-total-tokens", str(2 * args.requests * args.context)),
        *("--hicache-storage-backend", args.store),
        *(EXTRA_CONFIG, json.dumps(extra)),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    )
    if name == "fetch":
        engine = vericache("off", model, args.dtype, ("--enable-hierarchical-cache", *flags))
    else:
        drafting = (
            *("--vericache-tier", "remote", "--vericache-compressor", args.compressor),
            *("--vericache-ratio", args.ratio),
        )
        engine = vericache("on", model, args.dtype, (*drafting, *flags))
    return Engine(name, engine.command, engine.api, {**engine.env, **env})


def _run(
    engine: Engine, prompts: list[list[int]], args: argparse.Namespace, fill: bool = False
) -> Outcome:
    outcome = Outcome()
    with Server(engine.command, env=engine.env, name=engine.name) as server:
        if fill:
            for prompt in prompts:
                stream_all(server.url, engine.api, [prompt], args.new_tokens)
            _wait_until_written(server.url)
            say(f"{len(prompts)} prompts are in the store")
            return outcome
        before = counters(server.url)
        for repeat in range(args.repeats):
            for prompt in prompts:
                _forget(server.url)
                started = time.perf_counter()
                (stream,) = stream_all(server.url, engine.api, [prompt], args.new_tokens)
                if stream.cached < len(prompt) - PAGE:
                    raise RuntimeError(f"{engine.name}: a prompt was not in the store")
                _note(outcome, stream, started, repeat)
        after = counters(server.url)
    outcome.counters = {name: value - before.get(name, 0) for name, value in after.items()}
    say(f"{engine.name}: {outcome.medians()}")
    return outcome


def _note(outcome: Outcome, stream: Stream, started: float, repeat: int) -> None:
    outcome.first.append(stream.times[0] - started)
    outcome.total.append(stream.times[-1] - started)
    if repeat == 0:
        outcome.ids.append(stream.ids)
    else:
        assert stream.ids in outcome.ids, "repetitions differ in their token ids"


def _forget(url: str) -> None:
    """Have device and host forget everything; the store does not."""
    request = urllib.request.Request(f"{url}/flush_cache?timeout=30", method="POST")
    urllib.request.urlopen(request, timeout=60).close()


def _wait_until_written(url: str) -> None:
    """Wait until the store has taken all there is to write."""
    written, since = -1, time.monotonic()
    while time.monotonic() < since + QUIET_SECONDS:
        with urllib.request.urlopen(f"{url}/vericache", timeout=60) as response:
            now = json.load(response)["ranks"][0]["storage"]["written"]
        if now != written:
            written, since = now, time.monotonic()
        time.sleep(0.2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)

"""The proof on one screen (case Z7): one server decodes long prompts from full KV, and with each
compressor from compressed KV alone and with VeriCache.

full       plain decoding from the full KV cache (``enabled: false``)
alone      decoding from the compressed KV cache, unverified (``unverified: true``)
VeriCache  drafting from the compressed cache, verifying against the full one

Fails if a text of VeriCache differs from the full one, or if nothing was drafted. The last line is
the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import prompts as texts
from _sweep import counters, say
from _tasks import Task, tasks
from servers import Server
from sglang_vericache.embedded_model import ensure_embedded_model

FULL: dict[str, Any] = {"enabled": False}


@dataclass(frozen=True)
class Method:
    """A compressor and the share of the KV that it keeps."""

    compressor: str
    ratio: float

    @classmethod
    def parse(cls, text: str) -> Method:
        """From ``NAME`` or ``NAME:RATIO``."""
        name, _, ratio = text.partition(":")
        return cls(name, float(ratio or 1))

    def __str__(self) -> str:
        return self.compressor if self.ratio == 1 else f"{self.compressor} {self.ratio:.0%}"

    @property
    def options(self) -> dict[str, Any]:
        """Keys of a request's ``vericache``."""
        return {"compressor": self.compressor, "ratio": self.ratio}


# What drops most, and what packs closest.
METHODS = "snapkv:0.1,snapkv:0.05,kivi2"


@dataclass(frozen=True)
class Run:
    """All tasks decoded at once, one way.

    Attributes:
        answers: text by task.
        meta: SGLang's ``meta_info`` by task.
        tokens_per_s: tokens of all answers over the time until the last one; prompts cached.
        kv_bytes: KV bytes that attention read per answered token.
    """

    answers: dict[str, str]
    meta: dict[str, dict[str, Any]]
    tokens_per_s: float
    kv_bytes: float


@dataclass(frozen=True)
class Shown:
    """What one method gave without and with verification."""

    method: Method
    alone: Run
    exact: Run


def main() -> None:
    args = _arguments()
    methods = [Method.parse(text) for text in args.methods.split(",")]
    model = ensure_embedded_model()
    work = tasks(texts.load_tokenizer(model), args.context)
    command = [
        *(sys.executable, "-m", "sglang_vericache.launch_server", "--model-path", str(model)),
        *("--vericache-allow-unverified", "--vericache-draft-len", args.draft_len),
        *("--vericache-compressor", methods[0].compressor),
        *("--vericache-ratio", str(max(method.ratio for method in methods))),
    ]
    server = Server(command, name="demo")
    say(f"starting the server; it writes to {server.log}")
    with server:
        say(f"reading {len(work)} prompts of about {args.context} tokens")
        decode(server.url, work, FULL, 1)
        say("decoding from full KV")
        full = decode(server.url, work, FULL, args.new_tokens)
        shown = []
        for method in methods:
            say(f"decoding with {method}")
            alone = decode(server.url, work, method.options | {"unverified": True}, args.new_tokens)
            exact = decode(server.url, work, method.options, args.new_tokens)
            shown.append(Shown(method, alone, exact))
    report(full, shown, args.context)
    result = summary(full, shown)
    print(json.dumps(result))
    if not result["identical"]:
        sys.exit("VeriCache's text differs from that of the full KV cache")
    if not any(any(shares.values()) for shares in result["acceptance"].values()):
        sys.exit("nothing was shown: no draft was accepted")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--context", type=int, default=5000, help="tokens per prompt (default: 5000)")
    add("--new-tokens", type=int, default=96, help="longest answer in tokens (default: 96)")
    words = "compressors, each with the share of the KV cache that it keeps unless that is 1"
    add("--methods", default=METHODS, metavar="NAME[:RATIO],...", help=f"{words} ({METHODS})")
    add("--draft-len", default="auto", help="tokens per draft, or auto (default: auto)")
    return parser.parse_args()


def decode(url: str, work: list[Task], options: dict[str, Any], max_tokens: int) -> Run:
    """Send all tasks at once and wait for every answer."""
    before = counters(url)
    started = time.perf_counter()
    with ThreadPoolExecutor(len(work)) as pool:
        requests = [(f"{url}{t.path}", t.request(options, max_tokens)) for t in work]
        responses = list(pool.map(lambda request: _post(*request), requests))
    seconds = time.perf_counter() - started
    after = counters(url)
    meta = {t.name: t.meta(response) for t, response in zip(work, responses, strict=True)}
    tokens = sum(info["completion_tokens"] for info in meta.values())
    return Run(
        answers={t.name: t.answer(response) for t, response in zip(work, responses, strict=True)},
        meta=meta,
        tokens_per_s=tokens / seconds,
        kv_bytes=(after["kv_bytes_read"] - before["kv_bytes_read"]) / tokens,
    )


def acceptance(meta: dict[str, Any]) -> float | None:
    """Accepted share of a request's drafts; None if it made none."""
    counts = meta["vericache"]
    return round(counts["accepted"] / counts["drafted"], 3) if counts["drafted"] else None


def report(full: Run, shown: list[Shown], context: int) -> None:
    """Print the screen."""
    print(f"\n{f'prompt (about {context} tokens)':32} ", end="")
    print(f"{'compressor':16} {'alone':>10} {'VeriCache':>10} {'accepted':>9}")
    for task, text in full.answers.items():
        for i, (method, alone, exact) in enumerate((s.method, s.alone, s.exact) for s in shown):
            accepted = acceptance(exact.meta[task])
            words = [_verdict(run.answers[task], text) for run in (alone, exact)]
            share = "-" if accepted is None else f"{accepted:.2f}"
            title = "" if i else task
            print(f"{title:32} {method!s:16} {words[0]:>10} {words[1]:>10} {share:>9}")
    print(f"\n{'all prompts at once':32} {'compressor':16} {'alone':>10} {'VeriCache':>10}")
    print(f"{'tokens/s':32} {'none':16} {full.tokens_per_s:>10.1f}")
    for s in shown:
        rates = f"{s.alone.tokens_per_s:>10.1f} {s.exact.tokens_per_s:>10.1f}"
        print(f"{'':32} {s.method!s:16} {rates}")
    print(f"{'KV read per token, MB':32} {'none':16} {full.kv_bytes / 1e6:>10.1f}")
    for s in shown:
        read = f"{s.alone.kv_bytes / 1e6:>10.1f} {s.exact.kv_bytes / 1e6:>10.1f}"
        print(f"{'':32} {s.method!s:16} {read}")
    for task, text in full.answers.items():
        broken = [s for s in shown if s.alone.answers[task] != text]
        if broken:
            print(f"\n{task}: where the text of {broken[-1].method} alone breaks")
            print(difference(text, broken[-1].alone.answers[task]))
    print()


def difference(full: str, lossy: str, width: int = 72) -> str:
    """Both texts around their first difference, on one line each."""
    same = next(
        (i for i, (a, b) in enumerate(zip(full, lossy, strict=False)) if a != b),
        min(len(full), len(lossy)),
    )
    start = max(0, same - width // 3)
    cuts = {"full ": full, "alone": lossy}
    lines = [f"  {name} {text[start : start + width]!r}" for name, text in cuts.items()]
    return "\n".join(lines)


def summary(full: Run, shown: list[Shown]) -> dict[str, Any]:
    """The result for machines, by method."""

    def same(run: Run) -> dict[str, bool]:
        return {task: run.answers[task] == text for task, text in full.answers.items()}

    def rates(of: Callable[[Run], float]) -> dict[str, Any]:
        by_method = {str(s.method): {"alone": of(s.alone), "vericache": of(s.exact)} for s in shown}
        return {"full": of(full), **by_method}

    return {
        "identical": all(all(same(s.exact).values()) for s in shown),
        "alone_identical": {str(s.method): same(s.alone) for s in shown},
        "acceptance": {
            str(s.method): {task: acceptance(meta) for task, meta in s.exact.meta.items()}
            for s in shown
        },
        "tokens_per_s": rates(lambda run: round(run.tokens_per_s, 1)),
        "kv_bytes_per_token": rates(lambda run: round(run.kv_bytes)),
    }


def _verdict(text: str, full: str) -> str:
    return "identical" if text == full else "DIFFERENT"


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST JSON.

    Raises:
        RuntimeError: the server refused; holds its message.
    """
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read().decode()}") from None


if __name__ == "__main__":
    main()

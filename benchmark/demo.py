"""The proof on one screen: long prompts decoded three ways by one server.

full      plain decoding from the full KV cache (``enabled: false``)
lossy     decoding from the compressed KV cache, unverified (``unverified: true``)
vericache drafting from the compressed cache, verifying against the full one

Fails if VeriCache's text differs from the full one, or if it drafted nothing. The last line is
the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import prompts as texts
from _sweep import counters, say
from _tasks import Task, tasks
from servers import Server
from sglang_vericache.embedded_model import ensure_embedded_model

WAYS: dict[str, dict[str, Any]] = {
    "full": {"enabled": False},
    "lossy": {"unverified": True},
    "vericache": {},
}


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


def main() -> None:
    args = _arguments()
    model = ensure_embedded_model()
    work = tasks(texts.load_tokenizer(model), args.context)
    command = [
        *(sys.executable, "-m", "sglang_vericache.launch_server", "--model-path", str(model)),
        *("--vericache-allow-unverified", "--vericache-ratio", str(args.ratio)),
        *("--vericache-draft-len", args.draft_len),
    ]
    say("starting the server")
    with Server(command, name="demo") as server:
        say(f"reading {len(work)} prompts of about {args.context} tokens")
        decode(server.url, work, {"enabled": False}, 1)
        runs = {}
        for way, options in WAYS.items():
            say(f"decoding: {way}")
            runs[way] = decode(server.url, work, options, args.new_tokens)
    report(runs, args.context)
    result = summary(runs)
    print(json.dumps(result))
    if not result["identical"]:
        sys.exit("VeriCache's text differs from that of the full KV cache")
    if not any(result["acceptance"].values()):
        sys.exit("nothing was shown: no draft was accepted")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--context", type=int, default=5000, help="tokens per prompt (default: 5000)")
    add("--new-tokens", type=int, default=96, help="longest answer in tokens (default: 96)")
    add("--ratio", type=float, default=0.1, help="kept share of the KV cache (default: 0.1)")
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


def report(runs: dict[str, Run], context: int) -> None:
    """Print the screen."""
    full, lossy, exact = runs["full"], runs["lossy"], runs["vericache"]
    print(
        f"\n{'prompt (about ' + str(context) + ' tokens)':32} {'lossy':>10} {'VeriCache':>10}",
        end="",
    )
    print(f" {'acceptance':>11}")
    for task, text in full.answers.items():
        accepted = acceptance(exact.meta[task])
        words = [_verdict(run.answers[task], text) for run in (lossy, exact)]
        shown = "-" if accepted is None else f"{accepted:.2f}"
        print(f"{task:32} {words[0]:>10} {words[1]:>10} {shown:>11}")
    print(f"\n{'all prompts at once':32} {'full KV':>10} {'lossy':>10} {'VeriCache':>10}")
    print(f"{'tokens/s':32} " + " ".join(f"{run.tokens_per_s:>10.1f}" for run in runs.values()))
    print(
        f"{'KV read per token, MB':32} "
        + " ".join(f"{run.kv_bytes / 1e6:>10.1f}" for run in runs.values())
    )
    for task, text in full.answers.items():
        if lossy.answers[task] != text:
            print(f"\n{task}: where the unverified text breaks")
            print(difference(text, lossy.answers[task]))
    print()


def difference(full: str, lossy: str, width: int = 72) -> str:
    """Both texts around their first difference, on one line each."""
    same = next(
        (i for i, (a, b) in enumerate(zip(full, lossy, strict=False)) if a != b),
        min(len(full), len(lossy)),
    )
    start = max(0, same - width // 3)
    cuts = {"full ": full, "lossy": lossy}
    lines = [f"  {name} {text[start : start + width]!r}" for name, text in cuts.items()]
    return "\n".join(lines)


def summary(runs: dict[str, Run]) -> dict[str, Any]:
    """The result for machines."""
    full = runs["full"].answers
    same = {way: {t: run.answers[t] == full[t] for t in full} for way, run in runs.items()}
    return {
        "identical": all(same["vericache"].values()),
        "lossy_identical": same["lossy"],
        "acceptance": {t: acceptance(meta) for t, meta in runs["vericache"].meta.items()},
        "tokens_per_s": {way: round(run.tokens_per_s, 1) for way, run in runs.items()},
        "kv_bytes_per_token": {way: round(run.kv_bytes) for way, run in runs.items()},
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

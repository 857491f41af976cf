"""Measure one running server over a grid of batch sizes and context lengths."""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from _client import Stream, decode_rate, stream_all
from _engines import Engine
from servers import Server

# A cell that took this long (a slow server) is not repeated.
LONG_SECONDS = 60.0
# Of a warmed prompt the server may compute this many tokens again: vLLM caches blocks of 128.
UNCACHED_TOKENS = 128

Prompt = Sequence[int]


@dataclass(frozen=True)
class Cell:
    """``batch`` concurrent requests with prompts of ``context`` tokens each."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """From ``BATCHxCONTEXT``, e.g. ``8x6000``."""
        batch, context = text.lower().split("x")
        return cls(int(batch), int(context))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


@dataclass
class Measured:
    """One cell on one server.

    Attributes:
        rates: decode tokens/s of every repetition.
        ids: token ids of every request; empty lists where the API does not give them.
        counters: change of VeriCache's counters over the cell; empty on other servers.
    """

    rates: list[float]
    ids: list[list[int]]
    counters: dict[str, int]

    @property
    def best(self) -> float:
        return max(self.rates)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


@dataclass
class Sweep:
    """All cells of one server.

    Attributes:
        cells: what was measured, by cell.
        prefill: tokens/s of cold prompts, by context length.
        pss, peak_rss: highest values seen, bytes; see ``servers.Memory``.
    """

    cells: dict[Cell, Measured] = field(default_factory=dict)
    prefill: dict[int, float] = field(default_factory=dict)
    pss: int = 0
    peak_rss: int = 0


def sweep(
    engine: Engine,
    cells: Sequence[Cell],
    prompts: dict[int, list[Prompt]],
    new_tokens: int,
    repeats: int,
) -> Sweep:
    """Start ``engine``, measure every cell, stop it.

    Per context length all prompts are sent once for one token, which measures prefill and fills
    the prefix cache; then each batch size decodes the first prompts of them.

    Raises:
        RuntimeError: a prompt was not in the prefix cache when decoding was measured.
        servers.ServerFailed: the server did not start.
    """
    result = Sweep()
    say(f"{engine.name}: starting")
    with Server(engine.command, env=engine.env, name=engine.name) as server:
        for context, batches in _by_context(cells):
            result.prefill[context] = _prefill(server.url, engine, prompts[context])
            say(f"{engine.name} prefill {context}: {result.prefill[context]:.0f} tokens/s")
            for cell in batches:
                measured = _measure(server.url, engine, cell, prompts, new_tokens, repeats)
                result.cells[cell] = measured
                rates = " ".join(f"{rate:.1f}" for rate in measured.rates)
                accepted = acceptance(measured.counters)
                note = "" if accepted is None else f", acceptance {accepted:.2f}"
                say(f"{engine.name} {cell}: {rates} tokens/s{note}")
            memory = server.memory()
            result.pss = max(result.pss, memory.pss)
            result.peak_rss = max(result.peak_rss, memory.peak_rss)
    return result


def counters(url: str) -> dict[str, int]:
    """VeriCache's counts so far (no shares, no lists), ``{}`` on a server that has none."""
    try:
        with urllib.request.urlopen(f"{url}/vericache", timeout=30) as response:
            found: dict[str, Any] = json.load(response).get("counters") or {}
    except urllib.error.HTTPError:
        return {}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def acceptance(change: dict[str, int]) -> float | None:
    """Accepted share of verified drafts; None without drafts."""
    drafted = change.get("drafted")
    return change["accepted"] / drafted if drafted else None


def say(text: str) -> None:
    """Progress goes to stderr; stdout holds results."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _by_context(cells: Sequence[Cell]) -> Iterator[tuple[int, list[Cell]]]:
    for context in sorted({cell.context for cell in cells}):
        yield context, [cell for cell in cells if cell.context == context]


def _prefill(url: str, engine: Engine, prompts: list[Prompt]) -> float:
    """Prompt tokens per second of all prompts at once, from sending to the last first token."""
    started = time.perf_counter()
    streams = stream_all(url, engine.api, prompts, 1)
    seconds = max(stream.times[0] for stream in streams) - started
    if any(stream.cached > UNCACHED_TOKENS for stream in streams):
        raise RuntimeError(f"{engine.name}: prompts were cached before prefill was measured")
    return sum(map(len, prompts)) / seconds


def _measure(
    url: str,
    engine: Engine,
    cell: Cell,
    prompts: dict[int, list[Prompt]],
    new_tokens: int,
    repeats: int,
) -> Measured:
    before = counters(url) if engine.api == "sglang" else {}
    started = time.perf_counter()
    runs: list[list[Stream]] = []
    while len(runs) < repeats and (not runs or time.perf_counter() - started < LONG_SECONDS):
        streams = stream_all(url, engine.api, prompts[cell.context][: cell.batch], new_tokens)
        if any(stream.cached < cell.context - UNCACHED_TOKENS for stream in streams):
            cached = min(stream.cached for stream in streams)
            raise RuntimeError(f"{engine.name} {cell}: only {cached} prompt tokens were cached")
        if runs and [s.ids for s in streams] != [s.ids for s in runs[0]]:
            say(f"{engine.name} {cell}: repetitions differ in their token ids")
        runs.append(streams)
    after = counters(url) if engine.api == "sglang" else {}
    return Measured(
        rates=[decode_rate(streams) for streams in runs],
        ids=[stream.ids for stream in runs[0]],
        counters={name: after[name] - before.get(name, 0) for name in after},
    )

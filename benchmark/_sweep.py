"""Measure one running server over a grid of batch sizes and context lengths."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from _client import decode_rate, stream_all
from _engines import Engine
from servers import Memory, Server

# A cell with a repetition that took this long (a slow server) is not repeated.
LONG_SECONDS = 20.0
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

    def note_memory(self, memory: Memory) -> None:
        """Keep the highest values."""
        self.pss = max(self.pss, memory.pss)
        self.peak_rss = max(self.peak_rss, memory.peak_rss)


def sweep(
    engines: Sequence[Engine],
    cells: Sequence[Cell],
    prompts: dict[int, list[Prompt]],
    new_tokens: int,
    repeats: int,
) -> dict[str, Sweep]:
    """Start ``engines``, measure every cell on each of them in turn, stop them.

    Only one of them works at a time. Repetitions go round, so that a machine whose speed drifts is
    equally fast for all. Per context length all prompts are sent once for one token, which
    measures prefill and fills the prefix cache; then each batch size decodes the first prompts.

    Returns:
        What was measured, by name of the engine.

    Raises:
        RuntimeError: a prompt was not in the prefix cache when decoding was measured.
        servers.ServerFailed: a server did not start.
    """
    results = {engine.name: Sweep() for engine in engines}
    with contextlib.ExitStack() as stack:
        running: list[tuple[Engine, Server]] = []
        for engine in engines:
            say(f"{engine.name}: starting")
            server = Server(engine.command, env=engine.env, name=engine.name)
            running.append((engine, stack.enter_context(server)))
        for context, batches in _by_context(cells):
            for engine, server in running:
                most = max(cell.batch for cell in batches)
                rate = _prefill(server.url, engine, prompts[context][:most])
                results[engine.name].prefill[context] = rate
                say(f"{engine.name} prefill {context}: {rate:.0f} tokens/s")
            for cell in batches:
                _measure(
                    running, cell, prompts[context][: cell.batch], new_tokens, repeats, results
                )
            for engine, server in running:
                results[engine.name].note_memory(server.memory())
    return results


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
    running: Sequence[tuple[Engine, Server]],
    cell: Cell,
    prompts: Sequence[Prompt],
    new_tokens: int,
    repeats: int,
    results: dict[str, Sweep],
) -> None:
    for engine, server in running:
        results[engine.name].cells[cell] = Measured([], [], _counters(engine, server))
    spent = 0.0
    for repeat in range(repeats):
        for engine, server in running:
            measured = results[engine.name].cells[cell]
            started = time.perf_counter()
            streams = stream_all(server.url, engine.api, prompts, new_tokens)
            spent = max(spent, time.perf_counter() - started)
            if any(stream.cached < cell.context - UNCACHED_TOKENS for stream in streams):
                cached = min(stream.cached for stream in streams)
                raise RuntimeError(f"{engine.name} {cell}: only {cached} prompt tokens were cached")
            ids = [stream.ids for stream in streams]
            if repeat and ids != measured.ids:
                say(f"{engine.name} {cell}: repetitions differ in their token ids")
            measured.ids = measured.ids or ids
            measured.rates.append(decode_rate(streams))
        if spent > LONG_SECONDS:
            break
    for engine, server in running:
        measured = results[engine.name].cells[cell]
        after = _counters(engine, server)
        measured.counters = {n: after[n] - measured.counters.get(n, 0) for n in after}
        rates = " ".join(f"{rate:.1f}" for rate in measured.rates)
        accepted = acceptance(measured.counters)
        note = "" if accepted is None else f", acceptance {accepted:.2f}"
        say(f"{engine.name} {cell}: {rates} tokens/s{note}")


def _counters(engine: Engine, server: Server) -> dict[str, int]:
    return counters(server.url) if engine.api == "sglang" else {}

"""Decode throughput of stock SGLang, VeriCache off and VeriCache on (and of vLLM with --peer).

The servers run one after another, off and on in turns (``_sweep.sweep``), with the same prompts:
real text, distinct, of exact length, in the prefix cache before decoding is measured. The rate of a
cell is defined in ``_client.decode_rate``. Prints one table and, as the last line, the figures as
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import prompts as texts
from _engines import Engine, stock, vericache, vllm_cpu
from _sweep import Cell, Sweep, acceptance, say, sweep
from sglang_vericache.embedded_model import ensure_embedded_model

CELLS = [Cell(batch, context) for context in (500, 2000, 6000) for batch in (1, 8, 16)]
GB = 1e9


def main() -> None:
    args = _arguments()
    model = args.model_path or ensure_embedded_model()
    corpus = texts.Corpus(texts.load_tokenizer(model))
    prompts = {
        context: corpus.prompts(max(c.batch for c in args.cells if c.context == context), context)
        for context in sorted({cell.context for cell in args.cells})
    }
    sweeps = {
        name: result
        for group, cells in _engines(args, model)
        for name, result in sweep(group, cells, prompts, args.new_tokens, args.repeats).items()
    }
    cells = {str(cell): _row(cell, sweeps) for cell in args.cells}
    _print_table(cells, list(sweeps))
    digest = texts.digest(prompt for group in prompts.values() for prompt in group)
    text = json.dumps(cells | {"run": _run_info(args, sweeps, digest)})
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    if any(row.get("identical") is False for row in cells.values()):
        sys.exit("VeriCache's token ids differ from those of the server without it")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cells = {"type": lambda text: [Cell.parse(w) for w in text.split(",")], "metavar": "BxC,..."}
    words = "{1,8,16}x{500,2000,6000}"
    add("--cells", default=CELLS, help=f"batch x context cells (default: {words})", **cells)
    add("--stock-cells", help="those that slow stock SGLang is measured on (default: all)", **cells)
    add("--new-tokens", type=int, default=64, help="tokens decoded per request (default: 64)")
    add("--repeats", type=int, default=3, help="repetitions of a short cell (default: 3)")
    add("--compressor", default="snapkv", help="of the server with VeriCache on (default: snapkv)")
    add("--ratio", default="0.1", help="kept share of a draft view (default: 0.1)")
    add("--draft-len", default="auto", help="tokens per draft, or auto (default: auto)")
    add("--lookup", default="auto", help="auto or off (default: auto)")
    add("--dtype", default="bfloat16", help="of every server (default: bfloat16)")
    add("--model-path", type=Path, help="default: the embedded model")
    add("--skip-stock", action="store_true", help="leave the slow stock server out")
    add("--skip-off", action="store_true", help="leave the server with VeriCache off out")
    add("--skip-on", action="store_true", help="leave the server with VeriCache on out")
    add("--peer", type=Path, metavar="PYTHON", help="Python of an environment with vllm-cpu 0.32")
    add("--json", type=Path, metavar="FILE", help="also write the JSON line there")
    return parser.parse_args()


def _engines(args: argparse.Namespace, model: Path) -> list[tuple[list[Engine], list[Cell]]]:
    """Groups of servers that are alive together, and their cells."""
    drafting = (
        *("--vericache-compressor", args.compressor, "--vericache-ratio", args.ratio),
        *("--vericache-draft-len", args.draft_len, "--vericache-lookup", args.lookup),
    )
    others, ours = [], []
    if not args.skip_stock:
        others.append(([stock(model, args.dtype)], args.stock_cells or args.cells))
    if args.peer:
        others.append(([vllm_cpu(args.peer, model, args.dtype)], args.cells))
    if not args.skip_off:
        ours.append(vericache("off", model, args.dtype))
    if not args.skip_on:
        ours.append(vericache("on", model, args.dtype, drafting))
    return [*others, (ours, args.cells)]


def _row(cell: Cell, sweeps: dict[str, Sweep]) -> dict[str, Any]:
    """Figures of one cell; ``identical`` compares every token id of on and off."""
    measured = {name: s.cells[cell] for name, s in sweeps.items() if cell in s.cells}
    row: dict[str, Any] = {name: round(m.best, 1) for name, m in measured.items()}
    row["median"] = {name: round(m.median, 1) for name, m in measured.items()}
    if {"off", "on"} <= measured.keys():
        row["identical"] = measured["on"].ids == measured["off"].ids
    if "on" in measured:
        change = measured["on"].counters
        accepted = acceptance(change)
        row["acceptance"] = None if accepted is None else round(accepted, 3)
        row["counters"] = change
    if {"stock", "off"} <= measured.keys():
        pairs = list(zip(measured["stock"].ids, measured["off"].ids, strict=True))
        row["stock_equal"] = f"{sum(a == b for a, b in pairs)}/{len(pairs)}"
    return row


def _print_table(cells: dict[str, dict[str, Any]], engines: list[str]) -> None:
    columns = [*engines, "on/off", "identical", "acceptance", "stock_equal"]
    print(f"{'cell':>8} " + " ".join(f"{name:>11}" for name in columns))
    for name, row in cells.items():
        shown = row | ({"on/off": round(row["on"] / row["off"], 2)} if "identical" in row else {})
        words = ("-" if shown.get(c) is None else str(shown[c]) for c in columns)
        print(f"{name:>8} " + " ".join(f"{word:>11}" for word in words))


def _run_info(args: argparse.Namespace, sweeps: dict[str, Sweep], digest: str) -> dict[str, Any]:
    """What is needed to read and repeat the figures."""
    return {
        "unit": "decode tokens/s over all requests, best repetition",
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "dtype": args.dtype,
        "compressor": args.compressor,
        "ratio": float(args.ratio),
        "draft_len": args.draft_len,
        "lookup": args.lookup,
        "prompts": digest,
        "prefill": {
            name: {str(context): round(rate) for context, rate in result.prefill.items()}
            for name, result in sweeps.items()
        },
        "pss_gb": {name: round(result.pss / GB, 2) for name, result in sweeps.items()},
        "peak_rss_gb": {name: round(result.peak_rss / GB, 2) for name, result in sweeps.items()},
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "sglang": version("sglang"),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)

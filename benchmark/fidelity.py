"""How well compressors draft: on real text, method by method and budget by budget, off the server.

Per prompt the full KV decodes a greedy text. Then each method compresses the prompt's KV, with the
code that a server runs, and one teacher-forced pass over the text (``_offline.py`` says why one is
enough) tells which tokens drafts from the view would get right: the text cut into drafts of 16
tokens, each behind verified text. Where the first of them is right, a second pass reads the whole
text from the view alone. Views are chosen once, after the prompt; ``--refresh`` chooses them anew
before every draft.

Prints one table a task; the last line is the result as JSON. Greedy texts are kept beside the
embedded model, so that all runs measure the same ones.

    .venv/bin/python benchmark/fidelity.py --json fidelity.json --plots docs/img
    .venv/bin/python benchmark/fidelity.py --tasks needle --methods snapkv --budgets 0.05,0.1
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer

from _fidelity import Memo, Outcome, measure, summary
from _fidelity_tasks import TASKS, Case, TaskTexts
from _offline import OfflineModel, Reference
from _sweep import say
from sglang_vericache import calibrations
from sglang_vericache.compressors import Dropper, Settings, create, names
from sglang_vericache.embedded_model import MANIFEST, cache_home, ensure_embedded_model

Row = dict[str, Any]
Point = tuple[str, float]


def main() -> None:
    args = _arguments()
    if args.plots:
        # Before anything is measured: it needs matplotlib.
        from _fidelity_plots import draw
    path = ensure_embedded_model()
    settings = {key: getattr(args, key) for key in ("prompts", "new_tokens", "max_context")}
    settings |= {"refresh": args.refresh}
    rows = _earlier(args.json, settings)
    model = OfflineModel(path)
    texts = TaskTexts(AutoTokenizer.from_pretrained(path))
    for task in args.tasks:
        cases = list(texts.cases(task, args.prompts + (task == "needle"), args.max_context))
        new = _measure_task(args, model, path, task, cases, texts)
        rows = _replaced(rows, new)
        if args.json:
            args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    print(f"\n{overview(rows)}")
    for task in dict.fromkeys(row["task"] for row in rows):
        print(f"\n{table([row for row in rows if row['task'] == task])}")
    if args.plots:
        draw(rows, args.plots)
    print(json.dumps({"settings": settings, "rows": rows}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    methods = [*(name for name in names() if name != "identity"), "snapkv+int4"]
    add("--methods", type=_list, default=methods, help="comma-separated; default: all registered")
    add("--budgets", type=_numbers, default=[0.02, 0.05, 0.1, 0.25], help="kept shares of tokens")
    add("--tasks", type=_list, default=list(TASKS), help=f"default: {','.join(TASKS)}")
    add("--prompts", type=int, default=3, help="of each task; needle has one more (default 3)")
    add("--new-tokens", type=int, default=64, help="of each text, at most (default 64)")
    add("--max-context", type=int, default=8000, help="longest text in a prompt, in tokens")
    add("--refresh", action="store_true", help="choose views anew before every draft")
    add("--json", type=Path, help="file for the rows; those of earlier runs in it are kept")
    add("--plots", type=Path, help="directory for fidelity-*.png")
    args = parser.parse_args()
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"unknown task {', '.join(unknown)}; supported: {', '.join(TASKS)}")
    try:
        args.droppers = dict(_droppers(args.methods, args.budgets))
    except ValueError as error:
        parser.error(str(error))
    return args


def _list(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _droppers(
    methods: Sequence[str], budgets: Sequence[float]
) -> Iterator[tuple[Point, tuple[Dropper, Settings]]]:
    """Methods at all budgets; those that keep every token once, as 1."""
    base = Settings(min_tokens=0, calibration=calibrations.find(str(ensure_embedded_model())))
    for name in methods:
        keeps_all = not create(name, base).drops
        for budget in [1.0] if keeps_all else budgets:
            settings = replace(base, ratio=budget)
            yield (name, budget), (create(name, settings), settings)


def _measure_task(
    args: argparse.Namespace,
    model: OfflineModel,
    path: Path,
    task: str,
    cases: Sequence[Case],
    texts: TaskTexts,
) -> list[Row]:
    droppers: dict[Point, tuple[Dropper, Settings]] = args.droppers
    outcomes: dict[Point, list[Outcome]] = {point: [] for point in droppers}
    right: list[bool] = []
    queries = max(dropper.query_rows for dropper, _ in droppers.values())
    for case in cases:
        say(f"{task}: reading {len(case.ids)} tokens")
        reference = _reference(model, path, case, case.new_tokens or args.new_tokens, queries)
        text = texts.decode(reference.tokens)
        say(f"{task}: {len(reference.tokens)} tokens: {text[:70]!r}")
        if case.fact:
            right.append(case.fact in text)
        memo: Memo = {}
        for point, (dropper, settings) in droppers.items():
            found = measure(model, reference, dropper, settings.budget, memo, args.refresh)
            outcomes[point].append(found)
        say(f"{task}: {len(droppers)} views measured")
        del reference, memo
        gc.collect()
    rows = []
    for (method, budget), found in outcomes.items():
        row = {"task": task, "method": method, "budget": budget} | summary(found)
        rows.append(row | ({"full_kv_right": sum(right) / len(right)} if right else {}))
    return rows


def _reference(
    model: OfflineModel, path: Path, case: Case, new_tokens: int, query_rows: int
) -> Reference:
    """Prefill, and the greedy text: from the cache if it is still what the full KV says."""
    key = f"{(path / MANIFEST).read_bytes()!r} {case.ids} {new_tokens} {torch.__version__}"
    file = cache_home() / "fidelity" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    prompt, first = model.prefill(case.ids, query_rows)
    if file.exists():
        tokens = json.loads(file.read_text())
        reference = model.reference(prompt, tokens)
        if tokens[0] == first and reference.tokens == tokens:
            return reference
    reference = model.reference(prompt, model.continue_greedily(prompt, first, new_tokens))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(reference.tokens))
    return reference


def _earlier(file: Path | None, settings: dict[str, Any]) -> list[Row]:
    if file is None or not file.exists():
        return []
    found = json.loads(file.read_text())
    if found["settings"] != settings:
        raise SystemExit(f"{file} was measured with {found['settings']}, not {settings}")
    rows: list[Row] = found["rows"]
    return rows


def _replaced(rows: list[Row], new: list[Row]) -> list[Row]:
    """``rows`` with ``new`` ones in the place of those of the same point, in the order of tasks."""

    def key(row: Row) -> tuple[str, str, float]:
        return row["task"], row["method"], row["budget"]

    merged = {key(row): row for row in rows} | {key(row): row for row in new}
    order = list(TASKS)
    return sorted(merged.values(), key=lambda row: (order.index(row["task"]), *key(row)[1:]))


def overview(rows: Sequence[Row]) -> str:
    """Agreement of all tasks beside each other, in Markdown; then the mean of accepted tokens."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    by_point: dict[Point, dict[str, Row]] = {}
    for row in rows:
        by_point.setdefault((row["method"], row["budget"]), {})[row["task"]] = row
    lines = [
        f"| method | budget | share of bytes | {' | '.join(tasks)} | mean | accepted of 8 |",
        "|---" * (len(tasks) + 5) + "|",
    ]
    for (method, budget), found in by_point.items():
        mean = {key: fmean(r[key] for r in found.values()) for key in ("agreement", "kv_share")}
        accepted = [r["accepted_8"] for r in found.values() if r["accepted_8"] is not None]
        cells = [
            *(method, _percent(budget), f"{mean['kv_share']:.3f}"),
            *(f"{found[task]['agreement']:.2f}" if task in found else "-" for task in tasks),
            *(f"{mean['agreement']:.3f}", f"{fmean(accepted):.2f}" if accepted else "-"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(budget: float) -> str:
    return "all" if budget == 1 else f"{100 * budget:g}%"


def table(rows: Sequence[Row]) -> str:
    """One task in Markdown."""
    head = rows[0]
    title = f"**{head['task']}**: {head['prompts']} prompts"
    if "full_kv_right" in head:
        title += f", of which the full KV answers {head['full_kv_right']:.0%} right"
    lines = [
        f"{title}\n",
        "| method | budget | KV bytes | share | agreement | of 8 | of 16 | identical | KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        accepted = ("-" if (n := row[f"accepted_{k}"]) is None else f"{n:.1f}" for k in (8, 16))
        cells = [
            *(row["method"], _percent(row["budget"])),
            *(f"{row['kv_bytes'] / 1e6:.2f} MB", f"{row['kv_share']:.3f}"),
            *(f"{row['agreement']:.3f}", *accepted),
            *(f"{row['identical_unverified']:.0%}", f"{row['kl']:.3f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

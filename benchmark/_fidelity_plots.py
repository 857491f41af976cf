"""PNG plots of ``fidelity.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Row = dict[str, Any]
SHOWN_BUDGETS = (0.1, 1.0)
"""Of the plot by position: one for methods that drop tokens, and all tokens for the others."""


def draw(rows: Sequence[Row], directory: Path) -> None:
    """Write ``fidelity-bytes.png`` and ``fidelity-positions.png``, one panel a task."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, plot in {"bytes": _bytes, "positions": _positions}.items():
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        methods = list(dict.fromkeys(row["method"] for row in rows))
        down = -(-len(tasks) // 2)
        figure, axes = plt.subplots(
            down, 2, figsize=(9, 0.9 + 2.7 * down), layout="constrained", squeeze=False, sharey=True
        )
        for panel in axes.flat[len(tasks) :]:
            panel.set_visible(False)
        for task, panel in zip(tasks, axes.flat, strict=False):
            panel.set_title(task, fontsize=9)
            panel.grid(alpha=0.3)
            for index, method in enumerate(methods):
                mine = [row for row in rows if (row["task"], row["method"]) == (task, method)]
                plot(panel, mine, {"color": f"C{index % 10}", "marker": "osD^vP*X"[index // 10]})
        for panel in axes[:, 0]:
            panel.set_ylabel(LABELS[plot][1])
        for panel in axes[-1]:
            panel.set_xlabel(LABELS[plot][0])
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8)
        figure.savefig(directory / f"fidelity-{name}.png", dpi=110)
        plt.close(figure)


def _bytes(axes: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    by_share = sorted(rows, key=lambda row: row["kv_share"])
    shares = [row["kv_share"] for row in by_share]
    agreement = [row["agreement"] for row in by_share]
    axes.semilogx(shares, agreement, markersize=4, label=rows[0]["method"], **style)


def _positions(axes: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    for row in rows:
        if row["budget"] in SHOWN_BUDGETS:
            chances = row["by_position"]
            at = range(1, len(chances) + 1)
            axes.plot(at, chances, markersize=3, label=row["method"], **style)


LABELS: dict[Callable[..., None], tuple[str, str]] = {
    _bytes: ("share of the full KV's bytes", "agreement of a token"),
    _positions: ("token of a draft (budget 10 %)", "chance that all so far agree"),
}

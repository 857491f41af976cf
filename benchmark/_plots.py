"""PNG plots of the sweeps of ``simulate.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Figures = dict[str, Any]


def draw(figures: Figures, directory: Path) -> None:
    """Write ``simulate-SWEEP.png`` for every sweep in ``figures``."""
    directory.mkdir(parents=True, exist_ok=True)
    for sweep, found in figures.items():
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        DRAW[sweep](axes, found)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside upper center", ncols=3, fontsize=8)
        figure.savefig(directory / f"simulate-{sweep}.png", dpi=110)
        plt.close(figure)


def _bars(axes: Any, figures: Figures) -> None:
    cells = figures["cells"]
    names = list(next(iter(cells.values())))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [model + (i - (len(names) - 1) / 2) * width for model in range(len(cells))]
        axes.bar(at, [cell[name]["gain"] for cell in cells.values()], width, label=name)
    for row in figures["reproduced"]:
        axes.axhline(row["paper"], color="black", linestyle=":", linewidth=1)
        axes.annotate(f"paper's {row['figure']}", (-0.45, row["paper"]), va="bottom", fontsize=7)
    axes.set_xticks(range(len(cells)), [name.replace(", ", "\n") for name in cells])
    axes.set_ylabel("tokens/s over full KV (x)")


def _lines(label: str) -> Callable[[Any, Figures], None]:
    def lines(axes: Any, figures: Figures) -> None:
        cells = figures["cells"]
        for name in next(iter(cells.values())):
            gains = [cell[name]["gain"] for cell in cells.values()]
            axes.plot(list(cells), gains, marker="o", markersize=4, label=name)
        if rows := figures["reproduced"]:
            at, paper = [float(row["figure"]) for row in rows], [row["paper"] for row in rows]
            axes.plot(at, paper, "k*", markersize=10, label="as published")
        axes.invert_xaxis()
        axes.set_xlabel(label)
        axes.set_ylabel("tokens/s over full KV (x)")

    return lines


def _fleet(axes: Any, figures: Figures) -> None:
    for name, cell in figures["cells"].items():
        (line,) = axes.loglog(list(cell["rate"]), list(cell["rate"].values()), "o", markersize=4)
        bound = cell["bound"]
        label = f"{name} (knee {cell['knee']})"
        axes.loglog(list(bound), list(bound.values()), color=line.get_color(), label=label)
    axes.set_xlabel("servers that share the store (line: arithmetic, dots: simulated)")
    axes.set_ylabel("tokens/s of all servers")


DRAW: dict[str, Callable[[Any, Figures], None]] = {
    "decode": _bars,
    "memory": _lines("share of usable device memory that is left for KV"),
    "link": _lines("bandwidth of device memory over that of the link"),
    "agreement": _lines("chance that a draft token equals the target's"),
    "remote": _lines("tokens of an answer"),
    "fleet": _fleet,
}

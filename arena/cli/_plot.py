"""The demo's picture: resident memory of both runs over time. The only module with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from arena.cli._report import LIMIT, Series, projection

__all__ = ["draw"]

_COLORS = {"unscoped": "#c8452f", "ticked": "#1f6f8b"}
_LABELS = {"unscoped": "scratch kept (unscoped)", "ticked": "each tick in arena.tick()"}


def draw(runs: Sequence[Series], path: Path) -> None:
    """Write a PNG, 1200 pixels wide."""
    with mpl.rc_context({"font.size": 11, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")  # a Figure alone is Agg
        axes = figure.add_subplot()
        for run in runs:
            color = _COLORS[run.name]
            axes.plot(run.seconds, run.megabytes, color=color, linewidth=2.4)
            axes.annotate(
                f"{_LABELS[run.name]}\n{_growth(run)}",
                (run.seconds[len(run.seconds) // 2], run.megabytes[len(run.megabytes) // 2]),
                xytext=(0, 14),
                textcoords="offset points",
                ha="right" if run.name == "unscoped" else "center",
                color=color,
                weight="bold",
            )
        axes.set_xlim(0, runs[0].seconds[-1])
        axes.set_ylim(0, 1.12 * max(max(run.megabytes) for run in runs))
        axes.set_ylabel("resident memory, MB")
        axes.set_xlabel(f"seconds\n\n{_caption(runs)}")
        axes.set_title("The same loop twice: what stays in memory", loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        figure.savefig(path, format="png")


def _growth(run: Series) -> str:
    grown = run.growth
    return f"{grown.slope:+.2f} MB/min" if grown else "growth unknown"


def _caption(runs: Sequence[Series]) -> str:
    fates = "; ".join(f"{run.name}: {projection(run)}" for run in runs)
    return f"Projected time to the {LIMIT / 1e3} GB limit: {fates}"

"""The picture of a watch: resident memory over time. The only module of it with matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from arena.cli._watch_report import Found, slope
from arena.cli._watched import Watched

__all__ = ["draw"]

_MIB = 1 << 20


def draw(found: Found, watched: Watched, path: Path) -> None:
    """Write a PNG, 1200 pixels wide."""
    seconds = [one.seconds for one in found.samples]
    trend = found.by_time
    with mpl.rc_context({"font.size": 11, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")  # a Figure alone is Agg
        axes = figure.add_subplot()
        axes.plot(
            seconds, [one.resident / _MIB for one in found.samples], color="#1f6f8b", linewidth=1.8
        )
        if trend.known:
            ends = [trend.start * 60, seconds[-1]]
            rise = trend.slope * (ends[1] - ends[0]) / 60
            axes.plot(
                ends,
                [(trend.level - rise) / _MIB, trend.level / _MIB],
                color="#c8452f",
                linewidth=1.2,
                linestyle="--",
            )
        if found.limit is not None and found.limit < 3 * found.samples.peak:
            axes.axhline(found.limit / _MIB, color="#888888", linewidth=1.0, linestyle=":")
        axes.set_xlabel(f"seconds\n\n{found.state}: {slope(trend, 'min')}")
        axes.set_ylabel("resident memory, MiB")
        axes.set_title(f"{watched.name} (pid {watched.pid})", loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        figure.savefig(path, format="png")

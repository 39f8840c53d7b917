"""Prints what the benchmarks measured, as tables, and keeps the rows for ``--json``."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import arena
from benchmarks._timing import Kind, Series

UNITS = {"ns": 1e9, "us": 1e6, "ms": 1e3}
BEST = "best peer"


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    quick: bool = False
    ticks: int | None = None
    only: tuple[str, ...] = ()
    plot: Path | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """One contender may take ``ratio`` times what ``against`` takes, or ``plus`` seconds more."""

    contender: str
    against: str
    ratio: float = 1.0
    plus: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure, as it stands in the JSON file."""

    bench: str
    case: str
    contender: str
    value: float
    unit: str


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    return {
        "system": platform.platform(),
        "cpu": cpu,
        "cores": psutil.cpu_count(),
        "memory_mb": round(psutil.virtual_memory().total / 1e6),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "compiler": platform.python_compiler(),
        "arena": arena.__version__,
        "gc": list(gc.get_threshold()) if gc.isenabled() else "off",
    }


def _verdict(reached: float, allowed: float, over: str) -> str:
    return f"[green]met[/], {over} to spare" if reached <= allowed else f"[red]not met[/] by {over}"


def _figure(value: float) -> str:
    return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


class Report:
    """Collects rows and prints each table as soon as its case is done."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.machine = machine()
        self.rows: list[Row] = []
        self._bench = ""

    def begin(self, bench: str, about: str) -> None:
        """Start the next benchmark."""
        self._bench = bench
        self.console.rule(f"[bold]{bench}[/]")
        self.console.print(about.strip(), highlight=False, markup=False)

    def add(self, case: str, contender: str, value: float, unit: str) -> None:
        """Keep one figure for the JSON file."""
        self.rows.append(Row(self._bench, case, contender, value, unit))

    def table(self, title: str, columns: Sequence[str]) -> Table:
        """Return an empty table: a column of text, then columns of figures."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=not index)
        return table

    def race(
        self, case: str, unit: str, series: Sequence[Series], targets: Sequence[Target] = ()
    ) -> None:
        """Print and keep what a race gave, and say which targets it met."""
        scale = UNITS[unit]
        limit = next((one for one in series if one.kind is Kind.LIMIT), None)
        peers = [one for one in series if one.kind is Kind.PEER]
        # By its better rounds: medians may be from a bad minute of one of them.
        best = min(peers, key=lambda one: one.spread().low) if peers else None
        table = self.table(case, ("contender", unit, "quartiles", "x limit", f"x {BEST}"))
        for one in series:
            taken = one.spread()
            contender = "limit" if one.kind is Kind.LIMIT else one.name
            self.add(case, contender, taken.median * scale, unit)
            label = f"limit: {one.name}" if one.kind is Kind.LIMIT else one.name
            table.add_row(
                f"[bold]{label}[/]" if one.kind is Kind.ARENA else label,
                _figure(taken.median * scale),
                f"{_figure(taken.low * scale)} - {_figure(taken.high * scale)}",
                f"{one.over(limit).median:.2f}" if limit else "",
                f"{one.over(best).median:.2f}" if best else "",
            )
        self.console.print(table)
        named = {one.name: one for one in series}
        for target in targets:
            other = best if target.against == BEST else named[target.against]
            if other is not None:
                self._judge(target, named[target.contender], other, unit)
        self.console.print()

    def _judge(self, target: Target, one: Series, other: Series, unit: str) -> None:
        if target.plus is None:
            reached = one.over(other)
            over = f"{abs(reached.median / target.ratio - 1):.0%}"
            wanted = f"at most {target.ratio:.2f}x of {other.name}"
            got = f"{reached.median:.2f}x ({reached.low:.2f} - {reached.high:.2f})"
            verdict = _verdict(reached.median, target.ratio, over)
        else:
            scale, gap = UNITS[unit], one.minus(other)
            over = f"{abs(gap.median - target.plus) * scale:.0f} {unit}"
            wanted = f"at most {target.plus * scale:.0f} {unit} over {other.name}"
            got = f"{gap.median * scale:+.0f} ({gap.low * scale:+.0f} to {gap.high * scale:+.0f})"
            verdict = _verdict(gap.median, target.plus, over)
        self.say(f"target: {one.name} {wanted}: {got}: {verdict}")

    def say(self, line: str) -> None:
        """Print one line under a table."""
        self.console.print(f"  {line}", highlight=False)

    def as_json(self) -> str:
        """Return the machine and all rows, in the shape that all benchmarks share."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps({"machine": self.machine, "rows": rows}, indent=1) + "\n"

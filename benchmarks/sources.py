"""What each source of ``arena.memory()`` costs, in a small process and in one of 1 GB.

Half of the memory is in small Python objects, half in blocks of 1 KB in the C heap; "holes": each
second one of them was freed. Milliseconds, the median of several calls in a process of its own.
The heap's sources wait for whoever has the heap: here nobody has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import UnavailableError
from benchmarks._report import Options, Report

ROOT = Path(__file__).resolve().parent.parent


def look(mb: int, kind: str, rounds: int) -> tuple[dict[str, float], float]:
    """Return the milliseconds of each source, and the resident MB."""
    command = [sys.executable, "-m", "benchmarks._sources_child", str(mb), kind, str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UnavailableError(f"a process of {mb} MB could not be looked at: {lines[-1]}")
    found = json.loads(done.stdout)
    return found["ms"], found["resident"] / 1e6


def run(options: Options, report: Report) -> None:
    """Print a row for each source."""
    large = 100 if options.quick else 1000
    cases = [(0, "live"), (large, "live"), (large, "holes")]
    columns, seen = [], []
    for mb, kind in cases:
        ms, resident = look(mb, kind, 3 if options.quick else 15)
        columns.append(f"{resident:,.0f} MB" + (f", {kind}" if mb else ""))
        seen.append(ms)
    table = report.table("milliseconds", ("source", *columns))
    for name in seen[0]:
        table.add_row(name, *(f"{ms[name]:.3f}" for ms in seen))
        for column, ms in zip(columns, seen, strict=True):
            report.add(f"{name}, {column}", "arena", ms[name], "ms")
    report.console.print(table)

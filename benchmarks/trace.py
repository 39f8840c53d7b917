"""What it costs to know what escapes: the awareness tick with sites, an audit, objects captured.

The tick is the one of `steady`: 30 strdup and 10 strbuf with 41 appends each, 117 KB in all; its
last handles are held until the next tick has begun, as a loop's variables are. All modes run the
same code in this process, switched as a user would switch them; "off" is none of them. The second
table is a tick of 1,000 strdup of 16 bytes: all handles, each with a site, and hardly anything
else.

Memory is that of a child per mode, read from outside after its ticks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

import arena
from benchmarks import UnavailableError
from benchmarks._report import Options, Report, Target
from benchmarks._steady_child import pieces
from benchmarks._steady_child import run as ticks
from benchmarks._timing import FULL, QUICK, Contender, Kind, race

ROOT = Path(__file__).resolve().parent.parent
MODES: dict[str, dict[str, str]] = {
    "off": {},
    "trace, 1 frame": {"ARENA_TRACE": "1"},
    "trace, 8 frames": {"ARENA_TRACE": "8"},
    "audit": {"ARENA_AUDIT": "1"},
    "objects": {"ARENA_OBJECTS": "1"},
    "trace 8, audit, objects": {"ARENA_TRACE": "8", "ARENA_AUDIT": "1", "ARENA_OBJECTS": "1"},
}
ALLOWED = 1.10


def switch(mode: dict[str, str]) -> None:
    """Set what the mode says, and nothing else."""
    arena.audit("256 MiB" if "ARENA_AUDIT" in mode else None)
    arena._native._objects_always("ARENA_OBJECTS" in mode)
    arena.trace(int(mode.get("ARENA_TRACE", "ARENA_AUDIT" in mode)))


def many(count: int) -> None:
    """Run one tick of 1,000 small copies, that many times."""
    text = "sixteen bytes ok"
    for _ in range(count):
        with arena.tick() as tick:
            strdup = tick.strdup
            kept = [strdup(text) for _ in range(1000)]
        del kept


def contenders(statement: str, names: dict[str, Any]) -> list[Contender]:
    """Return the statement in each mode."""
    return [
        Contender(
            name,
            Kind.PART if mode else Kind.LIMIT,
            statement,
            {**names, "switch": switch, "mode": mode},
            setup="switch(mode)",
        )
        for name, mode in MODES.items()
    ]


def resident(mode: dict[str, str], count: int) -> float:
    """Return the resident memory in MB of a child after that many ticks in this mode."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks._steady_child"],
        cwd=ROOT,
        env={**os.environ, **mode},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        print(count, file=child.stdin, flush=True)
        if not child.stdout.readline():
            raise UnavailableError(f"the child ended with exit code {child.wait()}")
        return float(psutil.Process(child.pid).memory_info().rss) / 1e6


def memory(count: int, report: Report) -> None:
    """Report the resident memory of each mode."""
    table = report.table(f"after {count} ticks", ("mode", "resident MB", "x off"))
    off = 0.0
    for name, mode in MODES.items():
        now = resident(mode, count)
        off = off or now
        report.add(f"resident memory after {count} ticks", name, now, "MB")
        table.add_row(name, f"{now:.1f}", f"{now / off:.2f}")
    report.console.print(table)


def run(options: Options, report: Report) -> None:
    """Time the modes, then look at their memory."""
    effort = QUICK if options.quick else FULL
    copied, built = pieces()
    names = {"ticks": ticks, "copied": copied, "built": built, "many": many}
    try:
        report.race(
            "the awareness tick, 117 KB",
            "us",
            race(contenders("ticks(1, copied, built)", names), effort),
            [
                Target(name, "off", ratio=ALLOWED)
                for name in ("trace, 1 frame", "trace, 8 frames", "audit", "objects")
            ],
        )
        report.race("1,000 strdup of 16 B", "us", race(contenders("many(1)", names), effort))
    finally:
        switch({})
    memory(options.ticks or (1_000 if options.quick else 20_000), report)

"""Four threads that parse and write JSON beside long-lived state: plain, tuned, and in ticks.

Each variant is a child process that is watched from outside: resident memory is read every 5 ms
while it works ("peak"), and once more a second after its threads have ended, while its state lives
("rest"). All variants run in turn, round after round, so that a bad minute of the machine is
everybody's; the figures are medians over rounds, the ratios are medians of each round's ratio to
plain. "cpu" is the time of the process on the processor, in which other processes matter less.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks import UnavailableError
from benchmarks._report import Options, Report

ROOT = Path(__file__).resolve().parent.parent
CHILD = [sys.executable, "-m", "benchmarks._objects_child"]
ROUNDS, TURNS = 5, 600
POLL, PAUSE = 0.005, 1.0
CLOSE = 1.05


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the child."""

    name: str
    mode: str = "plain"
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one run showed."""

    wall: float
    cpu: float
    peak: float
    rest: float


PLAIN, TWO, OBJECTS = "plain", "MALLOC_ARENA_MAX=2", "objects=True"


def variants(report: Report) -> list[Variant]:
    """Return those that can run here; say which cannot."""
    found = [
        Variant(PLAIN),
        Variant("malloc_trim every 10 s", "trim"),
        Variant(TWO, environment={"MALLOC_ARENA_MAX": "2"}),
    ]
    for name in ("jemalloc", "mimalloc"):
        library = ctypes.util.find_library(name)
        if library is None:
            report.say(f"{name}: left out, it is not installed (Debian: lib{name}2 or the like)")
        else:
            found.append(Variant(name, environment={"LD_PRELOAD": library}))
    return [*found, Variant(OBJECTS, "objects")]


def measure(variant: Variant, turns: int) -> Seen:
    """Run a child once."""
    child = subprocess.Popen(
        [*CHILD, variant.mode, str(turns)],
        cwd=ROOT,
        env={**os.environ, **variant.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            process = psutil.Process(child.pid)
            child.stdout.readline()
            before = sum(process.cpu_times()[:2])
            print(file=child.stdin, flush=True)
            peak = 0
            while not select.select([child.stdout], [], [], POLL)[0]:
                peak = max(peak, process.memory_info().rss)
            answer = child.stdout.readline()
            if not answer:
                raise UnavailableError(f"{variant.name}: exit code {child.wait()}")
            cpu = sum(process.cpu_times()[:2]) - before
            time.sleep(PAUSE)
            rest = process.memory_info().rss
            print(file=child.stdin, flush=True)
            child.stdout.readline()
        except BaseException:
            child.kill()
            raise
    return Seen(float(answer), cpu, max(peak, rest) / 1e6, rest / 1e6)


def run(options: Options, report: Report) -> None:
    """Run all variants in turn, and report how they compare."""
    rounds = 1 if options.quick else ROUNDS
    turns = options.ticks or (80 if options.quick else TURNS)
    all_of = variants(report)
    seen: dict[str, list[Seen]] = {variant.name: [] for variant in all_of}
    for _ in range(rounds):
        for variant in all_of:
            seen[variant.name].append(measure(variant, turns))

    def median(name: str, what: str) -> float:
        return statistics.median(getattr(one, what) for one in seen[name])

    def ratio(name: str, what: str) -> float:
        pairs = zip(seen[name], seen[PLAIN], strict=True)
        return statistics.median(getattr(one, what) / getattr(plain, what) for one, plain in pairs)

    table = report.table(
        f"{turns} ticks in 4 threads, {rounds} round(s)",
        ("variant", "wall s", "x plain", "cpu s", "x plain", "peak MB", "x plain", "rest MB"),
    )
    for name in seen:
        cells = []
        for what, unit in (("wall", "s"), ("cpu", "s"), ("peak", "MB"), ("rest", "MB")):
            report.add(what, name, median(name, what), unit)
            cells.append(
                f"{median(name, what):.2f}" if unit == "s" else f"{median(name, what):.1f}"
            )
            if what != "rest":
                cells.append(f"{ratio(name, what):.3f}")
        table.add_row(f"[bold]{name}[/]" if name == OBJECTS else name, *cells)
    report.console.print(table)

    def judge(what: str, reached: float, allowed: float, text: str) -> None:
        verdict = "[green]met[/]" if reached <= allowed else "[red]not met[/]"
        report.say(f"target: {what}: {text}: {verdict}")

    for what in ("wall", "peak"):
        reached = ratio(OBJECTS, what)
        judge(f"{what} within 5 % of plain", reached, CLOSE, f"{reached:.3f}x")
    mine, other = median(OBJECTS, "rest"), median(TWO, "rest")
    judge(f"rest not above {TWO}'s", mine, other, f"{mine:.1f} MB against {other:.1f} MB")

"""A loop of 117 KB ticks in a child process, watched from outside: memory, speed, system calls.

Each tick makes 30 strdup and 10 strbuf of mixed size, 117 KB in all. Resident memory is read by
this process while the child waits between two ticks; "most" is the highest that was seen while it
ran. System calls are counted by strace in two more runs, one ten times as long as the other: the
difference is what the steady state makes, without the start and the end of the process.
"""

from __future__ import annotations

import contextlib
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks import UnavailableError
from benchmarks._report import Options, Report
from benchmarks._steady_child import SCRATCH
from benchmarks._strace import traced

ROOT = Path(__file__).resolve().parent.parent
CHILD = [sys.executable, "-m", "benchmarks._steady_child"]
FLAT_MB = 0.1
STRACED = 2000


def checkpoints(ticks: int) -> list[int]:
    """Return the tick counts at which to look: powers of ten up to ``ticks``, from 1000 if any."""
    points = [10**power for power in range(3, 10) if 10**power < ticks]
    return [*(points or [max(2, ticks // 10)]), ticks]


def watch(ticks: int, report: Report) -> None:
    """Run the child, and report its memory at each checkpoint and its speed."""
    table = report.table(
        f"{ticks} ticks of {SCRATCH} bytes", ("ticks", "resident MB", "most MB", "ticks per s")
    )
    resident: list[float] = []
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(
            subprocess.Popen(
                CHILD, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(child.kill)
        assert child.stdin is not None
        assert child.stdout is not None
        process = psutil.Process(child.pid)
        done, most, speed = 0, 0, 0.0
        for point in (1, *checkpoints(ticks)):
            start = time.perf_counter()
            print(point, file=child.stdin, flush=True)
            while not select.select([child.stdout], [], [], 0.05)[0]:
                most = max(most, process.memory_info().rss)
            answer = child.stdout.readline()
            taken = time.perf_counter() - start
            if not answer:
                raise UnavailableError(f"the child ended with exit code {child.wait()}")
            if int(answer) != SCRATCH:
                raise UnavailableError(f"a tick asked for {answer.strip()} bytes, not {SCRATCH}")
            rss = process.memory_info().rss
            most = max(most, rss)
            speed, done = (point - done) / taken, point
            if point == 1:  # the start of Python is over
                continue
            resident.append(rss / 1e6)
            report.add(f"resident memory at {point} ticks", "arena", rss / 1e6, "MB")
            table.add_row(f"{point}", f"{rss / 1e6:.3f}", f"{most / 1e6:.3f}", f"{speed:.0f}")
    report.add("ticks per second", "arena", speed, "1/s")
    report.console.print(table)
    growth = resident[-1] - resident[0]
    flat = "[green]met[/]" if growth <= FLAT_MB else "[red]not met[/]"
    report.say(
        f"target: resident memory flat: {growth:+.3f} MB from the first row to the last, "
        f"at most {FLAT_MB} MB: {flat}"
    )


def count_calls(ticks: int, report: Report) -> None:
    """Report the system calls that a tick of the steady state makes, or why they are not known."""
    strace = shutil.which("strace")
    if strace is None:
        report.say("system calls: not counted, strace is not installed")
        return
    try:
        short, long = (traced(strace, CHILD, f"{count}\n") for count in (ticks, 10 * ticks))
    except UnavailableError as error:
        report.say(f"system calls: not counted, {error}")
        return
    long.subtract(short)
    more = long.pop("total")
    per_tick = more / (9 * ticks)
    report.add("system calls per tick", "arena", per_tick, "calls")
    named = ", ".join(f"{count:+d} {name}" for name, count in long.items() if count) or "none"
    verdict = "[green]met[/]" if more <= 0 else "[red]not met[/]"
    report.say(
        f"target: no system call per tick: {per_tick:.5f} a tick "
        f"({10 * ticks} ticks make, beside {ticks} ticks: {named}): {verdict}"
    )


def run(options: Options, report: Report) -> None:
    """Watch a long run, then count the system calls of two short ones."""
    ticks = options.ticks or (10**5 if options.quick else 10**6)
    watch(ticks, report)
    count_calls(min(STRACED, max(1, ticks // 10)), report)

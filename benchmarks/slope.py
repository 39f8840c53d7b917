"""The slope detector on 200 series, made up and of real processes: false alarms, misses, not yet.

Made-up series: 18 kinds (benchmarks/_series.py), half of them from seeds that the detector's
constants were chosen by, half from seeds that were held out. Real ones: the resident memory of
child processes of 4,000 ticks each (benchmarks/_slope_child.py), read from outside every 3 ms, with
the tick counter that they export; all held out. Beside it on the same series: "last minus first",
growth when the last sample is 1 MiB over the first; and "least squares", growth when the ordinary
95 % interval of the slope is above zero. A leak that is not called growing is a miss, also when it
is "not yet".
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from arena import _proc
from arena._trend import trend
from benchmarks import UnavailableError
from benchmarks._report import Options, Report
from benchmarks._series import HELD_OUT_FROM, KINDS
from benchmarks._slope_child import KINDS as REAL

ROOT = Path(__file__).resolve().parent.parent
TICKS = 4_000
EVERY = 0.003  # seconds
EACH = 8  # made-up series of a kind, half of them held out
EACH_REAL = 7
MORE = 100  # held-out series of each kind, in a second round
WRONG = 0.02


@dataclasses.dataclass(frozen=True)
class Case:
    """A series, and whether it grows."""

    kind: str
    grows: bool
    held_out: bool
    xs: Sequence[float]
    ys: Sequence[float]


def arena_says(case: Case) -> str:
    """The detector's verdict."""
    return trend(case.xs, case.ys).state


def last_minus_first(case: Case) -> str:
    """As it is often written by hand."""
    return "growing" if case.ys[-1] - case.ys[0] > 1 << 20 else "flat"


def least_squares(case: Case) -> str:
    """An ordinary regression, whose interval takes neighbours for independent."""
    slope, intercept = statistics.linear_regression(case.xs, case.ys)
    rests = [y - intercept - slope * x for x, y in zip(case.xs, case.ys, strict=True)]
    mean = statistics.fmean(case.xs)
    spread = math.fsum((x - mean) ** 2 for x in case.xs)
    error = math.sqrt(math.fsum(rest * rest for rest in rests) / (len(rests) - 2) / spread)
    return "growing" if slope > 1.96 * error else "flat"


CONTENDERS: dict[str, Callable[[Case], str]] = {
    "arena": arena_says,
    "last minus first": last_minus_first,
    "least squares": least_squares,
}


def made_up(each: int) -> list[Case]:
    """Half of each kind from seeds that were looked at, half from those held out."""
    half = max(1, each // 2)
    return [
        Case(kind.name, kind.grows, held_out, *kind.series(first + seed))
        for kind in KINDS
        for held_out, first in ((False, 0), (True, HELD_OUT_FROM))
        for seed in range(half)
    ]


def watched(kind: str, seed: int, ticks: int) -> Case:
    """Run one child to its end, and read its memory and its ticks meanwhile."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._slope_child", kind, str(seed), str(ticks)],
        cwd=ROOT,
        env={**os.environ, "ARENA_EXPORT": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    xs: list[float] = []
    ys: list[float] = []
    try:
        if child.stdout.readline() != "ready\n":
            raise UnavailableError(f"the child of {kind!r} did not begin")
        with _proc.TickCounter(child.pid) as counter:
            while child.poll() is None and (not xs or xs[-1] < ticks - 10):
                xs.append(counter.read())
                ys.append(_proc.statm(child.pid).resident)
                time.sleep(EVERY)
    except _proc.ProcError as error:
        raise UnavailableError(f"the child of {kind!r} cannot be watched: {error}") from None
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    return Case(kind, REAL[kind][0], True, xs, ys)


def real(each: int, ticks: int) -> list[Case]:
    """Children of each kind, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(watched, kind, seed, ticks) for kind in REAL for seed in range(each)]
        return [run.result() for run in runs]


def judge(cases: Sequence[Case]) -> dict[str, list[str]]:
    """What each contender says of each case."""
    return {name: [says(case) for case in cases] for name, says in CONTENDERS.items()}


def count_wrong(cases: Iterable[Case], said: Iterable[str]) -> tuple[int, int]:
    """False alarms and misses."""
    alarms = misses = 0
    for case, state in zip(cases, said, strict=True):
        alarms += not case.grows and state == "growing"
        misses += case.grows and state != "growing"
    return alarms, misses


def by_kind(cases: Sequence[Case], verdicts: dict[str, list[str]], report: Report) -> None:
    """Print and keep how many of each kind were wrong."""
    table = report.table(
        f"{len(cases)} series: how many of a kind were judged wrong",
        ("kind", "grows", "series", *CONTENDERS, "arena: not yet"),
    )
    for kind in dict.fromkeys(case.kind for case in cases):
        here = [index for index, case in enumerate(cases) if case.kind == kind]
        some = [cases[index] for index in here]
        cells = []
        for name, said in verdicts.items():
            wrong = sum(count_wrong(some, [said[index] for index in here]))
            report.add(kind, name, wrong, "wrong")
            cells.append(str(wrong))
        unsure = collections.Counter(verdicts["arena"][index] for index in here)["not yet"]
        report.add(f"{kind}: not yet", "arena", unsure, "series")
        grows = "yes" if some[0].grows else "no"
        table.add_row(kind, grows, str(len(here)), *cells, str(unsure))
    report.console.print(table)


def in_all(
    what: str, cases: Sequence[Case], verdicts: dict[str, list[str]], report: Report
) -> None:
    """Print and keep the false alarms and misses of all, and of those held out."""
    level = sum(not case.grows for case in cases)
    table = report.table(
        f"{what}: {len(cases)} series, {level} of them level",
        ("contender", "false alarms", "misses", "wrong", "wrong, held out"),
    )
    for name, said in verdicts.items():
        alarms, misses = count_wrong(cases, said)
        share = (alarms + misses) / len(cases)
        pairs = [pair for pair in zip(cases, said, strict=True) if pair[0].held_out]
        out = sum(count_wrong(*zip(*pairs, strict=True))) / len(pairs)
        report.add(f"{what}: false alarms", name, alarms, "series")
        report.add(f"{what}: misses", name, misses, "series")
        report.add(f"{what}: wrong", name, 100 * share, "%")
        report.add(f"{what}: wrong, held out", name, 100 * out, "%")
        table.add_row(name, str(alarms), str(misses), f"{share:.1%}", f"{out:.1%}")
    report.console.print(table)
    alarms, misses = count_wrong(cases, verdicts["arena"])
    share = (alarms + misses) / len(cases)
    met = "[green]met[/]" if share <= WRONG else "[red]not met[/]"
    report.say(f"target: at most {WRONG:.0%} wrong: {share:.1%}: {met}")


def how_long(report: Report) -> None:
    """Time one verdict on 2,000 points of each kind."""
    times = []
    for kind in KINDS:
        xs, ys = kind.series(HELD_OUT_FROM)
        times_to = math.ceil(2_000 / len(xs))
        xs = [x + turn * xs[-1] * 1.001 for turn in range(times_to) for x in xs][:2_000]
        ys = (ys * times_to)[:2_000]
        begun = time.process_time()
        trend(xs, ys)
        times.append(time.process_time() - begun)
    typical = statistics.median(times) * 1e3
    report.add("a verdict on 2,000 points", "arena", typical, "ms")
    report.say(f"a verdict on 2,000 points: {typical:.1f} ms, at most {max(times) * 1e3:.1f}")


def run(options: Options, report: Report) -> None:
    """Judge all series, then many more that were held out."""
    ticks = options.ticks or (600 if options.quick else TICKS)
    cases = made_up(2 if options.quick else EACH)
    cases += real(1 if options.quick else EACH_REAL, ticks)
    verdicts = judge(cases)
    by_kind(cases, verdicts, report)
    in_all("all", cases, verdicts, report)
    how_long(report)
    if not options.quick:
        more = [
            Case(kind.name, kind.grows, True, *kind.series(HELD_OUT_FROM + EACH + seed))
            for kind in KINDS
            for seed in range(MORE)
        ]
        in_all("more, all held out", more, judge(more), report)

"""How long an asyncio loop stands still while somebody trims the heap that it allocates from.

A ticker at 1 ms allocates 4 KB at each turn, over a heap of 64 KB blocks of which 15 of 16 are
freed. The figures are the gaps between its turns (worst, and 99 of 100) and the resident memory
that came back, read from outside. The variants take turns, round after round; the figures are
medians over rounds. What the ``Trimmer`` did not return for the loop's sake, it says itself.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from arena._native import lib
from benchmarks import UnavailableError
from benchmarks._child import Child
from benchmarks._report import Options, Report

NOTHING, TRIMMER, ASYNC = "nothing trims", "arena.Trimmer", "trim_async(budget_ms=20)"
VARIANTS = {
    NOTHING: "nothing",
    TRIMMER: "Trimmer",
    ASYNC: "trim_async",
    "malloc_trim on the loop": "loop",
    "malloc_trim in a thread": "thread",
}
MOST_STALL_MS = 20
NEAR_MS = 5


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one run showed."""

    worst: float
    p99: float
    back: float
    stays: float
    trimmer: dict[str, Any]


def measure(who: str, size: int, seconds: float) -> Seen:
    """Run a ticker over a new process's heap."""
    with Child("_stall_child", who) as child:
        freed = child.ask(f"heap {size}")
        before = child.resident()
        answer = child.ask(f"run {seconds}")
        back = before - child.resident()
    return Seen(
        answer["worst ms"], answer["p99 ms"], back / 1e6, (freed - back) / 1e6, answer["trimmer"]
    )


def compare(size: int, rounds: int, seconds: float, near: float, report: Report) -> None:
    """Report all variants over one heap; ``near``: how far above the noise the Trimmer may be."""
    seen: dict[str, list[Seen]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, who in VARIANTS.items():
            seen[name].append(measure(who, size, seconds))

    def median(name: str, what: str) -> float:
        return statistics.median(getattr(one, what) for one in seen[name])

    case = f"a heap of {size >> 20} MB"
    table = report.table(
        f"{case}, {rounds} round(s) of {seconds:g} s",
        ("variant", "worst gap ms", "p99 ms", "MB back", "MB free that stay"),
    )
    for name in VARIANTS:
        cells = []
        for what, text, unit in (
            ("worst", "worst gap", "ms"),
            ("p99", "99 of 100 gaps", "ms"),
            ("back", "came back", "MB"),
            ("stays", "free but resident", "MB"),
        ):
            report.add(f"{case}: {text}", name, median(name, what), unit)
            cells.append(f"{median(name, what):.1f}")
        table.add_row(f"[bold]{name}[/]" if name in (TRIMMER, ASYNC) else name, *cells)
    report.console.print(table)
    told = seen[TRIMMER][-1].trimmer
    report.say(
        f"the Trimmer's figures: {told['trims']} turns, not walked: {told['skips'] or 'never'}, "
        f"longest walk {told['worst_ms']:.1f} ms"
    )
    if told["withheld"]:
        report.say(f"what it did not return, and why: {told['withheld']}")
    noise, worst = median(NOTHING, "worst"), median(TRIMMER, "worst")
    verdict = "[green]met[/]" if worst <= noise + near else "[red]not met[/]"
    report.say(
        f"target: worst gap beside the Trimmer at most {near:g} ms over the ticker's own: "
        f"{worst:.1f} against {noise:.1f} ms: {verdict}"
    )


def run(options: Options, report: Report) -> None:
    """Tick over a large heap, which must be left alone, and one that can be trimmed in time."""
    if lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC:
        raise UnavailableError("the recipe to compare with is glibc's, and this is not glibc")
    if options.quick:
        compare(16 << 20, 1, 1.0, MOST_STALL_MS, report)
        return
    compare(1 << 30, 3, 4.0, NEAR_MS, report)
    # Here it may walk: for as long as it was told that it may.
    compare(96 << 20, 3, 4.0, MOST_STALL_MS, report)

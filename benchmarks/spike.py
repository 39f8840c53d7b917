"""Resident memory after a tick of 256 MiB, small tick by small tick, read from outside.

64 small ticks of 128 KiB, one of 256 MiB, then small ones again, in pieces of 64 KiB or in one
piece. Each 256th piece is kept by the program, 1 MiB in all. Beside arena: the same with a list of
bytes, alone and with malloc_trim by ctypes each 16 ticks. "back" is the number of small ticks until
resident memory is within 10 % of what it was before. Then, by strace: which system calls the small
ticks make once it is back (the difference of two runs, one ten times as long as the other).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter

from benchmarks import UnavailableError
from benchmarks._child import Child, command
from benchmarks._report import Options, Report
from benchmarks._strace import traced

CONTENDERS = {
    "arena, in pieces": "pieces",
    "arena, one piece": "one",
    "list": "plain",
    "list, malloc_trim each 16": "ctypes",
}
WARM, LOOKED = 64, 64
BACK, MOST = 1.10, 32
SHOWN = (0, 1, 4, 16, 32, 64)
SETTLED, STRACED = 40, 200


@dataclasses.dataclass(frozen=True)
class Seen:
    """Resident memory in MB: before the spike, and after it and each small tick."""

    before: float
    after: list[float]

    @property
    def back(self) -> int | None:
        """Small ticks after which it is back for good; None: it is not."""
        for count in range(len(self.after), 0, -1):
            if self.after[count - 1] > self.before * BACK:
                return None if count == len(self.after) else count
        return 0


def measure(way: str, size: int) -> Seen:
    """Run a new process through a spike."""
    with Child("_spike_child", way) as child:
        child.ask(f"tick {WARM}")
        before = child.resident()
        child.ask(f"spike {size}")
        after = [child.resident()]
        for _ in range(LOOKED):
            child.ask("tick 1")
            after.append(child.resident())
    return Seen(before / 1e6, [one / 1e6 for one in after])


def watch(size: int, report: Report) -> None:
    """Report how resident memory comes down."""
    table = report.table(
        f"a tick of {size >> 20} MiB: resident MB after so many small ticks",
        ("contender", "before", *(f"{count}" for count in SHOWN), "back"),
    )
    found: dict[str, int | None] = {}
    for name, way in CONTENDERS.items():
        seen = measure(way, size)
        found[name] = seen.back
        report.add("resident memory before", name, seen.before, "MB")
        for count, one in enumerate(seen.after):
            report.add(f"resident memory after {count} small ticks", name, one, "MB")
        if seen.back is not None:
            report.add("back within 10 %", name, seen.back, "ticks")
        table.add_row(
            f"[bold]{name}[/]" if name.startswith("arena") else name,
            f"{seen.before:.1f}",
            *(f"{seen.after[count]:.1f}" for count in SHOWN),
            "no" if seen.back is None else f"{seen.back}",
        )
    report.console.print(table)
    for name, back in found.items():
        if name.startswith("arena"):
            met = back is not None and back <= MOST
            report.say(
                f"target: {name}: back within 10 % after at most {MOST} small ticks: "
                f"{'not at all' if back is None else back}: "
                f"{'[green]met[/]' if met else '[red]not met[/]'}"
            )


def fewest(strace: str, way: str, size: int) -> tuple[Counter[str], int]:
    """Return which calls the longer run makes more, and how many of them give memory back.

    Of three pairs of runs the one with the fewest: what the interpreter itself maps and unmaps
    falls into one run or the other (once in some 1,800 ticks), and a call of each tick is in all of
    them.
    """
    pairs = []
    for _ in range(3):
        short, long = (
            traced(strace, command("_spike_child", way, f"{WARM}", f"{size}", f"{SETTLED + more}"))
            for more in (STRACED, 10 * STRACED)
        )
        long.subtract(short)
        del long["total"]
        pairs.append((long, long["madvise"] + long["munmap"]))
        if not pairs[-1][1]:
            break
    return min(pairs, key=lambda pair: abs(pair[1]))


def count_calls(size: int, report: Report) -> None:
    """Report which system calls are made once it is back, or why that is not known."""
    strace = shutil.which("strace")
    if strace is None:
        report.say("system calls: not counted, strace is not installed")
        return
    for name, way in CONTENDERS.items():
        try:
            long, giving = fewest(strace, way, size)
        except UnavailableError as error:
            report.say(f"system calls: not counted, {error}")
            return
        named = ", ".join(f"{count:+d} {call}" for call, count in long.items() if count) or "none"
        report.add("madvise and munmap per tick, once it is back", name, giving / 9 / STRACED, "")
        line = f"{name}: {9 * STRACED} more small ticks make: {named}"
        if name.startswith("arena"):
            met = "[green]met[/]" if giving <= 0 else "[red]not met[/]"
            line = f"target: no madvise or munmap once it is back: {line}: {met}"
        report.say(line)


def run(options: Options, report: Report) -> None:
    """Watch a spike, then count the system calls that follow it."""
    size = (32 if options.quick else 256) << 20
    watch(size, report)
    count_calls(size, report)

"""What stays resident of 64 threads that cycle buffers of 11 MiB, by what malloc was told first.

Each variant is a process of its own: it sets what it sets, and runs the threads, each with a buffer
of 11 MiB and 50 pieces of 2 KB at a turn, held for 10 ms. "stays" is resident memory once they have
ended, above what it was before, read from outside; "peak" is the most at one time. All variants
take turns; the figures are medians over rounds, with the lowest and highest of "stays".
"""

from __future__ import annotations

import dataclasses
import statistics

from arena._native import lib
from benchmarks import UnavailableError
from benchmarks._child import Child
from benchmarks._report import Options, Report

DEFAULT, INSIDE = "default", "os.environ from inside"
HEAPS, MMAP, TUNE = "arena.tune(arena_max=2)", 'arena.tune(mmap_threshold="1 MiB")', "arena.tune()"
HAND_MMAP, HAND_BOTH = "mallopt by ctypes, M_MMAP_THRESHOLD", "mallopt by ctypes, both"
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    DEFAULT: ("nothing", {}),
    INSIDE: ("environ", {}),
    "MALLOC_ARENA_MAX=2": ("nothing", {"MALLOC_ARENA_MAX": "2"}),
    "mallopt by ctypes, M_ARENA_MAX": ("heaps by hand", {}),
    HEAPS: ("heaps", {}),
    HAND_MMAP: ("mmap by hand", {}),
    MMAP: ("mmap", {}),
    HAND_BOTH: ("both by hand", {}),
    TUNE: ("tune", {}),
}
THREADS, TURNS, ROUNDS = 64, 10, 3
NEAR_MB = 5.0


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one run showed, in MB."""

    peak: float
    stays: float


def measure(setting: str, environment: dict[str, str], threads: int, turns: int) -> Seen:
    """Run the threads once, in a new process."""
    with Child("_tune_child", setting, environment=environment) as child:
        child.ask("ready")
        before = child.resident()
        child.ask(f"cycle {threads} {turns}")
        return Seen(child.peak() / 1e6, (child.resident() - before) / 1e6)


def run(options: Options, report: Report) -> None:
    """Run all variants in turn, and report what stays."""
    if lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC:
        raise UnavailableError("what is tuned is glibc's malloc, and this is not glibc")
    threads, turns, rounds = (8, 2, 1) if options.quick else (THREADS, TURNS, ROUNDS)
    seen: dict[str, list[Seen]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, (setting, environment) in VARIANTS.items():
            seen[name].append(measure(setting, environment, threads, turns))

    def median(name: str, what: str) -> float:
        return statistics.median(getattr(one, what) for one in seen[name])

    table = report.table(
        f"{threads} threads, {turns} turns, {rounds} round(s)",
        ("variant", "peak MB", "stays MB", "from - to"),
    )
    for name in VARIANTS:
        for what in ("peak", "stays"):
            report.add(what, name, median(name, what), "MB")
        table.add_row(
            f"[bold]{name}[/]" if name.startswith("arena") else name,
            f"{median(name, 'peak'):.1f}",
            f"{median(name, 'stays'):.1f}",
            f"{min(one.stays for one in seen[name]):.1f} - "
            f"{max(one.stays for one in seen[name]):.1f}",
        )
    report.console.print(table)
    report.say(
        f"set in os.environ from inside: {median(INSIDE, 'stays'):.1f} MB stay, against "
        f"{median(DEFAULT, 'stays'):.1f} by default: it does nothing"
    )
    # Two heaps alone leave anything from 60 to 270 MB, by chance, whoever sets them: no target.
    for mine, other in ((MMAP, HAND_MMAP), (TUNE, HAND_BOTH)):
        got, allowed = median(mine, "stays"), median(other, "stays") + NEAR_MB
        verdict = "[green]met[/]" if got <= allowed else "[red]not met[/]"
        report.say(
            f"target: {mine}: at most {NEAR_MB:g} MB above {other}: {got:.1f} against "
            f"{median(other, 'stays'):.1f} MB: {verdict}"
        )

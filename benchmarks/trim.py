"""What a trim costs and gives back, by the size of the heap and of its blocks.

Each figure is from a process of its own, which fills a heap with blocks, frees a share of them, and
trims twice. Resident memory is read from outside. The figures are of the run that took the median
time of three rounds. The return code is glibc's, which says 1 also when nothing came back. Then
what other threads see meanwhile: the worst gap of a busy loop that allocates from the same heap,
and of one that does not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from arena._native import lib
from benchmarks import UnavailableError
from benchmarks._child import Child
from benchmarks._heap import RECIPES, TURNS
from benchmarks._report import Options, Report

HAND, HELD, ARENA, BUDGET = RECIPES
SHARES = ("15/16", "3/4")
MILLISECONDS, ROUNDS = 20, 3
CLOSE, NOISE_MS = 1.25, 2.0


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one trim did."""

    ms: float
    mb: float
    code: int | None


def name_of(size: int) -> str:
    """Return a size of this benchmark as people write it."""
    for unit, number in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= number:
            return f"{size // number} {unit}"
    return f"{size} B"


def measure(recipe: str, size: int, block: int, share: str) -> list[Seen]:
    """Trim a new process's heap twice."""
    seen = []
    with Child("_trim_child", recipe) as child:
        child.ask(f"heap {size} {block} {share}")
        before = child.resident()
        for _ in range(2):
            answer = child.ask("trim")
            after = child.resident()
            seen.append(Seen(answer["ms"], (before - after) / 1e6, answer["code"]))
            before = after
    return seen


def measure_beside(recipe: str, size: int, block: int) -> dict[str, float]:
    """Return the worst gaps in ms of loops beside a trim, by what they do."""
    worst = {}
    for number, what in enumerate(TURNS):
        with Child("_trim_child", recipe) as child:
            child.ask(f"heap {size} {block} 15/16")
            worst[what] = float(child.ask(f"beside {number}")["worst ms"])
    return worst


def tell(seen: Seen) -> list[str]:
    """Return the cells of one trim."""
    return [f"{seen.ms:.1f}", f"{seen.mb:.1f}", "-" if seen.code is None else f"{seen.code}"]


def heaps(sizes: list[int], blocks: list[int], rounds: int, report: Report) -> None:
    """Report trims of all heaps; the contenders take turns, the figures are medians."""
    over: list[float] = []
    longest = 0.0
    columns = ("contender", "ms", "MB back", "code", "again: ms", "MB back", "code")
    for size, block, share in itertools.product(sizes, blocks, SHARES):
        case = f"{name_of(size)} in blocks of {name_of(block)}, {share} freed"
        table = report.table(case, columns)
        runs: dict[str, list[list[Seen]]] = {recipe: [] for recipe in (HAND, ARENA, BUDGET)}
        for _ in range(rounds):
            for recipe, found in runs.items():
                found.append(measure(recipe, size, block, share))
        seen = {
            recipe: [middle(turn) for turn in zip(*found, strict=True)]
            for recipe, found in runs.items()
        }
        for recipe, turns in seen.items():
            for turn, one in zip(("", ", again"), turns, strict=True):
                report.add(f"{case}{turn}: time", recipe, one.ms, "ms")
                report.add(f"{case}{turn}: came back", recipe, one.mb, "MB")
                if one.code is not None:  # None: the heap was not walked
                    report.add(f"{case}{turn}: code", recipe, one.code, "")
            table.add_row(
                f"[bold]{recipe}[/]" if recipe != HAND else recipe, *tell(turns[0]), *tell(turns[1])
            )
        report.console.print(table)
        over.append(seen[ARENA][0].ms - (seen[HAND][0].ms * CLOSE + NOISE_MS))
        longest = max(longest, *(one.ms for one in seen[BUDGET]))
    reached = sum(one <= 0 for one in over)
    report.say(
        f"target: {ARENA} takes at most {CLOSE}x of {HAND}, and {NOISE_MS:g} ms: in {reached} of "
        f"{len(over)} cases: {verdict(reached == len(over))}"
    )
    report.say(
        f"target: {BUDGET} takes at most {MILLISECONDS} ms: {longest:.1f} ms at the most: "
        f"{verdict(longest <= MILLISECONDS)}"
    )


def middle(runs: Sequence[Seen]) -> Seen:
    """Return the run that took the median time."""
    return sorted(runs, key=lambda one: one.ms)[len(runs) // 2]


def verdict(met: bool) -> str:
    """Say whether a target was met."""
    return "[green]met[/]" if met else "[red]not met[/]"


def others(size: int, block: int, report: Report) -> None:
    """Report what other threads see meanwhile."""
    case = f"{name_of(size)} in blocks of {name_of(block)}: worst gap of another thread"
    table = report.table(case, ("contender", *(f"{what}: ms" for what in TURNS)))
    for recipe in RECIPES:
        seen = measure_beside(recipe, size, block)
        for what, worst in seen.items():
            report.add(f"{case} that {what}", recipe, worst, "ms")
        table.add_row(
            f"[bold]{recipe}[/]" if recipe.startswith("arena") else recipe,
            *(f"{worst:.1f}" for worst in seen.values()),
        )
    report.console.print(table)
    report.say("ctypes.CDLL lets go of the GIL, PyDLL and ctypes.pythonapi keep it")


def run(options: Options, report: Report) -> None:
    """Trim heaps of several sizes, then look at what others see."""
    if lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC:
        raise UnavailableError("the recipe to compare with is glibc's, and this is not glibc")
    sizes = [16 << 20] if options.quick else [64 << 20, 256 << 20, 1 << 30]
    blocks = [64 << 10, 512] if options.quick else [64 << 10, 4 << 10, 512]
    heaps(sizes, blocks, 1 if options.quick else ROUNDS, report)
    others(sizes[-1], 64 << 10, report)

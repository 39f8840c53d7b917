"""Runs the variants, prints the tables and says which targets were met."""

from __future__ import annotations

import importlib
import platform
import statistics
from importlib.metadata import version
from pathlib import Path

from benchmarks import UnavailableError
from benchmarks._report import Options, Report
from benchmarks.churn.measure import Load, Seen, measure, race
from benchmarks.churn.variants import ARENA, DISCARD, KEEP, NAIVE, SHORT, VARIANTS, Variant

NEAR_MB, SHARE, CLOSE = 10, 0.20, 1.05
TUNED = (f"{DISCARD}+tune", f"{ARENA}+tune")
RACING = (DISCARD, ARENA, *TUNED)
ROUNDS = 7
USED = ("aiohttp", "orjson")


def chosen(options: Options, report: Report) -> list[Variant]:
    """Return the variants to run; say which cannot."""
    names = options.only or (SHORT if options.quick else tuple(VARIANTS))
    found = []
    for name in names:
        why = VARIANTS[name].missing
        if why is None:
            found.append(VARIANTS[name])
        else:
            report.say(f"{name}: left out, {why}")
    return found


def compare(options: Options, report: Report) -> None:
    """Run the variants one after the other, and report how they compare."""
    try:
        versions = {name: version(name) for name in USED}
        if options.plot is not None:  # now, and not when all has run
            importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:  # and so is PackageNotFoundError
        raise UnavailableError(f"{error.name} is missing: pip install -e '.[test]'") from None
    load = Load(turns=9, waves=1, rest=1.5) if options.quick else Load()
    report.machine |= {"libc": " ".join(platform.libc_ver()), **versions}
    report.say(" | ".join(f"{name} {report.machine[name]}" for name in ("libc", *USED)))
    seen: dict[str, Seen] = {}
    variants = chosen(options, report)
    if not variants:
        raise UnavailableError("none of these variants of churn can run here")
    for variant in variants:
        seen[variant.name] = measure(variant, load)
    tell(load, seen, report)
    runners = [one for one in variants if one.name in RACING]
    taken: dict[str, list[float]] = {}
    if len(runners) > 1:
        taken = race(runners, load, 2 if options.quick else ROUNDS)
        tell_race(taken, report)
    if options.quick:
        report.say("the targets are of the whole load: run it without --quick")
    else:
        judge(seen, taken, report)
    if options.plot is not None:
        plot(options.plot, seen)


def tell(load: Load, seen: dict[str, Seen], report: Report) -> None:
    """Print the tables, and keep the figures."""
    table = report.table(
        f"{load.waves} wave(s) of {load.rollouts} rollouts, {load.turns} turns each, a screenshot "
        f"of {load.screenshot >> 10} KiB a turn; resting: after {load.rest:g} s",
        ("variant", "base MB", "peak MB", "x keep", "resting MB", "cpu s", "loop gap ms", "hung"),
    )
    keep = seen.get(KEEP)
    for name, one in seen.items():
        for case, unit in (
            ("base", "MB"),
            ("peak", "MB"),
            ("resting", "MB"),
            ("cpu", "s"),
            ("gap", "ms"),
            ("hung", ""),
        ):
            report.add("loop gap" if case == "gap" else case, name, getattr(one, case), unit)
        for number, wave in enumerate(one.waves, 1):
            for case, unit in (("peak", "MB"), ("resting", "MB"), ("cpu", "s"), ("gap", "ms")):
                report.add(f"wave {number}: {case}", name, getattr(wave, case), unit)
        table.add_row(
            f"[bold]{name}[/]" if name.startswith(ARENA) else name,
            f"{one.base:.0f}",
            f"{one.peak:.0f}",
            f"{one.peak / keep.peak:.2f}" if keep else "",
            " ".join(f"{wave.resting:.0f}" for wave in one.waves),
            f"{one.cpu:.1f}",
            f"{one.gap:.0f}",
            f"{one.hung}",
        )
    report.console.print(table)
    one = next(iter(seen.values()))
    report.say(
        f"each: {one.requests} requests, {one.megabytes:,.0f} MB of bodies, {one.failed} of them "
        "failed as they were told to"
    )
    table = report.table(
        "at rest, by arena.memory(heap=True, objects=True) and arena.object_stats(), in MB",
        (
            "variant",
            "over base",
            "C heap used",
            "free",
            "small objects",
            "arena",
            "captured, cached",
            "after gc.collect()",
        ),
    )
    for name, one in seen.items():
        rest = {key: value / 1e6 for key, value in one.at_rest.items()}
        for key, value in rest.items():
            report.add(f"at rest: {key}", name, value, "MB")
        report.add("at rest: after gc.collect()", name, one.collected, "MB")
        table.add_row(
            name,
            f"{one.waves[-1].resting - one.base:+.1f}",
            *(
                f"{rest[key]:.1f}" if key in rest else "?"
                for key in ("heap used", "heap free", "objects", "arena", "captured")
            ),
            f"{one.collected:.0f}",
        )
    report.console.print(table)
    for name, one in seen.items():
        if one.trimmer is not None:
            did = one.trimmer
            report.say(
                f"the Trimmer of {name}: {did['trims']} trims, which returned "
                f"{did['returned'] / 1e6:.0f} MB; {did['refault_share']:.0%} of the last came "
                f"back, so {did['backed_off']} times as long from one to the next; the heap was "
                f"not walked: {did['skips'] or 'never'}"
            )


def ratio(taken: dict[str, list[float]], name: str, against: str) -> float | None:
    """Return how many times the processor one had of another: the median over rounds."""
    if name not in taken or against not in taken:
        return None
    return statistics.median(
        one / other for one, other in zip(taken[name], taken[against], strict=True)
    )


def tell_race(taken: dict[str, list[float]], report: Report) -> None:
    """Print what servers that took turns had of the processor."""
    rounds = len(next(iter(taken.values())))
    table = report.table(
        f"cpu of a wave, by turns, medians of {rounds} rounds",
        ("variant", "s", "all rounds", f"x {DISCARD}"),
    )
    for name, seconds in taken.items():
        report.add("cpu of a wave, by turns", name, statistics.median(seconds), "s")
        against = ratio(taken, name, DISCARD)
        table.add_row(
            f"[bold]{name}[/]" if name.startswith(ARENA) else name,
            f"{statistics.median(seconds):.2f}",
            f"{min(seconds):.2f} - {max(seconds):.2f}",
            "" if against is None else f"{against:.2f}",
        )
    report.console.print(table)


def judge(seen: dict[str, Seen], taken: dict[str, list[float]], report: Report) -> None:
    """Say which targets were met."""

    def say(text: str, reached: float, allowed: float, unit: str) -> None:
        verdict = "[green]met[/]" if reached <= allowed else "[red]not met[/]"
        report.say(f"target: {text}: {reached:.2f} {unit}, allowed {allowed:.2f}: {verdict}")

    keep, discard = seen.get(KEEP), seen.get(DISCARD)
    for name in (ARENA, TUNED[1], f"{ARENA}/unparsed"):
        mine = seen.get(name)
        if mine is None:
            continue
        say(f"{name} rests so near its base", mine.resting - mine.base, NEAR_MB, "MB")
        if keep is not None:
            say(f"{name}'s peak against {KEEP}'s", mine.peak / keep.peak, SHARE, "x")
            over = (mine.peak - mine.base) / (keep.peak - keep.base)
            say("the same, of both what is over the base", over, SHARE, "x")
            say(f"{name}'s worst loop gap against {KEEP}'s", mine.gap, keep.gap, "ms")
        if discard is not None:
            say(f"{name}'s peak against {DISCARD}'s", mine.peak, discard.peak, "MB")
    for name, other in ((ARENA, DISCARD), TUNED[::-1]):
        against = ratio(taken, name, other)
        if against is not None:
            say(f"{name}'s cpu against {other}'s", against, CLOSE, "x")
    hung = {name: one.hung for name, one in seen.items() if name != NAIVE and one.hung}
    say(f"handlers that hang, but for {NAIVE}", sum(hung.values()), 0, "handlers")


def plot(path: Path, seen: dict[str, Seen]) -> None:
    """Draw resident memory over time."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    both = figure.subplots(2, 1, sharex=True)
    colors = colormaps["tab20"].resampled(20)
    for number, (name, one) in enumerate(seen.items()):
        for axes in both:
            axes.plot(
                *zip(*one.series, strict=True),
                label=name,
                color=colors(number),
                linewidth=2 if name.startswith(ARENA) else 1,
            )
    low = [one.peak for name, one in seen.items() if not name.startswith(KEEP)]
    if low:  # the ones that keep nothing, once more by themselves
        both[1].set_ylim(0, max(low) * 1.1)
    figure.legend(handles=both[0].get_lines(), fontsize="small", loc="outside right upper")
    both[1].set_xlabel("seconds since the first wave")
    for axes in both:
        axes.set_ylabel("resident MB")
    figure.savefig(path)

"""What a server keeps of bodies that it has delivered, and who is left waiting.

An interception server stands between agents and a model: three protocols, streamed and not, each
body with the whole history and one more screenshot. Server, model and agents are processes on
loopback; the server's resident memory is read from outside, ten times a second. Now and then a
request fails: the model before the first byte, in the middle, after the answer; the client goes
away; the making of the stream raises; the rollout is cancelled. A handler that has not returned a
second after its request or rollout has ended counts as hung. "base" is before the first wave, after
a few small requests; "peak" is the most while it works, "resting" is some seconds after a wave, of
both the highest over the waves; "loop gap" is the worst lateness of a ticker in the server's event
loop; "cpu" is the server's. "at rest" is what the server itself says of its memory at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import UnavailableError
from benchmarks._report import Options, Report
from benchmarks.churn.variants import ARENA, DISCARD, KEEP, NAIVE, SHORT, VARIANTS, Variant

NEAR_MB, SHARE, CLOSE = 10, 0.20, 1.05


def chosen(options: Options, report: Report) -> list[Variant]:
    """Return the variants to run; say which cannot."""
    names = options.only or (SHORT if options.quick else tuple(VARIANTS))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise UnavailableError(
            f"churn has no variant {unknown[0]!r}; there are {'; '.join(VARIANTS)}"
        )
    found = []
    for name in names:
        why = VARIANTS[name].missing
        if why is None:
            found.append(VARIANTS[name])
        else:
            report.say(f"{name}: left out, {why}")
    return found


def run(options: Options, report: Report) -> None:
    """Run the variants one after the other, and report how they compare."""
    try:
        import aiohttp

        from benchmarks.churn.measure import Load, Seen, measure
    except ModuleNotFoundError as error:
        raise UnavailableError(f"{error.name} is missing: pip install -e '.[test]'") from None
    load = Load(turns=9, waves=1, rest=1.5) if options.quick else Load()
    libc = " ".join(__import__("platform").libc_ver())
    report.say(f"aiohttp {aiohttp.__version__} | {libc}")
    seen: dict[str, Seen] = {}
    variants = chosen(options, report)
    for variant in variants:
        seen[variant.name] = measure(variant, load)
    tell(load, seen, report)
    judge(seen, report)
    if options.plot is not None:
        plot(options.plot, seen)


def tell(load: Any, seen: dict[str, Any], report: Report) -> None:
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
            f"{one.resting:.0f}",
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


def judge(seen: dict[str, Any], report: Report) -> None:
    """Say which targets were met."""

    def say(text: str, reached: float, allowed: float, unit: str) -> None:
        verdict = "[green]met[/]" if reached <= allowed else "[red]not met[/]"
        report.say(f"target: {text}: {reached:.2f} against {allowed:.2f} {unit}: {verdict}")

    mine, keep, discard = (seen.get(name) for name in (ARENA, KEEP, DISCARD))
    if mine is None:
        return
    say(f"{ARENA} rests within {NEAR_MB} MB of its base", mine.resting - mine.base, NEAR_MB, "MB")
    if keep is not None:
        say(f"{ARENA}'s peak at most {SHARE:g} of {KEEP}'s", mine.peak / keep.peak, SHARE, "")
        over = (mine.peak - mine.base) / (keep.peak - keep.base)
        say("the same, over the base", over, SHARE, "")
        say(f"worst loop gap not above {KEEP}'s", mine.gap, keep.gap, "ms")
    if discard is not None:
        say(f"peak not above {DISCARD}'s", mine.peak, discard.peak, "MB")
        say(f"cpu within 5 % of {DISCARD}'s", mine.cpu / discard.cpu, CLOSE, "")
    hung = {name: one.hung for name, one in seen.items() if name != NAIVE and one.hung}
    say("nobody hangs where the waiter is unblocked first", sum(hung.values()), 0, "handlers")


def plot(path: Path, seen: dict[str, Any]) -> None:
    """Draw resident memory over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    both = figure.subplots(2, 1, sharex=True)
    for name, one in seen.items():
        for axes in both:
            axes.plot(
                *zip(*one.series, strict=True),
                label=name,
                linewidth=2 if name.startswith(ARENA) else 1,
            )
    low = [one.peak for name, one in seen.items() if not name.startswith(KEEP)]
    if low:  # the ones that keep nothing, once more by themselves
        both[1].set_ylim(0, max(low) * 1.1)
    both[0].legend(fontsize="small", ncols=3)
    both[1].set_xlabel("seconds since the first wave")
    for axes in both:
        axes.set_ylabel("resident MB")
    figure.savefig(path)

"""``python -m arena demo``: runs the same loop with and without ticks, measures, and reports."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from arena.cli import _feed
from arena.cli._child import Child, ChildDiedError
from arena.cli._files import output
from arena.cli._live import Live, live
from arena.cli._loop import RUNS, WARM_UP
from arena.cli._mind import EDGES, NODES
from arena.cli._report import LIMIT, Series, as_json, table, verdict

__all__ = ["Options", "run"]

_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    seconds: float
    rate: float
    input: Path | None
    plot: Path | None
    json: Path | None


def run(options: Options) -> int:
    """Run the demo and return its exit status. Raises UsageError before anything has run."""
    console = Console(highlight=False, markup=False, emoji=False)
    with ExitStack() as stack:
        json_draft = plot_draft = None
        if options.json:
            json_draft = stack.enter_context(output(options.json, "--json"))
        if options.plot:
            from arena.cli import _plot  # matplotlib is wanted only here

            plot_draft = stack.enter_context(output(options.plot, "--plot"))
        feed = _feed.read(options.input) if options.input else _feed.generated()
        runs = [Series(name) for name in RUNS]
        interrupted = False
        try:
            _introduce(console, options, feed)
            _measure(console, options, feed, runs)
        except KeyboardInterrupt:
            interrupted = True
        except ChildDiedError as death:
            print(f"python -m arena demo: {death}", file=sys.stderr)
            return 1
        if not all(one.seconds for one in runs):
            console.print("Interrupted before anything was measured.")
            return _INTERRUPTED
        _tell(console, options, runs, interrupted)
        try:
            if json_draft:
                json_draft.write_text(as_json(runs))
            if plot_draft:
                _plot.draw(runs, plot_draft)
        except OSError as error:
            print(f"python -m arena demo: nothing written: {error}", file=sys.stderr)
            return 1
    if interrupted:
        return _INTERRUPTED
    return 0 if all(one.state_ok for one in runs) else 1


def _sample_interval(options: Options) -> float:
    """Seconds between two looks at memory: a hundred in a run, at a bearable pace."""
    return min(1.0, max(0.05, options.seconds / 125))


def _introduce(console: Console, options: Options, feed: _feed.Feed) -> None:
    console.print(
        f"Two processes run the same loop for {options.seconds:g} s at {options.rate:g} ticks/s: "
        "one keeps each tick's scratch, one gives it back.",
    )
    console.print(
        f"State: a graph of {NODES} nodes and {EDGES:,} edges, and caches, in arena.Store."
    )
    console.print(f"Input: {feed.source}.", soft_wrap=True)
    console.print(
        f"Each warms up for {WARM_UP} ticks first: imports and first allocations are no growth. "
        f"Memory is read from outside every {_sample_interval(options):g} s.",
    )


def _measure(console: Console, options: Options, feed: _feed.Feed, runs: Sequence[Series]) -> None:
    """Run both children and fill the series. Whatever happens, both are gone afterwards."""
    with ExitStack() as stack:
        children = [stack.enter_context(Child(one.name, options.rate)) for one in runs]
        try:
            for child in children:
                child.feed(feed.records)
            while not all(child.progress.warm for child in children):
                for child in children:
                    child.check()
                time.sleep(0.02)
            show = live(console, [one.name for one in runs], options.seconds, options.rate)
            with show.screen():
                for child in children:
                    child.go()
                _watch(children, runs, options, show)
        finally:
            # In this order also after Ctrl-C: what the children told last belongs to the report.
            for child, one in zip(children, runs, strict=True):
                child.stop()
                one.progress = child.progress


def _watch(children: Sequence[Child], runs: Sequence[Series], options: Options, show: Live) -> None:
    """Sample until the time is over, or until a child is where the report's was killed."""
    start = time.monotonic()
    interval = _sample_interval(options)
    for number in range(sys.maxsize):
        for child, one in zip(children, runs, strict=True):
            megabytes = child.resident()
            one.seconds.append(time.monotonic() - start)
            one.megabytes.append(megabytes)
            one.progress = child.progress
        elapsed = time.monotonic() - start
        show.update(elapsed, runs)
        if elapsed >= options.seconds or max(one.megabytes[-1] for one in runs) >= LIMIT:
            return
        due = min((number + 1) * interval, options.seconds)
        time.sleep(max(0.0, due - elapsed))


def _tell(console: Console, options: Options, runs: Sequence[Series], interrupted: bool) -> None:
    console.print(table(runs))
    unscoped, ticked = runs
    seconds = unscoped.seconds[-1]
    if interrupted:
        console.print(f"Interrupted after {seconds:.0f} of {options.seconds:g} s.")
    elif seconds < options.seconds:
        console.print(f"Ended after {seconds:.0f} s: at {LIMIT / 1e3} GB a run would be killed.")
    for one in runs:
        if one.ticks < 0.9 * seconds * options.rate - 1:
            console.print(f"{one.name} got only {one.ticks / seconds:.0f} ticks/s done.")
    console.print(verdict(unscoped, ticked))

"""What the demo shows while it runs: bars on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from arena.cli._report import Series

__all__ = ["Live", "live"]

_LINES = 5  # plain lines in a run


class Live:
    """Lines for a file or a pipe: no control codes, and few enough to read."""

    def __init__(self, console: Console, seconds: float) -> None:
        self._console = console
        self._every = seconds / _LINES
        self._due = 0.0

    def screen(self) -> AbstractContextManager[object]:
        return nullcontext()

    def update(self, elapsed: float, series: Sequence[Series]) -> None:
        if elapsed >= self._due:
            self._due += self._every
            state = ", ".join(f"{one.name} {one.megabytes[-1]:.1f} MB" for one in series)
            self._console.print(f"{elapsed:6.1f} s: {state}")


class _Bars(Live):
    def __init__(self, console: Console, names: Sequence[str], ticks: float) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} ticks"),
            TextColumn("[bold]{task.fields[megabytes]:7.1f} MB"),
            console=console,
            expand=True,
        )
        self._tasks = {
            name: self._progress.add_task(name, total=ticks, megabytes=0.0) for name in names
        }

    def screen(self) -> AbstractContextManager[object]:
        return self._progress

    def update(self, elapsed: float, series: Sequence[Series]) -> None:
        for one in series:
            self._progress.update(
                self._tasks[one.name],
                completed=one.ticks,
                megabytes=one.megabytes[-1],
            )


def live(console: Console, names: Sequence[str], seconds: float, rate: float) -> Live:
    """Return what suits the console."""
    if console.is_terminal:
        return _Bars(console, names, max(1.0, seconds * rate))
    return Live(console, seconds)

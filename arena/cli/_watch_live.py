"""The live view of a watch on a terminal. The only module of it that needs rich."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import IO, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from arena.cli._watch_report import Found, lines
from arena.cli._watched import Watched

__all__ = ["View", "spark"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {"growing": "bold red", "shrinking": "cyan", "flat": "green", "not yet": "yellow"}


class View:
    """The screen for as long as the watch lasts. A context manager."""

    every = 1.0
    """Seconds between two looks at what was found."""

    def __init__(self, file: IO[str], title: str) -> None:
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._title = title

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, found: Found, watched: Watched) -> None:
        """Show what is known by now."""
        table = Table.grid(padding=(0, 2))
        for name, told in lines(found, watched):
            style = _STYLES[found.state] if name == "state" else ""
            table.add_row(Text(name, "dim"), Text(told, style))
        width = max(10, min(self._console.width - 2, 120))
        curve = spark([one.resident for one in found.samples], width)
        title = Text(f"{self._title}, Ctrl-C ends the watch", "bold")
        self._live.update(Group(title, table, Text(curve, "cyan")), refresh=True)


def spark(values: Sequence[float], width: int) -> str:
    """The values as a row of blocks, each the most of its share of them."""
    low, high = min(values), max(values)
    count = min(width, len(values))
    edges = [len(values) * n // count for n in range(count + 1)]
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BLOCKS[round((max(values[start:end]) - low) * scale)] for start, end in pairwise(edges)
    )

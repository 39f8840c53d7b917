"""The map of what escapes as a table of rich's, for terminals. Needs the extra ``cli``."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arena._map_text import TITLES, cells, chosen, headline, is_long, lines_about, within

if TYPE_CHECKING:
    from arena.escapes import EscapeMap

__all__ = ["show"]

_WIDE = 140  # columns, where nobody says how wide the output may be


def show(shown: EscapeMap, file: IO[str] | None, *, freed: bool, rows: int | None) -> None:
    """Print the map, or what is chosen of it; rows that are freed only if wanted."""
    file = sys.stdout if file is None else file
    encoding = getattr(file, "encoding", None)
    known = "COLUMNS" in os.environ or (hasattr(file, "isatty") and file.isatty())
    console = Console(
        file=file, highlight=False, markup=False, emoji=False, width=None if known else _WIDE
    )

    def piece(text: str, style: str = "") -> Text:
        return Text(within(text, encoding), style=style)

    visible, rest = chosen(shown, freed, rows)
    first_line = piece(headline(shown), "bold red" if shown.growing else "bold")
    console.print(first_line, soft_wrap=True)
    lines = len(rest) + 5
    if visible:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for title in TITLES:
            left = title in ("kind", "where")
            table.add_column(
                title,
                justify="left" if left else "right",
                no_wrap=title != "where",
                overflow="fold",
            )
        for row in visible:
            style = "red" if row.growing else "dim" if row.freed else ""
            first, *others = lines_about(row)
            lines += 1 + len(others)
            where = Text("\n").join([piece(first), *(piece(other, "dim") for other in others)])
            figures = [piece(cell) for cell in cells(row, shown.changes)]
            table.add_row(*figures, where, style=style)
        console.print(table)
    for line in rest:
        console.print(piece(line, "dim"), soft_wrap=True)
    if is_long(lines):
        console.print(first_line, soft_wrap=True)

"""Words for the map of what escapes: sizes, places, source lines, and the map as plain text."""

from __future__ import annotations

import contextlib
import linecache
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arena.escapes import Escape, EscapeMap, Frame

__all__ = [
    "OBJECTS",
    "chosen",
    "clean",
    "headline",
    "is_long",
    "lines_about",
    "place",
    "plural",
    "size",
    "source",
    "text",
    "within",
]

_LONG = 200  # characters: more of a name or an example helps nobody
_INSTALLED = os.path.join(os.sep, "site-packages", "")
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")
_IMPORT = "<frozen importlib"
_SCREEN = 24  # lines
_ROWS = 20
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def clean(odd: str, most: int = _LONG) -> str:
    """Any text in one printable line: all else escaped as in a literal, the middle left out."""
    if len(odd) > most:
        odd = f"{odd[: most * 2 // 3]} ... {odd[-most // 4 :]}"
    if odd.isprintable():
        return odd
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in odd
    )


def within(odd: str, encoding: str | None) -> str:
    """The text with what a stream of this encoding cannot carry escaped."""
    try:
        return odd.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")
    except LookupError:
        return odd.encode("ascii", "backslashreplace").decode("ascii")


def size(count: float, sign: str = "") -> str:
    """A number of bytes to read: three digits and a unit. ``sign`` as in a format."""
    unit = 0
    while abs(count) >= 1023.95 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    digits = "z.1f" if unit or count != int(count) else "z.0f"
    return f"{float(count):{sign}{digits}} {_UNITS[unit]}"


def _seconds(age: float) -> str:
    if age < 1:
        return f"{age * 1000:.0f} ms"
    if age < 600:
        return f"{age:.0f} s"
    return f"{age / 60:.0f} minutes" if age < 7200 else f"{age / 3600:.1f} hours"


def short_path(file: str) -> str:
    """The file as seen from the working directory, or as the library that it is of names it."""
    _, installed, inside = file.rpartition(_INSTALLED)
    if installed:
        return inside
    with contextlib.suppress(OSError):  # the working directory was removed
        here = os.path.join(os.getcwd(), "")
        if file.startswith(here):
            return file[len(here) :]
    return file.removeprefix(_STANDARD)


def place(frame: Frame) -> str:
    """``file:line in function``, which terminals and editors know."""
    line = f":{frame.line}" if frame.line else ""  # of C code it may not be known
    return f"{clean(short_path(frame.file))}{line} in {clean(frame.function)}"


def source(frame: Frame, around: int = 0) -> list[tuple[int, str]]:
    """The frame's source line and ``around`` on both sides, numbered, as far as they exist.

    Those of the file as it is now; of files that are no regular ones only what linecache has.
    """
    try:
        if os.path.isfile(frame.file):
            linecache.checkcache(frame.file)
        elif frame.file not in linecache.cache:  # never read a pipe, never search sys.path
            return []
        lines = linecache.getlines(frame.file)
    except (OSError, ValueError):  # a name that can be no path
        return []
    wanted = range(max(1, frame.line - around), min(len(lines), frame.line + around) + 1)
    if not 1 <= frame.line <= len(lines):
        return []
    return [(number, lines[number - 1].rstrip("\n")) for number in wanted]


def _line(frame: Frame) -> Iterator[str]:
    for _, line in source(frame):
        if line.strip():
            yield "    " + clean(line.strip())


def _imports(frame: Frame) -> bool:
    return frame.file.startswith(_IMPORT)


def lines_about(row: Escape) -> Iterator[str]:
    """Where the row's memory comes from and what else is known of it, a line each."""
    for number, frame in enumerate(row.site):
        if _imports(frame):
            if not number or not _imports(row.site[number - 1]):
                yield "  from an import" if number else "an import"
            continue
        yield f"  from {place(frame)}" if number else place(frame)
        yield from _line(frame)
    if not row.site:
        yield "place unknown (turn on arena.trace())"
    if row.uses:
        where = f", last at {place(row.used[0])}" if row.used else ""
        yield f"  used {plural(row.uses, 'time')} when stale{where}"
        if row.used:
            yield from _line(row.used[0])
    facts = [f"tick {clean(repr(row.tick))}" if row.tick is not None else "ticks without a name"]
    if row.kind == "stray":
        facts = ["no tick"] if row.tick is None else facts
    facts.append(f"{row.count_ever:,} ever")
    if row.age:
        facts.append(f"alive for {_seconds(row.age)}")
    if row.growing:
        peak = max((live for _, live in row.history), default=0)
        facts.append(f"GREW to {size(peak)} before it was freed" if row.freed else "GROWS")
    yield "  " + ", ".join(facts)
    if row.example:
        yield f"  such as {clean(row.example)}"


def headline(shown: EscapeMap) -> str:
    """How much is alive, and how much of it grows, in one sentence; and what it cannot tell."""
    if any(row.kind == "object" for row in shown):
        return f"{_headline(shown)} {OBJECTS}"
    return _headline(shown)


OBJECTS = "(Of Python objects, only blocks over 512 bytes are seen.)"


def _headline(shown: EscapeMap) -> str:
    live, growing = shown.live, shown.growing
    if shown.changes and not len(shown):
        return "Nothing changed."
    if live:
        count = sum(row.count for row in live)
        told = (
            f"{plural(count, 'escape')} {'more ' * shown.changes}alive, "
            f"{size(sum(row.bytes for row in live))}, from {plural(len(live), 'place')}"
        )
    else:
        told = "No more is alive than before" if shown.changes else "Nothing escapes"
    if not growing:
        return told + ("; none keeps growing." if live else ".")
    rate = size(sum(row.slope for row in growing))
    return f"{told}; {len(growing):,} keep{'s' * (len(growing) == 1)} growing, by {rate} a tick."


def plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def chosen(
    shown: EscapeMap, freed: bool = False, rows: int | None = _ROWS
) -> tuple[list[Escape], list[str]]:
    """The rows to print, and a line for each kind of those that are left out.

    What grows, and what is a bug whatever its size, is never left out. Imports are warm-up: one of
    a large library has hundreds of places, none of which is what the reader looks for.
    """
    visible: list[Escape] = []
    imports: list[Escape] = []
    small: list[Escape] = []
    hidden = 0
    for row in shown:
        if row._hidden and not freed:
            hidden += 1
        elif rows is None or row.growing or row.uses:
            visible.append(row)
        elif any(map(_imports, row.site)):
            imports.append(row)
        elif rows > 0:
            rows -= 1
            visible.append(row)
        else:
            small.append(row)
    lines = []
    if small:
        lines.append(f"+ {_summed_up(small, ' more')}")
    if imports:
        lines.append(f"+ {_summed_up(imports, '', ' within imports')}{_most(imports[0])}")
    if hidden:
        what = "unchanged row" if shown.changes else "freed row"
        lines.append(f"({plural(hidden, what)} not shown)")
    return visible, lines


def _summed_up(rows: list[Escape], more: str, where: str = "") -> str:
    last = max(row.last for row in rows)
    total = size(sum(row.bytes for row in rows))
    places = f"{len(rows):,}{more} place{'s' * (len(rows) != 1)}{where}"
    return f"{places}, {total}, last changed in tick {last:,}"


def _most(row: Escape) -> str:
    """Which import the row is of, where that is known."""
    frame = next((frame for frame in row.site if not _imports(frame)), None)
    return f", most at {place(frame)}" if frame else ""


def is_long(lines: int) -> bool:
    """Whether the first line has left the screen when so many are printed."""
    return lines >= _SCREEN


def cells(row: Escape, changes: bool) -> tuple[str, str, str, str]:
    """The row's kind and figures; the slope only of what grows, for else it means nothing."""
    sign = "+" if changes else ""
    slope = size(row.slope, "+") if row.growing else ""
    return row.kind, f"{row.count:{sign},}", size(row.bytes, sign), slope


TITLES = ("kind", "alive", "bytes", "a tick", "where")


def text(shown: EscapeMap) -> str:
    """The map as plain aligned text, with no line end at its end."""
    visible, rest = chosen(shown)
    table = [TITLES[:4], *(cells(row, shown.changes) for row in visible)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [headline(shown)]
    if visible:
        lines.append(_aligned(TITLES[:4], widths) + "  " + TITLES[4])
    for row, figures in zip(visible, table[1:], strict=True):
        start = _aligned(figures, widths)
        for number, line in enumerate(lines_about(row)):
            lines.append(f"{' ' * len(start) if number else start}  {line}")
    lines += rest
    if is_long(len(lines)):
        lines.append(headline(shown))
    return "\n".join(lines)


def _aligned(figures: tuple[str, ...], widths: list[int]) -> str:
    kind, *numbers = figures
    right = (f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True))
    return "  ".join([f"{kind:<{widths[0]}}", *right])

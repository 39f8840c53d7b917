"""``escapes()``: the map of what escapes, one row for each place where memory outlived its tick."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any, Literal, TypeAlias, overload

from arena import _native
from arena._rising import keeps_rising, slope, summed
from arena._version import __version__

__all__ = ["Escape", "EscapeMap", "Frame", "escapes"]

Path: TypeAlias = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python code that was running."""

    file: str
    line: int
    function: str


@dataclasses.dataclass(frozen=True, slots=True)
class Escape:
    """A row of the map: all escapes of one kind, from one place, of ticks of one name."""

    kind: Literal["persist", "pin", "stale", "stray", "object"]
    """``persist`` was copied out of a tick; ``pin`` is a chunk kept by a view; ``stale`` a handle
    held past its tick; ``stray`` was allocated through the C API with no tick open; ``object`` is a
    Python object made in a tick and still alive."""
    site: tuple[Frame, ...]
    """Where it was allocated, persisted or viewed, innermost first; empty when that is unknown."""
    used: tuple[Frame, ...]
    """Where a stale handle was last used; empty when none was."""
    tick: str | None
    """The name of the ticks."""
    count: int
    """How many are alive now."""
    bytes: int
    """Their bytes now."""
    count_ever: int
    """How many there ever were."""
    bytes_ever: int
    """The bytes of all there ever were."""
    uses: int
    """How often stale handles were used: a ``StaleError`` each, or let go on by an audit."""
    first: int
    """The number of the tick of the first event."""
    last: int
    """The number of the tick of the last event."""
    age: float
    """Seconds for which something of the row has been alive without a break; 0.0 when freed."""
    example: str
    """What one of them looks like: a ``repr()``; empty when unknown."""
    turn: int
    """How many ticks of that name have begun; of all ticks when the name is None."""
    history: tuple[tuple[int, int], ...]
    """Points (turn, bytes), oldest first: the lowest number of live bytes from that turn to the
    next point's. The last one is now."""
    slope: float
    """Bytes per turn: the least-squares line through the history."""
    growing: bool
    """Whether live bytes keep rising, turn after turn.

    The rule: take for each turn the least that was alive then or at any later time. Of eight equal
    parts of the history, this must rise in each of the last six. It takes eight turns at the least.
    What is allocated once, a cache that is full, and one that is emptied now and then do not grow.

    Or it rises as the table of a dict, set or list does that each turn puts something in: ever more
    rarely, by a factor each time, without a fall, and not too long ago to be still in use. A
    bounded cache that is still filling looks the same.
    """

    @property
    def freed(self) -> bool:
        """Whether nothing of it is alive any more; in a map of changes, no more and no less."""
        return self.count == 0 and self.bytes == 0

    @property
    def _key(self) -> tuple[str, tuple[Frame, ...], str | None]:
        return self.kind, self.site, self.tick

    @property
    def _hidden(self) -> bool:
        """Whether the row tells nothing any more. A use of a stale handle is a bug for ever."""
        return self.freed and not self.uses and not self.growing


def _rank(row: Escape) -> tuple[Any, ...]:
    """What grows comes first, the fastest before the others; what grew and was freed; then what is
    large; then the freed."""
    steepest = -row.slope if row.growing else 0.0
    order = (row.kind, [dataclasses.astuple(frame) for frame in row.site], row.tick or "")
    return not row.growing, row.freed, steepest, -row.bytes, -row.count, order


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class EscapeMap(Sequence[Escape]):
    """The map: a sequence of rows, what grows first, then what holds most; freed rows last.

    It is a copy of what was known when it was made, and never changes. ``str(map)`` is plain text:
    what grows, the 20 places that hold most, and a line for each kind of the rest.
    """

    rows: tuple[Escape, ...]
    """All rows, the freed ones too."""
    changes: bool = False
    """Whether the figures are differences to an earlier map: see ``diff()``."""
    taken: float = dataclasses.field(default_factory=time.time, compare=False)
    """When it was made: seconds since 1970."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=_rank)))

    @overload
    def __getitem__(self, index: int) -> Escape: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Escape, ...]: ...
    def __getitem__(self, index: int | slice) -> Escape | tuple[Escape, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def live(self) -> tuple[Escape, ...]:
        """The rows of which something is alive; in a map of changes, those that have more alive."""
        return tuple(row for row in self.rows if row.count > 0 or row.bytes > 0)

    @property
    def growing(self) -> tuple[Escape, ...]:
        """The rows whose live bytes keep rising, the fastest first: see ``Escape.growing``."""
        return tuple(row for row in self.rows if row.growing)

    def __repr__(self) -> str:
        what = "changes" if self.changes else "escapes"
        return f"<arena.EscapeMap of {what}: {len(self)} rows, {len(self.growing)} growing>"

    def __str__(self) -> str:
        """Plain aligned text without control codes, for logs and reports, and no freed rows."""
        from arena._map_text import text

        return text(self)

    def print(
        self, file: IO[str] | None = None, *, freed: bool = False, rows: int | None = 20
    ) -> None:
        """Print the map as a table, coloured on a terminal, to ``file`` (default: sys.stdout).

        What grows and what was used when stale is all there; of the rest, the ``rows`` that hold
        most, and no place within an import. Those that are left out are summed up in a line, and
        so are freed rows, unless ``freed`` is true. With ``rows=None`` nothing else is left out.
        Needs rich: raises ImportError, naming the extra, where it is missing. Raises OSError of the
        file.
        """
        try:
            from arena._map_table import show
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
            raise ImportError(
                "EscapeMap.print() needs rich: pip install 'tick-arena[cli]' (str(map) does not)",
                name="rich",
            ) from None
        show(self, file, freed=freed, rows=rows)

    def to_json(self, path: Path | None = None) -> str:
        """Return all rows as JSON (ASCII), with every field; write it to ``path`` too if given.

        Raises OSError when it cannot be written.
        """
        import json

        rows = [dataclasses.asdict(row) for row in self.rows]
        about = {"arena": __version__, "taken": self.taken, "changes": self.changes}
        return _written(json.dumps({**about, "rows": rows}, indent=1) + "\n", path)

    def to_html(self, path: Path | None = None) -> str:
        """Return a page that needs nothing else: a table to sort, curves, and the source lines.

        Write it to ``path`` too if given. The lines are those of the files as they are now. Raises
        OSError when it cannot be written.
        """
        from arena._map_page import page

        return _written(page(self), path)

    def diff(self, earlier: EscapeMap) -> EscapeMap:
        """Return what changed since ``earlier``, a map of the same process.

        A row is there when its count, bytes, uses or events changed. ``count``, ``bytes``, their
        ``_ever``, ``uses`` and ``turn`` are differences; ``slope`` is bytes per turn in between and
        ``growing`` the rule on that stretch; the rest is as it is now.
        """
        if not isinstance(earlier, EscapeMap):
            raise TypeError(f"diff() takes an earlier EscapeMap, not {type(earlier).__name__}")
        before = {row._key: row for row in earlier}
        turns = {row.tick: row.turn for row in earlier}
        changed = []
        for row in self:
            base = before.pop(row._key, None) or _nothing(row, turns.get(row.tick))
            change = _change(base, row)
            if change is not None:
                changed.append(change)
        for row in before.values():  # forgotten altogether: all that was alive is freed
            gone = dataclasses.replace(row, count=0, bytes=0, age=0.0)
            change = _change(row, gone)
            if change is not None:
                changed.append(change)
        return EscapeMap(tuple(changed), changes=True)


_DIFFERENCES = ("count", "bytes", "count_ever", "bytes_ever", "uses", "turn")


def _nothing(row: Escape, turn: int | None) -> Escape:
    """The row before its first event, when ``turn`` ticks of its name had begun (None: unknown)."""
    if turn is None:
        turn = row.history[0][0] - 1 if row.history else row.turn
    zero = dict.fromkeys(_DIFFERENCES, 0)
    return dataclasses.replace(row, **{**zero, "turn": min(turn, row.turn)})  # type: ignore[arg-type]


def _change(base: Escape, row: Escape) -> Escape | None:
    figures: dict[str, Any] = {
        name: getattr(row, name) - getattr(base, name) for name in _DIFFERENCES
    }
    turns = figures["turn"]
    if not any(amount for name, amount in figures.items() if name != "turn"):
        return None
    since = tuple(point for point in row.history if point[0] > base.turn)
    history = ((base.turn, base.bytes), *(since or row.history[-1:]))
    return dataclasses.replace(
        row,
        **figures,
        history=history,
        slope=figures["bytes"] / turns if turns > 0 else 0.0,
        growing=figures["bytes"] > 0 and keeps_rising(history),
    )


def as_it_ran(after: EscapeMap, uncollected: EscapeMap) -> EscapeMap:
    """Let rows grow that did so up to the last stretch of their history, whatever came then.

    For a map that is made when a test or a program is over: its end frees what its functions held.
    ``uncollected`` is the map before the last ``gc.collect()``, ``after`` the one after it: what
    that freed was garbage, not held by anybody. (So is then what a function held in cycles up to
    its end, which nobody can tell from it.)
    """
    held = {row._key: row.bytes for row in uncollected}
    return dataclasses.replace(
        after, rows=tuple(_before_the_end(row, held.get(row._key, 0)) for row in after)
    )


def _before_the_end(row: Escape, held: int) -> Escape:
    ran = row.history[:-2]
    if row.growing or not ran:
        return row
    freed, garbage = ran[-1][1] - row.history[-1][1], held - row.bytes
    if garbage > 0 and 2 * garbage >= freed:
        return row
    # It stayed as large until it was freed: a cache that was full long before did not grow.
    if not keeps_rising([*ran, (row.history[-2][0], ran[-1][1])]):
        return row
    return dataclasses.replace(row, growing=True, slope=slope(ran))


def _written(text: str, path: Path | None) -> str:
    if path is not None:
        with open(os.fspath(path), "w", encoding="utf-8") as file:
            file.write(text)
    return text


def _row(raw: dict[str, Any]) -> Escape:
    """A row as the native module tells it."""
    sites: dict[str, Any] = {
        name: tuple(Frame(file, line, function) for file, function, line in raw[name])
        for name in ("site", "used")
    }
    history = tuple(map(tuple, raw["history"]))
    return Escape(**{**raw, **sites, "history": history, "slope": 0.0, "growing": False})


def _merged(one: Escape, other: Escape) -> Escape:
    """One row of two with the same key, such as from two calls in one line."""
    sums: dict[str, Any] = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("count", "bytes", "count_ever", "bytes_ever", "uses")
    }
    return dataclasses.replace(
        one,
        **sums,
        used=one.used or other.used,
        first=min(one.first, other.first),
        last=max(one.last, other.last),
        age=max(one.age, other.age),
        example=one.example or other.example,
        turn=max(one.turn, other.turn),
        history=summed(one.history, other.history),
    )


def _map(rows: Iterable[dict[str, Any]]) -> EscapeMap:
    found: dict[Any, Escape] = {}
    for row in map(_row, rows):
        same = found.get(row._key)
        found[row._key] = row if same is None else _merged(same, row)
    return EscapeMap(tuple(map(_judged, found.values())))


def _judged(row: Escape) -> Escape:
    """The row with what follows from its history."""
    growing = row.count > 0 and keeps_rising(row.history)
    return dataclasses.replace(row, slope=slope(row.history), growing=growing)


def escapes() -> EscapeMap:
    """Return the map of what escapes: what outlived its tick, by the place it came from.

    It has what was allocated while ``arena.trace()`` was on, or in ticks with ``trace=``; Python
    objects of ticks with ``objects=True``; and nothing of the time before. What waits for the
    garbage collector is alive: call ``gc.collect()`` first to leave it out. Any thread may call it
    while others allocate. Raises MemoryError. C: arena_escapes.
    """
    return _map(_native._rows())

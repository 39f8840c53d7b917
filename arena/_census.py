"""Counts live Python objects by type, in bounded time: ``census()``."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["SMALL", "Census", "Count", "census", "grown"]

SMALL = 512
"""Bytes up to which Python's own arenas hold an object; larger ones are from malloc."""

_LARGE = 4096  # bytes: what is larger may refer to so much that it is never left to chance
_MANY = 20_000  # references of one object; of more, not all are followed
_SAMPLE = 4_000  # of these
_ASIDE = 512  # objects between two looks at the clock
_FUNCTION = 1  # inspect.CO_OPTIMIZED: a function, not a module or the body of a class
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OURS = tuple(_HERE + name for name in ("_census.py", "_inside.py", "diagnosis.py"))


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """The objects of one type."""

    type: str
    """Its module and name; of builtins the name alone."""
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Census:
    """What objects there were, by type, largest first. Bytes as ``sys.getsizeof`` has them."""

    types: tuple[Count, ...]
    count: int
    bytes: int
    above_small: int
    """Bytes of the objects above 512 bytes: in the C heap, not in Python's own arenas."""
    share: float
    """Of the objects that were looked at: below 1 the rest is estimated from these."""
    seconds: float


class _Tally:
    def __init__(self) -> None:
        self.counts: dict[type, float] = {}
        self.sizes: dict[type, float] = {}
        self.above = 0.0

    def add(self, kind: type, size: int, weight: float) -> None:
        self.counts[kind] = self.counts.get(kind, 0.0) + weight
        self.sizes[kind] = self.sizes.get(kind, 0.0) + size * weight
        if size > SMALL:
            self.above += size * weight

    def add_referred(self, owner: object, weight: float, ours: int = 0) -> None:
        """Add what ``owner`` refers to and the collector does not know: text, numbers, bytes.

        Each is counted by its share, one over its references: so one that many refer to is counted
        once in all, without a table of what was seen, which would be as large as the heap. Of the
        references ``ours`` do not count, nor those of the list of referents, the loop's variable
        and the argument.
        """
        referred = gc.get_referents(owner)
        if len(referred) > _MANY:
            referred, rest, scale = _sample(referred)
            self._add_each(rest, weight * scale, ours)
            del rest
        self._add_each(referred, weight, ours)

    def _add_each(self, referred: list[Any], weight: float, ours: int) -> None:
        for one in referred:
            if gc.is_tracked(one):
                continue
            part = weight / max(1, sys.getrefcount(one) - 3 - ours)
            kind: type = type(one)
            self.add(kind, _size(one), part)
            if kind is tuple or kind is dict:  # the collector lets go of those with no containers
                self.add_referred(one, part)

    def add_variables(self) -> None:
        """Add what the variables of running functions refer to."""
        for held in _variables():
            self.add_referred(held, 1.0, ours=1)


def _sample(many: list[Any]) -> tuple[list[Any], list[Any], float]:
    """The large ones, some of the others, and for how many each of these stands.

    While the program works on, what it replaces stays alive for as long as it is in a list of ours.
    So a large table is not walked: this takes a few milliseconds, most of them in C.
    """
    try:
        sizes = list(map(sys.getsizeof, many))
    except Exception:  # a __sizeof__ of the program's
        sizes = list(map(_size, many))
    large = list(itertools.compress(many, map(_LARGE.__lt__, sizes)))
    chosen = random.Random(len(many)).sample(range(len(many)), _SAMPLE)  # not every n-th: (1, "a")
    others = [many[at] for at in chosen if sizes[at] <= _LARGE]
    return large, others, len(many) / len(chosen)


def _size(one: object) -> int:
    try:
        return sys.getsizeof(one)
    except Exception:  # a __sizeof__ of the program's
        return 0


def _variables() -> Iterator[tuple[object, ...]]:
    """What the variables of running functions hold, of all threads but our own frames.

    The collector does not know them. Before 3.13 ``f_locals`` keeps a dict of what it has shown,
    which would keep all that alive for as long as the function runs: it is emptied again. That must
    not be done to a module, whose dict is its own, nor where a tracer may write the dict back.
    """
    tops = sys._current_frames()
    while tops:
        frame: FrameType | None = tops.popitem()[1]
        while frame is not None:
            code = frame.f_code
            if (
                code.co_flags & _FUNCTION
                and frame.f_trace is None
                and not code.co_filename.startswith(_OURS)
            ):
                shown = frame.f_locals
                held = tuple(shown.values())
                if type(shown) is dict:
                    shown.clear()
                yield held
            frame = frame.f_back


def census(seconds: float = 1.0) -> Census:
    """Count the live objects of the process, by type.

    Takes those that the collector knows, the variables of running functions, and what these refer
    to. Costs about a microsecond an object, in which other threads get their turns. After
    ``seconds`` it stops, and estimates the rest from what it has seen: see ``share``. Memory that
    only C code refers to is not seen.
    """
    start = time.perf_counter()
    limit = start + seconds
    tally = _Tally()
    tally.add_variables()
    # The list is 8 bytes an object, and goes when this function returns.
    objects: list[Any] = gc.get_objects()
    total = len(objects)
    for at in range(total):
        if at % _ASIDE == 0 and time.perf_counter() > limit - seconds / 2:
            break
        if (size := _size(objects[at])) > _LARGE:
            tally.add(type(objects[at]), size, 1.0)
            tally.add_referred(objects[at], 1.0)
    seen, others = 0, _Tally()
    for at in _spread(total):
        size = _size(objects[at])
        if size <= _LARGE:
            others.add(type(objects[at]), size, 1.0)
            others.add_referred(objects[at], 1.0)
        objects[at] = None  # what the program has let go of meanwhile may go
        seen += 1
        if seen % _ASIDE == 0 and time.perf_counter() > limit:
            break
    del objects
    share = seen / total if total else 1.0
    return _made(tally, others, share, time.perf_counter() - start)


def _spread(total: int) -> Iterator[int]:
    """Every so many-th of ``total`` first, then those between: it may be cut short anywhere."""
    step = max(1, total // 4096)
    while any(step % period == 0 for period in (2, 3, 5, 7)):
        step += 1  # objects lie in the order in which they were made: a dict, a list, a dict, ...
    for first in range(step):
        yield from range(first, total, step)


def _made(tally: _Tally, others: _Tally, share: float, seconds: float) -> Census:
    scale = 1 / share if share else 0.0
    kinds = tally.counts.keys() | others.counts.keys()
    rows = [
        Count(
            _name(kind),
            round(tally.counts.get(kind, 0.0) + scale * others.counts.get(kind, 0.0)),
            round(tally.sizes.get(kind, 0.0) + scale * others.sizes.get(kind, 0.0)),
        )
        for kind in kinds
    ]
    rows.sort(key=lambda row: row.bytes, reverse=True)
    return Census(
        types=tuple(rows),
        count=sum(row.count for row in rows),
        bytes=sum(row.bytes for row in rows),
        above_small=round(tally.above + scale * others.above),
        share=share,
        seconds=seconds,
    )


def _name(kind: type) -> str:
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def grown(before: Census, after: Census, share: float = 0.0) -> tuple[Count, ...]:
    """What there is more of, by type, most bytes first; types below ``share`` are left out."""
    had = {row.type: row for row in before.types}
    rows = []
    for row in after.types:
        was = had.get(row.type, Count(row.type, 0, 0))
        if row.bytes > was.bytes:
            rows.append(Count(row.type, row.count - was.count, row.bytes - was.bytes))
    rows.sort(key=lambda row: row.bytes, reverse=True)
    least = share * sum(row.bytes for row in rows)
    return tuple(row for row in rows if row.bytes >= least)

"""``assert_no_growth()``: a test that a turn of a loop leaves nothing behind that piles up."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any, TypeAlias, overload

from arena import _native
from arena.errors import ArenaError, GrowthError
from arena.escapes import Escape, EscapeMap, Frame, escapes

__all__ = ["assert_no_growth"]

_NAME = "assert_no_growth"
_PARTS = 4
_RISES = 3  # of the parts, the last one among them

_Source: TypeAlias = tuple[str, Frame | None, str | None]
_Alive: TypeAlias = dict[_Source, tuple[int, int]]


@overload
def assert_no_growth(  # type: ignore[overload-overlap]
    fn: Callable[[], Coroutine[Any, Any, object]],
    *,
    ticks: int = 50,
    warmup: int = 10,
    tolerance: int | str = 0,
    trace: int = 3,
) -> Awaitable[None]: ...
@overload
def assert_no_growth(
    fn: Callable[[], object],
    *,
    ticks: int = 50,
    warmup: int = 10,
    tolerance: int | str = 0,
    trace: int = 3,
) -> None: ...
def assert_no_growth(
    fn: Callable[[], Any],
    *,
    ticks: int = 50,
    warmup: int = 10,
    tolerance: int | str = 0,
    trace: int = 3,
) -> Awaitable[None] | None:
    """Call ``fn()`` in ``warmup`` and then ``ticks`` ticks; raise GrowthError if memory piles up.

    For an ``async def`` it returns an awaitable that does so: ``await assert_no_growth(fn)``.

    Each call runs in an ``arena.tick("assert_no_growth")`` that captures Python objects too and
    records ``trace`` frames of each place. ``gc.collect()`` runs after the warm-up and after each
    quarter of the ticks, so garbage in cycles is no growth. What grows is decided for each place
    (line, kind and tick name) by what is alive after each tick: the least of it rises in three of
    the four quarters, the last one among them, and all in all by more than ``tolerance`` bytes a
    tick (an int, or such as ``"1 KiB"``). So what is made once is no growth, nor is a cache that is
    full, or emptied now and then; one that takes longer to fill needs a larger ``warmup``. With no
    tolerance a rising number of things is growth too, whatever their bytes. Of Python objects it
    sees blocks above 512 bytes: a leak of one small object a tick shows in the table that holds it,
    once that grows. Memory of ticks that ``fn`` leaves open is not looked at.

    GrowthError is an AssertionError, and its text the map of what grew. What ``fn`` raises goes
    through. Memory of all threads counts, so nothing else should run meanwhile. Where Python
    objects cannot be captured, as in an installation without that module, it warns (RuntimeWarning)
    and watches the rest. Raises TypeError and ValueError for wrong arguments.
    """
    import inspect  # wanted only here

    if not callable(fn):
        raise TypeError(f"assert_no_growth() takes a function, not {type(fn).__name__}")
    watch = _Watch(
        _number("ticks", ticks, _PARTS),
        _number("warmup", warmup, 0),
        _tolerance(tolerance),
        _number("trace", trace, 1),
    )
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None)  # noqa: B004
    ):
        return _watch_async(fn, watch)
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError("assert_no_growth() takes a function: to call a generator's runs nothing")
    for _ in watch.turns():
        with watch.tick():
            made = fn()
            if inspect.iscoroutine(made):
                made.close()
                raise TypeError(
                    "assert_no_growth() was given a function that returns a coroutine: "
                    "give it the async function itself, and await the result"
                )
            del made
    watch.judge()
    return None


async def _watch_async(fn: Callable[[], Coroutine[Any, Any, object]], watch: _Watch) -> None:
    for _ in watch.turns():
        with watch.tick():
            await fn()
    watch.judge()


def _number(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is a whole number from {least}, not {value}")
    return value


def _tolerance(given: object) -> int:
    """Bytes, from an int or a text, by the parser of limits."""
    try:
        bytes_a_tick = _native.tick(limit=given).limit  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("a limit", "the tolerance a tick", 1)) from None
    if bytes_a_tick is None:
        raise TypeError("tolerance is a number of bytes, not None")
    return int(bytes_a_tick)


def _alive() -> _Alive:
    """Bytes and number of what is alive, by its innermost line: another caller is no other leak."""
    alive: _Alive = {}
    for row in _native._rows():
        if row["count"]:
            file, function, line = row["site"][0] if row["site"] else ("", "", 0)
            frame = Frame(file, line, function) if row["site"] else None
            source = (row["kind"], frame, row["tick"])
            bytes_, count = alive.get(source, (0, 0))
            alive[source] = (bytes_ + row["bytes"], count + row["count"])
    return alive


def _lower(low: _Alive, other: _Alive) -> _Alive:
    """The lower of both figures for each source; what is not in one of them had nothing alive."""
    return {
        source: (min(low[source][0], other[source][0]), min(low[source][1], other[source][1]))
        for source in low.keys() & other.keys()
    }


class _Watch:
    """Counts the turns, looks at what is alive after each, and judges at the end."""

    def __init__(self, ticks: int, warmup: int, tolerance: int, trace: int) -> None:
        self._ticks, self._warmup, self._tolerance = ticks, warmup, tolerance
        self._options: dict[str, Any] = {"objects": True, "trace": trace}
        self._lows: list[_Alive] = []
        self._end: _Alive = {}
        self._before: EscapeMap

    def tick(self) -> _native.Tick:
        """The tick of one turn."""
        return _native.tick(_NAME, **self._options)

    def turns(self) -> Iterator[None]:
        """Yield once a turn; all that is measured is measured between turns."""
        self._check_objects()
        for _ in range(self._warmup):
            yield
        gc.collect()
        self._before = escapes()
        self._end = _alive()
        self._lows = [self._end]
        for part in range(_PARTS):
            low = None
            ends = (part + 1) * self._ticks // _PARTS
            for turn in range(part * self._ticks // _PARTS, ends):
                yield
                if turn == ends - 1:
                    gc.collect()
                self._end = _alive()
                low = self._end if low is None else _lower(low, self._end)
            self._lows.append(low or {})

    def _check_objects(self) -> None:
        """Begin one tick to learn whether Python objects can be captured."""
        try:
            with self.tick():
                pass
        except (ImportError, ArenaError) as why:  # the latter under tracemalloc, among others
            self._options["objects"] = False
            warnings.warn(
                f"assert_no_growth() does not see Python objects: {why}",
                RuntimeWarning,
                stacklevel=4,
            )

    def judge(self) -> None:
        """Raise GrowthError with the map of what grew, if anything did."""
        grown = {source for source in self._end if self._grew(source)}
        if not grown:
            return
        rows = [
            dataclasses.replace(row, growing=True)
            for row in escapes().diff(self._before)
            if (row.bytes > 0 or row.count > 0) and _source(row) in grown
        ]
        more, things = (sum(self._rise(one, n) for one in grown) / self._ticks for n in (0, 1))
        without = "" if self._options["objects"] else " (Python objects were not watched)"
        raise GrowthError(
            f"memory grew by {more:,.1f} bytes ({things:,.1f} things) a tick over {self._ticks} "
            f"ticks, after {self._warmup} to warm up; {self._tolerance:,} bytes a tick are "
            f"allowed{without}\n"
            f"{EscapeMap(tuple(rows), changes=True)}"
        )

    def _rise(self, source: _Source, figure: int) -> int:
        return self._end.get(source, (0, 0))[figure] - self._lows[0].get(source, (0, 0))[figure]

    def _grew(self, source: _Source) -> bool:
        if self._rise(source, 0) > self._tolerance * self._ticks and self._piles_up(source, 0):
            return True
        return self._tolerance == 0 and self._rise(source, 1) > 0 and self._piles_up(source, 1)

    def _piles_up(self, source: _Source, figure: int) -> bool:
        """Whether what is never given back rises in enough quarters, and still in the last."""
        lows = [low.get(source, (0, 0))[figure] for low in self._lows]
        floors = [min(lows[index:]) for index in range(len(lows))]
        rises = [earlier < later for earlier, later in pairwise(floors)]
        return rises[-1] and sum(rises) >= _RISES


def _source(row: Escape) -> _Source:
    return row.kind, row.site[0] if row.site else None, row.tick

"""``ticks()``: the loop itself, one tick a turn, on time, in plain and in async code."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from arena import _native
from arena._native import Tick

if TYPE_CHECKING:
    import asyncio

__all__ = ["Ticks", "ticks"]

_SHORTEST = 1e-9  # seconds: the clock shows no less


class Ticks:
    """A loop that opens a tick each ``interval`` seconds; made by :func:`ticks`.

    Iterate it with ``for`` or ``async for``. Its counters may be read from any thread.
    """

    def __init__(
        self,
        interval: float,
        name: str | None,
        count: int | None,
        on_overrun: Callable[[Ticks], object] | None,
        options: dict[str, Any],
    ) -> None:
        self.interval = interval
        """Seconds from the start of one tick to the start of the next."""
        self.name = name
        """The name of each tick."""
        self.begun = 0
        """Ticks begun so far."""
        self.overruns = 0
        """Ticks whose body took longer than the interval."""
        self.skipped = 0
        """Starts that had passed already when an overrun was over, and were left out."""
        self.late = 0.0
        """Seconds by which the last tick began after its time."""
        self._count = count
        self._on_overrun = on_overrun
        self._options = options
        self._stopped = threading.Event()
        self._wakers: set[Callable[[], object]] = set()

    def stop(self) -> None:
        """End the loop before its next tick; one that waits for it wakes at once.

        Any thread and any signal handler may call it.
        """
        self._stopped.set()
        for wake in list(self._wakers):
            wake()

    def __iter__(self) -> _Plain:
        return _Plain(self)

    def __aiter__(self) -> _Async:
        return _Async(self)

    def __repr__(self) -> str:
        return (
            f"<arena.Ticks {self.name!r} each {self.interval} s: {self.begun} begun, "
            f"{self.overruns} overruns, {self.skipped} skipped>"
        )


class _Run:
    """One iteration over a Ticks: its open tick and its clock.

    A class and not a generator: when the consumer breaks out, an async generator is finalized in
    another task, at some later time; this ends its tick as soon as the loop lets go of it.
    """

    __slots__ = ("_due", "_loop", "_tick")

    def __init__(self, loop: Ticks) -> None:
        self._loop = loop
        self._tick: Tick | None = None
        self._due: float | None = None

    def _end(self) -> None:
        # A signal may have come before __init__ was done.
        tick = getattr(self, "_tick", None)
        self._tick = None
        if tick is not None and tick.open:
            tick.end()

    def _finished(self) -> bool:
        loop = self._loop
        return loop._stopped.is_set() or (loop._count is not None and loop.begun >= loop._count)

    def _wait(self) -> float:
        """Seconds until the next start; settles which start that is, and what was missed."""
        loop, now = self._loop, time.monotonic()
        if self._due is None:
            self._due = now
            return 0.0
        self._due += loop.interval
        behind = now - self._due
        if behind <= 0:
            return -behind
        if loop.interval > 0:
            # The start is late. Those that have wholly passed are left out, not run in a burst;
            # the rest keep to the grid, so nothing drifts.
            missed = math.floor(behind / loop.interval)
            self._due += missed * loop.interval
            loop.overruns += 1
            loop.skipped += missed
            if loop._on_overrun is not None:
                loop._on_overrun(loop)
        return 0.0

    def _begin(self) -> Tick:
        loop = self._loop
        loop.late = max(0.0, time.monotonic() - (self._due or 0.0))
        self._tick = _native.begin(loop.name, **loop._options)
        loop.begun += 1
        return self._tick

    def __del__(self) -> None:
        self._end()


class _Plain(_Run):
    __slots__ = ()

    def __iter__(self) -> _Plain:
        return self

    def __next__(self) -> Tick:
        self._end()
        if self._finished():
            raise StopIteration
        delay = self._wait()
        if (delay > 0 and self._loop._stopped.wait(delay)) or self._finished():
            raise StopIteration
        return self._begin()


class _Async(_Run):
    __slots__ = ()

    async def _sleep(self, loop: asyncio.AbstractEventLoop, delay: float) -> None:
        """Sleep until the delay is over or stop() is called, from whichever thread."""
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake_from_anywhere() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(wake)

        timer = loop.call_later(delay, wake)
        self._loop._wakers.add(wake_from_anywhere)
        try:
            if not self._loop._stopped.is_set():
                await woken
        finally:
            timer.cancel()
            self._loop._wakers.discard(wake_from_anywhere)

    def __aiter__(self) -> _Async:
        return self

    async def __anext__(self) -> Tick:
        import asyncio

        self._end()
        if self._finished():
            raise StopAsyncIteration
        delay = self._wait()
        if delay > 0:
            await self._sleep(asyncio.get_running_loop(), delay)
        else:
            await asyncio.sleep(0)  # a loop that is always late must not starve the others
        if self._finished():
            raise StopAsyncIteration
        return self._begin()


def ticks(
    interval: float,
    name: str | None = None,
    *,
    count: int | None = None,
    on_overrun: Callable[[Ticks], object] | None = None,
    limit: int | str | None = None,
    escapes: str = "allow",
    wipe: bool = False,
    trace: int = 0,
    objects: bool = False,
) -> Ticks:
    """Return a loop that yields an open tick each ``interval`` seconds and ends it after the body.

    ``for t in arena.ticks(0.2, "awareness"): ...`` or ``async for``. Starts keep to a fixed grid,
    so the period does not drift. A body that takes longer than the interval is counted in
    ``overruns``; starts that passed meanwhile are left out, counted in ``skipped``, and told to
    ``on_overrun(loop)``. ``interval`` 0 runs without a pause. ``count`` ends the loop after that
    many ticks, ``Ticks.stop()`` at any time. the other options are those of
    ``tick()``.

    The tick also ends when the body breaks, returns or raises. Its cleanups then run while the loop
    is let go of, where an error of theirs can only be reported, not raised.

    Raises TypeError and ValueError for a wrong interval, count or option.
    """
    if isinstance(interval, bool) or not isinstance(interval, (int, float)):
        raise TypeError(f"interval is a number of seconds, not {type(interval).__name__}")
    if interval != 0 and not _SHORTEST <= interval <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"interval is 0, or from {_SHORTEST} to {threading.TIMEOUT_MAX:.0f} seconds, "
            f"not {interval!r:.40}"
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise TypeError(f"count is a number of ticks, not {type(count).__name__}")
    if count is not None and count < 0:
        raise ValueError(f"count is a number of ticks from 0, not {count}")
    if on_overrun is not None and not callable(on_overrun):
        raise TypeError(f"on_overrun is a function, not {type(on_overrun).__name__}")
    options: dict[str, Any] = {
        "limit": limit,
        "escapes": escapes,
        "wipe": wipe,
        "trace": trace,
        **({"objects": True} if objects else {}),  # else what ARENA_OBJECTS says
    }
    _native.tick(name, **options)  # wrong options fail here and not in the first turn
    return Ticks(float(interval), name, count, on_overrun, options)

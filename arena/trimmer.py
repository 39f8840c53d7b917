"""``Trimmer``: the one thread that trims from time to time, and knows when not to."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
from types import TracebackType
from typing import Self

from arena import _native
from arena._native import lib
from arena._proc import ProcError, faults, statm
from arena._walk import stall
from arena.errors import TrimError
from arena.trimming import KEEP_RETAINED, TrimResult, log, run, switched_off, time_of

__all__ = ["Trimmer", "TrimmerStats", "active"]

_POLL = 1.0  # seconds: the longest time between two looks at ticks and resident memory
_LITTLE = 1 << 20  # bytes: next to nothing came back
_IN_A_ROW = 3
_MOST_BACKOFF = 64
_REFAULTED = 0.5  # of what was returned


@dataclasses.dataclass(frozen=True, slots=True)
class TrimmerStats:
    """What a ``Trimmer`` has done since it was made."""

    running: bool
    trims: int
    """Turns in which something was given back, or tried: chunks, and the heap where that was
    due."""
    skips: dict[str, int]
    """Turns in which the heap was not walked, by reason: "unseen" (even a look at what is free
    would take too long), "stall" (the walk would), "nothing" (less than 1 MiB is free), "shared"
    (another caller's trim ran)."""
    returned: int
    """Bytes by which resident memory fell, in all."""
    milliseconds: float
    """In all."""
    worst_ms: float
    """The longest walk of the heap, during which others who allocate from it wait, in
    milliseconds."""
    refault_share: float
    """How much of what was returned was faulted back before the next trim, 0 to 1: by minor faults
    of the whole process, so new memory counts too."""
    backed_off: int
    """By how much the times between two trims are longer now than was asked for: 1, 2, 4, ...
    64."""
    last: TrimResult | None
    ms_per_mb: float
    """What a walk is thought to take for each MB that is free in large pieces, in milliseconds: an
    average of the walks of this process, weighted towards the last."""
    withheld: str | None
    """Why the heap was not walked at the last turn, with the figures; None: it was."""


_active: Trimmer | None = None
_registry = threading.RLock()


def active() -> Trimmer | None:
    """The Trimmer that runs in this process, if any. Any thread may ask."""
    return _active


class Trimmer:
    """Trims from time to time, in a daemon thread of its own; one at a time in a process.

    A trim is due when ``every`` seconds have passed since the last, or resident memory has grown by
    ``growth`` (an int of bytes, or "64 MiB"), or ``every_ticks`` ticks have finished: whichever
    comes first, but no two within ``cooldown`` seconds. ``growth`` and ``every_ticks`` may be None.
    It does not wait for the process to be idle.

    Of arena's chunks all goes that the retention does not want to keep for the next ticks. The C
    heap is walked when that is predicted to take ``max_stall_ms`` milliseconds at the most, from
    what is free in it and from how long it took before; otherwise it is left alone, and
    ``stats().withheld`` says what stays resident because of it. It trims less and less often (up to
    64 times the periods above) while most of what came back is faulted in again before the next
    trim, and when three in a row returned next to nothing, which is logged once.

    ``start()`` and ``stop()``, or ``with``, or ``async with``. ``stop()`` waits for a trim that
    runs. A child that is forked has none: there it is stopped. Where the allocator has no way to
    give memory back, and with ARENA_TRIM=off in the environment, no thread is started. Raises
    TypeError and ValueError for what makes no sense, TrimError from ``start()`` when another one
    runs. C: arena_trim_all.
    """

    def __init__(
        self,
        every: float = 10.0,
        growth: int | str | None = "64 MiB",
        every_ticks: int | None = 16,
        max_stall_ms: float = 20.0,
        cooldown: float = 1.0,
    ) -> None:
        self._every = time_of(every, "every", "seconds")
        self._cooldown = time_of(cooldown, "cooldown", "seconds")
        self._max_stall = time_of(max_stall_ms, "max_stall_ms", "milliseconds")
        self._growth = None if growth is None else _native._size(growth, "growth")
        if self._growth == 0:
            raise ValueError("growth is a size above 0 bytes, or None, not 0")
        if every_ticks is not None and (
            isinstance(every_ticks, bool) or not isinstance(every_ticks, int)
        ):
            raise TypeError(f"every_ticks is a number of ticks, or None, not {every_ticks!r}")
        if every_ticks is not None and every_ticks < 1:
            raise ValueError(f"every_ticks is a number of ticks from 1, or None, not {every_ticks}")
        self._every_ticks = every_ticks
        self._where = ""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.RLock()  # over what follows
        self._trims = 0
        self._skips: dict[str, int] = {}
        self._returned = 0
        self._milliseconds = 0.0
        self._worst = 0.0
        self._refaulted = 0
        self._backoff = 1
        self._last: TrimResult | None = None
        self._withheld: str | None = None
        self._idle = 0  # trims in a row that returned next to nothing
        self._told: set[str] = set()

    # ---- start and stop ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Raises TrimError while a Trimmer runs in this process, this one too."""
        self._start(sys._getframe(1))

    def _start(self, caller: object) -> None:
        global _active
        with _registry:
            if _active is not None:
                raise TrimError(
                    f"a Trimmer runs in this process already, started at {_active._where}: "
                    "stop() that one first, or let it be the only one"
                )
            code = getattr(caller, "f_code", None)
            self._where = (
                f"{code.co_filename}:{getattr(caller, 'f_lineno', 0)}"
                if code
                else "an unknown line"
            )
            why = _nothing_to_do()
            if why:
                self._withheld = why
                log().info("no Trimmer thread is started: %s", why)
                return
            self._stop = threading.Event()
            thread = threading.Thread(
                target=self._run, args=(self._stop,), name="arena-trimmer", daemon=True
            )
            thread.start()
            self._thread, _active = thread, self
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended: for a walk of the heap at the longest."""
        global _active
        with _registry:
            thread, self._thread = self._thread, None
            if _active is self:
                _active = None
            self._stop.set()
        atexit.unregister(self.stop)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Self:
        self._start(sys._getframe(1))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self._start(sys._getframe(1))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.stop)

    def _forked(self) -> None:
        """In the child of a fork: the thread is not here, and may have held the lock."""
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = None

    # ---- what it tells -------------------------------------------------------------------------

    def stats(self) -> TrimmerStats:
        """Return what it has done. Any thread may ask."""
        with self._lock:
            return TrimmerStats(
                running=self._thread is not None,
                trims=self._trims,
                skips=dict(self._skips),
                returned=self._returned,
                milliseconds=self._milliseconds,
                worst_ms=self._worst,
                refault_share=self._refaulted / self._returned if self._returned else 0.0,
                backed_off=self._backoff,
                last=self._last,
                ms_per_mb=stall.ms_per_mb,
                withheld=self._withheld,
            )

    def __repr__(self) -> str:
        state = f"runs since {self._where}" if self._thread is not None else "stopped"
        return f"<arena.Trimmer: {state}, {self._trims} trims, {self._returned:,} bytes returned>"

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self, stop: threading.Event) -> None:
        poll = min(self._every, self._cooldown, _POLL)
        turn = _Turn()
        while not stop.wait(poll):
            reason = self._due(turn)
            if reason is None:
                continue
            try:
                self._trim(reason, turn)
            except Exception:
                # Whatever it was, the program's memory is not to be left to grow because of it;
                # nor when it is a handler of log records that raises.
                with contextlib.suppress(Exception):
                    log().exception("arena.Trimmer: a trim failed; it goes on")
            turn = _Turn()

    def _due(self, last: _Turn) -> str | None:
        passed = time.monotonic() - last.time
        if passed < self._cooldown * self._backoff:
            return None
        if passed >= self._every * self._backoff:
            return f"{self._every:g} s have passed"
        ticks = _finished() - last.ticks
        if self._every_ticks is not None and ticks >= self._every_ticks * self._backoff:
            return f"{ticks} ticks have finished"
        if self._growth is not None and last.resident:
            grown = _resident() - last.resident
            if grown >= self._growth * self._backoff:
                return f"resident memory grew by {grown / 1e6:.1f} MB"
        return None

    def _trim(self, reason: str, since: _Turn) -> None:
        refaulted = self._refaults(since)
        # What the next ticks need stays, unless there were none for a while.
        busy = _finished() > since.ticks
        result, planned = run(reason, KEEP_RETAINED if busy else 0, self._max_stall)
        kind = "shared" if result.shared else planned.kind
        with self._lock:
            self._trims += 1
            if kind:
                self._skips[kind] = self._skips.get(kind, 0) + 1
            self._milliseconds += result.milliseconds
            self._worst = max(self._worst, result.heap_milliseconds or 0.0)
            self._refaulted += refaulted
            given, self._last = self._given(), result
            self._returned += self._given()
            self._withheld = planned.withheld if kind in ("stall", "unseen") else None
            news = self._back_off(given, refaulted, result, kind)
        # Not under the lock: a handler of log records may ask for stats().
        if self._withheld:
            news[kind] = self._withheld
        for what, text in news.items():
            if what not in self._told:
                self._told.add(what)
                log().info("arena.Trimmer: %s", text)

    def _given(self) -> int:
        """Bytes that came back at the last trim, by this thread."""
        last = self._last
        return 0 if last is None or last.shared else max(0, last.returned)

    def _refaults(self, since: _Turn) -> int:
        """Bytes that were faulted in since the last trim, of those that it returned."""
        return min(self._given(), (_faulted() - since.faulted) * _PAGE)

    def _back_off(
        self, given: int, refaulted: int, result: TrimResult, kind: str
    ) -> dict[str, str]:
        """Under the lock: decide how long to wait for the next one. Returns what is worth
        telling."""
        news = {}
        in_vain = given >= _LITTLE and refaulted > _REFAULTED * given
        little = max(result.returned, result.chunks) < _LITTLE
        self._idle = self._idle + 1 if little else 0
        if in_vain or kind in ("stall", "unseen") or self._idle >= _IN_A_ROW:
            self._backoff = min(_MOST_BACKOFF, self._backoff * 2)
        elif not little:
            self._backoff = max(1, self._backoff // 2)
        if in_vain:
            news["refault"] = (
                f"{refaulted / given:.0%} of the {given / 1e6:.1f} MB that the last trim returned "
                "were faulted in again; it trims less often now"
            )
        if self._idle == _IN_A_ROW:
            news["idle"] = (
                f"{_IN_A_ROW} trims in a row returned next to nothing; it trims less often now"
            )
        return news


class _Turn:
    """What the counters were when a trim had ended."""

    def __init__(self) -> None:
        self.time = time.monotonic()
        self.ticks = _finished()
        self.resident = _resident()
        self.faulted = _faulted()


_PAGE = os.sysconf("SC_PAGE_SIZE")


def _nothing_to_do() -> str | None:
    if switched_off():
        return "ARENA_TRIM=off is set"
    if lib.arena_heap_kind() == lib.ARENA_HEAP_NONE:
        return "this process's allocator has no way to give memory back"
    return None


def _finished() -> int:
    return int(lib.arena_ticks_ended())


def _resident() -> int:
    try:
        return statm().resident
    except ProcError:
        return 0


def _faulted() -> int:
    try:
        return faults()[0]
    except ProcError:
        return 0


def _forked() -> None:
    global _active, _registry
    _registry = threading.RLock()
    trimmer, _active = _active, None
    if trimmer is not None:
        trimmer._forked()


os.register_at_fork(after_in_child=_forked)

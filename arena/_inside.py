"""Looks at the memory of this process from within, while it works and after: for ``doctor()``."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from arena import _proc
from arena._census import Census, census, grown
from arena._native import ffi, lib
from arena._proc import ProcError, started, statm
from arena._trend import Trend, trend
from arena._verdicts import (
    GROWTH,
    WORTH,
    Collector,
    Evidence,
    Level,
    Moved,
    Trimmed,
    judge,
)
from arena.diagnosis import Diagnosis
from arena.heap import HeapFigures, heap_figures
from arena.reporting import MemoryReport, memory
from arena.trimming import trim

__all__ = ["Watch", "examine", "moved"]

_LOOKS = 100  # in the time watched
_LEAST = 0.02  # seconds between two looks: a look costs 0.1 ms
_CHEAP = 0.005  # seconds: for more, the C heap is not looked at again and again
_IDLE = 0.002  # of a processor: below, nothing else has worked
_CENSUS = 2.0  # seconds for each census at the most
_TELLING = 0.02  # of the growth: types with less are left out, the first census itself among them
_TRIES = 50  # for the figures of a heap that is being trimmed
_ENOUGH = 20  # looks
_HEAP = 64 << 20  # HEAP_MAX_SIZE of glibc on 64 bits: each further heap begins at a multiple


def examine(watch: Watch, *, trim: bool, collect: bool) -> Diagnosis:
    """What ``doctor()`` does, once its arguments are known to be good."""
    visit = _Visit()
    first, before = visit.look(), visit.count()
    visits = _visits()
    watch.run()
    visited = _visits()
    last, after = visit.look(), visit.count()
    collector = _collector(visits, visited)
    collected = trimmed = None
    if collect:
        start = time.perf_counter()
        unreachable = gc.collect()
        visit.costs["gc.collect"] = (time.perf_counter() - start) * 1e3
        collected = visit.look()
        collector = dataclasses.replace(collector, unreachable=unreachable)
    gave = None
    if trim:
        gave = visit.trim()
        trimmed = visit.look()
    moved = watch.moved(first)
    if collector.frozen:
        visit.notes.append(
            f"{collector.frozen:,} objects are frozen (gc.freeze): neither counted nor collected"
        )
    if watch.idle:
        visit.notes.append("nothing else ran while the doctor looked: it saw a level, no growth")
    types = grown(before, after, _TELLING)
    found = Evidence(
        allocator=visit.allocator,
        seconds=watch.took,
        first=first,
        last=last,
        moved=moved,
        large=after.above_small - before.above_small,
        types=types,
        worked=not watch.idle,
        turns=watch.turned,
        collector=collector,
        collected=collected,
        trimmed=trimmed,
        trim=gave,
        heaps=visit.heaps,
        limit=visit.limit,
    )
    figures: dict[str, Any] = {
        name: dataclasses.asdict(level)
        for name in ("first", "last", "collected", "trimmed")
        if (level := getattr(found, name)) is not None
    }
    figures["moved"] = {name: dataclasses.asdict(one) for name, one in moved.items()}
    figures["collector"] = dataclasses.asdict(collector)
    figures["trim"] = gave and dataclasses.asdict(gave)
    figures["looks"] = len(watch.xs)
    figures["census"] = {"objects": after.count, "bytes": after.bytes, "share": after.share}
    return Diagnosis(
        pid=os.getpid(),
        allocator=visit.allocator,
        seconds=watch.took,
        turns=watch.turned,
        verdicts=judge(found),
        figures=figures,
        types=types,
        notes=tuple(visit.notes),
        costs_ms=visit.costs,
    )


class Watch:
    """Looks at memory again and again while the process works."""

    def __init__(
        self,
        work: Callable[[], object] | None,
        seconds: float,
        turns: int | None = None,
        ended: threading.Event | None = None,
    ) -> None:
        self._work = work
        self._seconds = seconds
        self._turns = turns
        self._ended = ended or threading.Event()
        self._every = max(_LEAST, seconds / _LOOKS)
        self._heap = True
        self._small = 0.0
        self.xs: list[float] = []
        self._resident: list[float] = []
        self._live_xs: list[float] = []
        self._live: list[float] = []
        self.took = 0.0
        self.turned: int | None = None if work is None else 0
        self.idle = False

    def run(self) -> None:
        """Watch, until the time or the turns are over, or what is watched has ended."""
        if self._work is not None:
            self._work()  # what the first turn imports and sets up is no growth
        start = time.perf_counter()
        other = time.process_time() - time.thread_time()
        if self._work is None:
            self._wait(start)
        else:
            self._turn(self._work, start)
        self.took = max(1e-9, time.perf_counter() - start)
        other = time.process_time() - time.thread_time() - other
        self.idle = self._work is None and other < _IDLE * self.took

    def _wait(self, start: float) -> None:
        for number in range(1, sys.maxsize):
            self._look(time.perf_counter() - start)
            due = start + min(number * self._every, self._seconds)
            if self._ended.wait(max(0.0, due - time.perf_counter())):
                return
            if time.perf_counter() - start >= self._seconds:
                self._look(time.perf_counter() - start)
                return

    def _turn(self, work: Callable[[], object], start: float) -> None:
        done, due = 0, 0.0
        while True:
            if self._turns is None:
                now, end, every = time.perf_counter() - start, self._seconds, self._every
            else:
                now, end, every = done, self._turns, self._turns / _LOOKS
            over = now >= end
            if now >= due or over:
                self._look(done)
                due = now + every
            if over:
                break
            work()
            done += 1
            self.turned = done

    def _look(self, x: float) -> None:
        self.xs.append(x)
        self._resident.append(statm().resident)
        if not self._heap:
            return
        start = time.perf_counter()
        figures = heap_figures()  # None while a trim runs
        if figures is not None and figures.used is not None:
            # By the clock once only: a look that another thread came between is no dear one.
            self._heap = bool(self._live) or time.perf_counter() - start < _CHEAP
            self._live_xs.append(x)
            self._live.append(figures.used)

    def moved(self, first: Level) -> dict[str, Moved]:
        """Return how the series went."""
        series = {"resident": moved(self.xs, self._resident)}
        if self._heap:
            series["live"] = moved(self._live_xs, self._live)
        return series


def moved(xs: Sequence[float], ys: Sequence[float]) -> Moved:
    """Return how a series went over all of its length."""
    if len(xs) < 2 or xs[-1] <= xs[0]:
        return Moved("not yet")
    found: Trend = trend(xs, ys)
    if found.state == "not yet" and len(ys) >= _ENOUGH:
        settled = ys[len(ys) // 4 :]
        if max(settled) - min(settled) < GROWTH:  # whatever it was, it is too little to be told
            return Moved("flat")
    span = xs[-1] - xs[0]
    numbers = [found.low, found.slope, found.high]
    low, slope, high = (one * span if math.isfinite(one) else 0.0 for one in numbers)
    return Moved(found.state, low, slope, high)


class _Visit:
    """The dear measurements, with what they cost and what was missing."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.costs: dict[str, float] = {}
        self.allocator = _allocator()
        self.heaps: int | None = None
        self.limit: int | None = None
        self._again = False

    def look(self) -> Level:
        """Return all levels as they are now."""
        report = memory(heap=True, objects=True, heaps=not self._again)
        for _ in range(_TRIES):
            if report.heap is not None or self.allocator == "none":
                break
            time.sleep(_LEAST)  # a trim runs: meanwhile nobody looks at the heap
            report = memory(heap=True, objects=True)
        self._again = True
        self._costs(report.costs_ms)
        for note in report.notes:
            if note not in self.notes:
                self.notes.append(note)
        if report.heap is not None and report.heap.heaps is not None:
            self.heaps = report.heap.heaps
        if report.cgroup is not None:
            self.limit = report.cgroup.limit
        return _level(report)

    def count(self) -> Census:
        """Return a census of the live objects."""
        counted = census(_CENSUS)
        self._costs({"census": counted.seconds * 1e3})
        if counted.share < 1:
            self.notes.append(
                f"the census was cut short after {counted.seconds:.1f} s: {counted.share:.0%} of "
                "the objects were looked at, the rest is estimated from these"
            )
        return counted

    def trim(self) -> Trimmed:
        """Trim, and return what came back."""
        result = trim(reason="doctor")
        self._costs({"trim": result.milliseconds})
        self.notes += result.skipped
        return Trimmed(
            result.returned,
            result.chunks,
            result.milliseconds,
            result.heap_milliseconds is not None,
            result.skipped,
        )

    def _costs(self, costs: dict[str, float]) -> None:
        for name, ms in costs.items():
            self.costs[name] = max(ms, self.costs.get(name, 0.0))


def _allocator() -> str:
    name: bytes = ffi.string(lib.arena_heap_name(lib.arena_heap_kind()))
    return name.decode()


def _level(report: MemoryReport) -> Level:
    heap, python, own = report.heap, report.objects, report.arena
    return Level(
        resident=report.resident,
        anonymous=report.anonymous or 0,
        file=report.file or 0,
        shmem=report.shmem or 0,
        peak=report.peak or 0,
        swap=report.swap or 0,
        heap_used=None if heap is None else heap.used,
        heap_free=None if heap is None else heap.free,
        small_used=None if python is None else python.used,
        small_held=None if python is None else python.arena_bytes,
        pinned=own.pinned,
        persisted=own.persisted,
        scratch=own.scratch,
        strays=own.strays,
        chunks=own.chunks + own.cached + own.pinned,
        loose=None if heap is None else _loose(heap),
    )


def _loose(heap: HeapFigures) -> int | None:
    """Bytes that glibc's heaps have resident and not in use; None: not known, or not worth a look.

    What mallinfo2 calls free may have gone back to the system, so this takes the mappings: the one
    named [heap], and those that begin where further heaps do. Costs as much as smaps_rollup.
    """
    if heap.backend != "glibc" or heap.used is None or (heap.free or 0) < WORTH:
        return None
    resident, ours = 0, False
    for line in _proc.read("smaps").splitlines():
        fields = line.split()
        if fields[0] == b"Rss:":
            resident += ours * int(fields[1]) * 1024
        elif not fields[0].endswith(b":"):
            start = int(fields[0].partition(b"-")[0], 16)
            ours = fields[-1] == b"[heap]" or (len(fields) == 5 and start % _HEAP == 0)
    return resident - (heap.used - (heap.mmapped or 0))


def _visits() -> int:
    return int(gc.get_stats()[-1]["collections"])


def _collector(before: int, after: int) -> Collector:
    return Collector(
        enabled=gc.isenabled(),
        thresholds=gc.get_threshold(),
        visits=after,
        watched=after - before,
        frozen=gc.get_freeze_count(),
        age=_age(),
    )


def _age() -> float | None:
    """Seconds that this process has run."""
    try:
        began = started(os.getpid()) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (ProcError, AttributeError, ValueError):
        return None

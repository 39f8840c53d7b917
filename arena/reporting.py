"""``memory()``: what this process's memory is made of, from all who count some of it."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from arena import _native, _proc
from arena._cgroup import Cgroup, cgroup
from arena._version import __version__
from arena.counters import Stats, stats
from arena.heap import BUSY, HeapFigures, UnknownError, ask_heap, count_heaps

__all__ = ["MemoryReport", "PythonHeap", "memory"]

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class PythonHeap:
    """Python's arenas for objects of up to 512 bytes. They are mappings, not in the C heap."""

    arenas: int
    """How many there are."""
    arena_bytes: int
    """Bytes of all. One goes back to the system when nothing is left in it."""
    used: int
    """Bytes of blocks in use."""
    free: int
    """Bytes of free blocks and of pools without any. What is missing is lost to rounding."""
    blocks: int
    """The number of blocks in use."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """What ``memory()`` saw. Bytes, unless the name says otherwise; None: not asked for, or not
    known, which ``notes`` tells."""

    pid: int
    resident: int
    """Memory of the process that is in RAM, as the system has it; 0 where that is not known."""
    shared: int
    """Of it, pages of files and memory that is shared."""
    swap: int | None
    peak: int | None
    """The most that was ever resident. It never falls: no level."""
    anonymous: int | None
    """Of the resident memory, what is no file's: heaps, stacks, arena's chunks."""
    file: int | None
    """Of the resident memory, pages of files: the system takes them back when it needs them."""
    shmem: int | None
    """Of the resident memory, tmpfs, memfds, and anonymous memory that is shared."""
    private: int | None
    """Pages that no other process has."""
    proportional: int | None
    """Resident memory, each page divided by the number of processes that have it."""
    cgroup: Cgroup | None
    heap: HeapFigures | None
    objects: PythonHeap | None
    arena: Stats
    """What arena itself has: ``stats()``."""
    notes: tuple[str, ...]
    """What is missing, and why."""
    costs_ms: dict[str, float]
    """Milliseconds that each source took."""

    def __str__(self) -> str:
        """A few lines to read."""
        return "\n".join(_lines(self))

    def as_json(self) -> str:
        """Return all of it as JSON (ASCII)."""
        import json

        return (
            json.dumps({"arena_version": __version__, **dataclasses.asdict(self)}, indent=1) + "\n"
        )


def memory(
    *, private: bool = False, heap: bool = False, heaps: bool = False, objects: bool = False
) -> MemoryReport:
    """Look at the memory of this process: half a millisecond, whatever its size.

    What costs more as the process grows is asked for by name. Milliseconds at 16 MB, and at 1 GB
    that is half small Python objects and half blocks of 1 KB (``python -m benchmarks sources``):

    - ``private``: private and proportional memory. The system walks all pages, and who maps or
      unmaps memory waits: 0.2; 14 to 23.
    - ``heap``: the C heap in use and free. Its allocator goes through the free pieces under its
      lock, and who allocates there waits: 0.01; 0.07, and 10 when each second block is free.
    - ``heaps``: that, and how many heaps there are: as much again.
    - ``objects``: Python's arenas, all pools of which are looked at with the GIL held: 0.04; 2.

    ``costs_ms`` says what each took this time. While a trim runs the heap is not looked at, and
    ``notes`` says so. Any thread may call it, a forked child too. It raises nothing for what cannot
    be had: that is None, with a note. Reads /proc/self/{statm,status,smaps_rollup,cgroup}, and the
    files of the control group. C: mallinfo2, malloc_info; mallctl; mi_process_info;
    _PyObject_DebugMallocStats.
    """
    import os

    asked = {"private": private, "heap": heap, "heaps": heaps, "objects": objects}
    for name, value in asked.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is True or False, not {value!r}")
    look = _Look()
    own = look.at("arena", stats)
    statm = look.at("statm", _proc.statm)
    status = look.at("status", _proc.status)
    group = look.at("cgroup", cgroup) if statm else None
    rollup = look.at("rollup", _proc.rollup) if private else None
    figures = look.at("heap", ask_heap) if heap or heaps else None
    if figures is not None and heaps:
        figures = dataclasses.replace(figures, heaps=look.at("heaps", count_heaps))
    python = look.at("objects", _ask_python) if objects else None
    if figures is not None and figures.used is None:
        look.note(f"{figures.backend} does not tell what is used and what is free")
    assert own is not None
    return MemoryReport(
        pid=os.getpid(),
        resident=statm.resident if statm else 0,
        shared=statm.shared if statm else 0,
        swap=status.swap if status else None,
        peak=status.peak if status else None,
        anonymous=status.anonymous if status else None,
        file=status.file if status else None,
        shmem=status.shmem if status else None,
        private=rollup.private if rollup else None,
        proportional=rollup.proportional if rollup else None,
        cgroup=group,
        heap=figures,
        objects=python,
        arena=own,
        notes=tuple(look.notes),
        costs_ms=look.costs,
    )


class _Look:
    """Asks one source after the other, and remembers what each took, and what is missing."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.costs: dict[str, float] = {}

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def at(self, name: str, source: Callable[[], _T]) -> _T | None:
        start = time.perf_counter()
        try:
            return source()
        except (_proc.ProcError, UnknownError) as error:
            self.note(str(error))
            return None
        finally:
            self.costs[name] = (time.perf_counter() - start) * 1e3


def _ask_python() -> PythonHeap:
    text = _native._small_objects()
    if text is None:
        raise UnknownError(BUSY.format("Python's arenas are"))
    found = _told(text)
    try:
        held = found["# arenas allocated current"]
        used, loose = found["# bytes in allocated blocks"], found["# bytes in available blocks"]
        size, pools = found["arenas"], found["unused pools"]
    except KeyError:
        raise UnknownError(
            "this Python does not tell what is in its arenas for small objects"
            + (" (PYTHONMALLOC is set?)" if not text else "")
        ) from None
    return PythonHeap(held, size, used, loose + pools, sys.getallocatedblocks())


def _told(text: str) -> dict[str, int]:
    """The lines of a text such as ``5 arenas * 1048576 bytes/arena = 5,242,880``, by what is
    counted."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        what, equals, number = line.partition("=")
        digits = number.strip().replace(",", "")
        if not equals or not digits.isdecimal():
            continue
        name = what.partition("*")[0].strip().lstrip("0123456789 ")
        found.setdefault(name, int(digits))
    return found


def _mb(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e6:,.1f} MB"


def _lines(report: MemoryReport) -> list[str]:
    lines = [
        f"process {report.pid}: {_mb(report.resident)} resident (anonymous "
        f"{_mb(report.anonymous)}, files {_mb(report.file)}, shared memory {_mb(report.shmem)}); "
        f"peak {_mb(report.peak)}; swap {_mb(report.swap)}"
    ]
    if report.private is not None:
        lines.append(f"private {_mb(report.private)}, proportional {_mb(report.proportional)}")
    group, heap, python, own = report.cgroup, report.heap, report.objects, report.arena
    if group is not None:
        limit = "no limit" if group.limit is None else f"limit {_mb(group.limit)}"
        lines.append(
            f"cgroup v{group.version}: {_mb(group.current)}, {limit}, {group.oom_kills} OOM kills"
        )
    if heap is not None:
        count = "" if heap.heaps is None else f" in {heap.heaps:,} heaps"
        pieces = "" if heap.blocks_free is None else f" in {heap.blocks_free:,} pieces"
        lines.append(
            f"C heap ({heap.backend}{count}): {_mb(heap.used)} in use (mmapped "
            f"{_mb(heap.mmapped)}), {_mb(heap.free)} free{pieces}"
        )
    if python is not None:
        lines.append(
            f"Python's small objects: {_mb(python.used)} in use, {_mb(python.free)} free, in "
            f"{python.arenas:,} arenas of {_mb(python.arena_bytes)} in all"
        )
    lines.append(
        f"arena: scratch {_mb(own.scratch)}, persisted {_mb(own.persisted)}, pinned "
        f"{_mb(own.pinned)}, cached {_mb(own.cached)}, strays {_mb(own.strays)}"
    )
    return lines + [f"note: {note}" for note in report.notes]

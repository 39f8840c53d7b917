"""Looks at another process through /proc, and attaches nothing: ``look_at()``."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from arena._cgroup import cgroup
from arena._inside import moved
from arena._proc import ProcError, Status, faults, started, status, ticks
from arena._verdicts import Level, Outside, judge_outside
from arena.diagnosis import Diagnosis

__all__ = ["EndedError", "look_at"]

_LOOKS = 100
_LEAST = 0.05  # seconds
_DEAD = ("Z", "X")  # states: nobody has asked for its exit status yet
_HEAP = 64 << 20  # HEAP_MAX_SIZE of glibc on 64 bits: each further heap begins at a multiple
_SERIES = ("resident", "anonymous", "file", "shmem")
_ALLOCATORS = {
    "libjemalloc": "jemalloc",
    "libmimalloc": "mimalloc",
    "libtcmalloc": "tcmalloc",
    "ld-musl": "musl",
    "libc.so.6": "glibc",
    "libc-2.": "glibc",
}
"""Libraries by the start of their names; one that is preloaded comes before the C library."""
_TUNABLES = ("MALLOC_", "GLIBC_TUNABLES=", "LD_PRELOAD=", "PYTHONMALLOC=", "_RJEM_MALLOC_CONF=")
_MEANING = (
    "from outside it shows how much, and of which kind of page; not whether private memory is "
    "Python objects, native memory, cycles or free inside the allocator, nor what a trim returns"
)


class EndedError(ProcError):
    """The process has ended while it was looked at."""


def look_at(pid: int, seconds: float) -> Diagnosis:
    """Watch process ``pid`` for ``seconds``, and say what can be known of it from outside.

    Costs it nothing; here each look is a read of ``/proc/PID/status``. Raises ProcError when there
    is no such process, when it may not be read, or when it ends meanwhile (EndedError).
    """
    identity = started(pid)
    first = status(pid)
    if first.state in _DEAD:
        raise ProcError(f"process {pid} has ended: its memory is gone")
    faulted, ticked = faults(pid), ticks(pid)
    xs, looks = [0.0], [first]
    start = time.perf_counter()
    every = max(_LEAST, seconds / _LOOKS)
    while (elapsed := time.perf_counter() - start) < seconds:
        time.sleep(min(len(xs) * every, seconds) - elapsed if len(xs) * every > elapsed else 0.0)
        try:
            looks.append(status(pid))
            gone = looks[-1].state in _DEAD or started(pid) != identity
        except ProcError:
            gone = True
        if gone:
            took = time.perf_counter() - start
            raise EndedError(
                f"process {pid} ended after {took:.1f} s of {seconds:g}, at "
                f"{max(one.resident for one in looks) / 1e6:.1f} MB: too early to tell"
            )
        xs.append(time.perf_counter() - start)
    took = xs[-1]
    series = {name: moved(xs, [_value(one, name) for one in looks]) for name in _SERIES}
    ticked_now = ticks(pid)
    turned = None if ticked is None or ticked_now is None else ticked_now - ticked
    mapped = _Mapped(pid)
    group = cgroup(pid)
    found = Outside(
        allocator=mapped.allocator,
        seconds=took,
        first=_level(first),
        last=_level(looks[-1]),
        moved=series,
        ticks=turned,
        limit=None if group is None else group.limit,
    )
    minor, major = (now - was for now, was in zip(faults(pid), faulted, strict=True))
    notes = [
        _MEANING,
        *mapped.notes,
        f"threads: {looks[-1].threads}; page faults a second: {minor / took:,.0f} minor, "
        f"{major / took:,.0f} major",
    ]
    if group is not None and group.oom_kills:
        notes.append(f"its cgroup had {group.oom_kills} OOM kills")
    return Diagnosis(
        pid=pid,
        allocator=mapped.allocator,
        seconds=took,
        turns=turned,
        verdicts=judge_outside(found),
        figures={
            "first": dataclasses.asdict(found.first),
            "last": dataclasses.asdict(found.last),
            "moved": {name: dataclasses.asdict(one) for name, one in series.items()},
            "faults": {"minor": minor, "major": major},
            "threads": looks[-1].threads,
            "heaps": mapped.heaps,
            "cgroup": group and dataclasses.asdict(group),
            "looks": len(xs),
        },
        notes=tuple(notes),
    )


def _value(now: Status, name: str) -> float:
    return float(_level(now).resident if name == "resident" else getattr(now, name) or 0)


def _level(now: Status) -> Level:
    anonymous, file, shmem = now.anonymous or 0, now.file or 0, now.shmem or 0
    return Level(
        resident=anonymous + file + shmem,
        anonymous=anonymous,
        file=file,
        shmem=shmem,
        peak=now.peak or 0,
        swap=now.swap or 0,
    )


class _Mapped:
    """What the mappings and the environment of a process tell, where they may be read."""

    def __init__(self, pid: int) -> None:
        self.allocator = "unknown"
        self.heaps: int | None = None
        self.notes: list[str] = []
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        except OSError as error:
            self.notes.append(f"its allocator is not known: maps cannot be read, {error.strerror}")
        else:
            self._read(lines)
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            return
        tuned = [one for one in environ.split("\0") if one.startswith(_TUNABLES)]
        if tuned:
            self.notes.append(f"started with {' '.join(tuned)}")

    def _read(self, lines: list[str]) -> None:
        names = {line.rpartition("/")[2] for line in lines if "/" in line}
        for start, allocator in _ALLOCATORS.items():
            if any(name.startswith(start) for name in names):
                self.allocator = allocator
                break
        if self.allocator in ("jemalloc", "mimalloc", "tcmalloc"):
            self.notes.append(
                f"{self.allocator} is mapped, and so most likely its malloc: what mallinfo and "
                "malloc_trim say of glibc does not hold for it"
            )
        elif self.allocator == "unknown":
            self.notes.append("no known allocator is mapped: it may be linked in")
        elif self.allocator == "glibc":
            self.heaps = sum(map(_begins_heap, lines))
            self.notes.append(
                f"glibc, with {self.heaps} heaps beside the main one (mappings at multiples of "
                "64 MiB; each thread may have its own: MALLOC_ARENA_MAX=2 caps them)"
            )


def _begins_heap(line: str) -> bool:
    fields = line.split()
    return (
        len(fields) == 5  # no name
        and fields[1] in ("rw-p", "---p")
        and int(fields[0].partition("-")[0], 16) % _HEAP == 0
    )

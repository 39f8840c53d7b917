"""What Linux's /proc tells of a process: this one, or another by its number."""

from __future__ import annotations

import dataclasses
import os
import struct
from types import TracebackType
from typing import Self

__all__ = [
    "ProcError",
    "Rollup",
    "Statm",
    "Status",
    "TickCounter",
    "children",
    "faults",
    "heaps",
    "rollup",
    "started",
    "statm",
    "status",
    "ticks",
]

PROC = "/proc"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_KB = 1024
_HEAP = 64 << 20  # HEAP_MAX_SIZE of glibc on 64 bits: each further heap begins at a multiple


class ProcError(OSError):
    """What was asked for cannot be read; the text is one line that says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Statm:
    """Bytes, from /proc/PID/statm: the cheapest source (some 5 us, whatever the process's size)."""

    resident: int
    shared: int
    """Of it, pages of files and of memory that is shared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """From /proc/PID/status. Sizes in bytes."""

    name: str
    state: str
    """One letter: R, S, D, Z, ..."""
    threads: int
    resident: int
    peak: int
    """The most that was ever resident."""
    anonymous: int
    """Of the resident memory, what is no file's."""
    file: int
    """And what is: pages that the system can take back."""
    shmem: int
    """And what is shared: tmpfs, memfds, shared anonymous memory."""
    swap: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rollup:
    """Bytes, from /proc/PID/smaps_rollup, for which the system walks all pages: 22 ms at 1.5 GB."""

    proportional: int
    """Resident memory, each page divided by the number of processes that have it."""
    private: int
    """Pages that no other process has: what would be free if this one ended."""


def read(path: str, pid: int | None = None) -> bytes:
    """Read /proc/PID/``path``, whole. Raises ProcError."""
    who = "self" if pid is None else str(pid)
    try:
        with open(f"{PROC}/{who}/{path}", "rb") as file:
            return file.read()
    except OSError as error:
        raise _problem(error, pid, path) from None


def _problem(error: OSError, pid: int | None, path: str) -> ProcError:
    who = "self" if pid is None else pid
    if not os.path.isdir(f"{PROC}/self"):
        return ProcError("there is no /proc here: memory is read from it, on Linux only")
    if pid is not None and not os.path.isdir(f"{PROC}/{pid}"):
        return ProcError(f"there is no process {pid}")
    if isinstance(error, ProcessLookupError):  # it was there when the file was opened
        return _ended(who)
    if isinstance(error, FileNotFoundError):
        return ProcError(f"this system has no {PROC}/{who}/{path}")
    if isinstance(error, PermissionError):
        return ProcError(
            f"no permission to read {PROC}/{who}/{path}: the process is another user's, or "
            "protected"
        )
    return ProcError(f"{PROC}/{who}/{path}: {error.strerror}")


def _ended(who: int | str) -> ProcError:
    return ProcError(f"process {who} has ended: its memory is gone")


def statm(pid: int | None = None) -> Statm:
    """Read resident and shared memory. Raises ProcError, also for a process that has ended and that
    its parent has not waited for yet."""
    numbers = read("statm", pid).split()
    if pid is not None and numbers[1] == b"0" and _stat(pid)[0] in (b"Z", b"X"):
        raise _ended(pid)
    return Statm(int(numbers[1]) * _PAGE, int(numbers[2]) * _PAGE)


def status(pid: int | None = None) -> Status:
    """Read what kinds of memory are resident, and more. Raises ProcError; a zombie has no
    memory."""
    lines = read("status", pid).decode("utf-8", "replace").splitlines()
    found = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def size(key: str) -> int:
        return int(found[key].split()[0]) * _KB if key in found else 0

    return Status(
        name=found.get("Name", ""),
        state=found.get("State", "?")[:1],
        threads=int(found.get("Threads", "0")),
        resident=size("VmRSS"),
        peak=size("VmHWM"),
        anonymous=size("RssAnon"),
        file=size("RssFile"),
        shmem=size("RssShmem"),
        swap=size("VmSwap"),
    )


def _stat(pid: int | None) -> list[bytes]:
    """The fields of /proc/PID/stat from the third on: the second may hold anything."""
    return read("stat", pid).rpartition(b")")[2].split()


def faults(pid: int | None = None) -> tuple[int, int]:
    """Count page faults, ever: (minor, major). Raises ProcError."""
    fields = _stat(pid)
    return int(fields[10 - 3]), int(fields[12 - 3])


def started(pid: int | None = None) -> int:
    """When the process began, in clock ticks after the boot: with its number, who it is. Raises
    ProcError."""
    return int(_stat(pid)[22 - 3])


def children(pid: int) -> list[int]:
    """The processes that it has started, and those that these have. Raises ProcError.

    One that ends meanwhile is left out, and so are all where the system does not tell
    (CONFIG_PROC_CHILDREN).
    """
    try:
        threads = os.listdir(f"{PROC}/{pid}/task")
    except OSError as error:
        raise _problem(error, pid, "task") from None
    found = []
    for thread in threads:
        try:
            found += [int(child) for child in read(f"task/{thread}/children", pid).split()]
        except ProcError:
            continue
    below: list[int] = []
    for child in found:
        try:
            below += children(child)
        except ProcError:
            continue
    return found + below


def heaps() -> int:
    """Bytes of addresses of glibc's heaps in this process: a millisecond with a thousand mappings.

    The mapping that is named [heap], and those without a name that begin where further heaps do, at
    multiples of 64 MiB, and are no larger than these. Raises ProcError.
    """
    size = 0
    for line in read("maps").splitlines():
        fields = line.split()
        start, end = (int(number, 16) for number in fields[0].split(b"-"))
        further = len(fields) == 5 and start % _HEAP == 0 and end - start <= _HEAP
        if fields[-1] == b"[heap]" or (further and b"w" in fields[1]):
            size += end - start
    return size


def rollup(pid: int | None = None) -> Rollup:
    """Read private and proportional memory, which takes milliseconds. Raises ProcError."""
    lines = read("smaps_rollup", pid).decode().splitlines()[1:]
    sizes = {
        key: int(value.split()[0]) * _KB
        for key, _, value in (line.partition(":") for line in lines)
    }
    return Rollup(
        proportional=sizes.get("Pss", 0),
        private=sizes.get("Private_Clean", 0) + sizes.get("Private_Dirty", 0),
    )


class TickCounter:
    """The number of finished ticks that a process shows: see ``export_ticks()``.

    Opened once, then read cheaply; it can be read after the process has ended. A context manager.
    Raises ProcError when the process shows none.
    """

    def __init__(self, pid: int | None = None) -> None:
        who = "self" if pid is None else str(pid)
        self._file = _tick_file(pid)
        if self._file < 0:
            raise ProcError(
                f"process {who} does not show its ticks: set ARENA_EXPORT=1, or call "
                "arena.export_ticks() in it"
            )

    def read(self) -> int:
        """Return how many ticks have finished, to within 10. Raises ProcError for another
        layout."""
        text = os.pread(self._file, 16, 0)
        if len(text) < 16 or text[:8] != b"ARENAtk1":
            raise ProcError("the ticks of the process are shown by another version of arena")
        number: int
        (number,) = struct.unpack("=Q", text[8:])
        return number

    def close(self) -> None:
        """Close it; a second time does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _tick_file(pid: int | None) -> int:
    """Open the exported counter: a descriptor, or -1 when the process shows none."""
    folder = f"{PROC}/{'self' if pid is None else pid}/fd"
    try:
        entries = os.listdir(folder)
    except OSError as error:
        raise _problem(error, pid, "fd") from None
    for entry in entries:
        path = f"{folder}/{entry}"
        try:
            if not os.readlink(path).startswith("/memfd:arena-ticks"):
                continue
            if os.lstat(path).st_mode & 0o200:  # one opened to read is another process's
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # closed meanwhile
            continue
    return -1


def ticks(pid: int | None = None) -> int | None:
    """Read how many ticks have finished, to within 10; None when the process does not show it.

    Raises ProcError. Who reads it often keeps a ``TickCounter``.
    """
    try:
        with TickCounter(pid) as counter:
            return counter.read()
    except ProcError:
        started(pid)  # whether it is there at all
        return None

"""What the control groups of Linux, version 1 and 2, say of a process's memory: ``cgroup()``."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Literal

from arena import _proc

__all__ = ["Cgroup", "cgroup"]

_UNLIMITED = 1 << 62  # version 1 writes no limit as the largest number of pages that it can hold


@dataclasses.dataclass(frozen=True, slots=True)
class Cgroup:
    """The control group that a process's memory is charged to. Bytes, but for ``events``."""

    version: Literal[1, 2]
    path: str
    """The folder that its figures are read from."""
    current: int
    """What it holds: all its processes, and pages of files that the system keeps for them."""
    limit: int | None
    """The tightest one of it and the groups around it; None: none is set, or none can be seen."""
    room: int | None
    """How much it may still take until it or a group around it is at its limit; None: no limit."""
    high: int | None
    """From here on the system slows it down and takes pages back (version 2; the tightest one)."""
    swap_current: int | None
    """None: swap is not counted."""
    swap_limit: int | None
    oom_kills: int
    """How many of its processes the system has killed for want of memory, ever."""
    events: dict[str, int]
    """As the system counts them: ``memory.events`` of version 2 (low, high, max, oom, oom_kill);
    of version 1 ``failcnt``, ``oom_kill`` and ``under_oom``."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    """The names of the files of a version."""

    version: Literal[1, 2]
    current: str
    limit: str
    swap_current: str
    swap_limit: str
    events: str


_V1 = _Files(
    1,
    "memory.usage_in_bytes",
    "memory.limit_in_bytes",
    "memory.memsw.usage_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.oom_control",
)
_V2 = _Files(
    2,
    "memory.current",
    "memory.max",
    "memory.swap.current",
    "memory.swap.max",
    "memory.events",
)


def cgroup(pid: int | None = None) -> Cgroup | None:
    """Read the group of this process, or of another. None where no group counts memory.

    Groups outside of the container that this process runs in cannot be seen, so their limits are
    not known. Costs some 0.5 ms. Raises ProcError for a process that is not there.
    """
    placed = _place(_proc.read("cgroup", pid).decode("utf-8", "surrogateescape"))
    if placed is None or placed[1].startswith("/.."):  # outside of the namespace that is seen here
        return None
    files, path = placed
    mount = _mount(files)
    if mount is None:
        return None
    groups = [
        group for group in _upwards(*mount, path) if _number(group, files.current) is not None
    ]
    if not groups:
        return None
    own = groups[0]
    current = _number(own, files.current) or 0
    limits = [(_number(group, files.limit), group) for group in groups]
    rooms = [
        limit - (_number(group, files.current) or 0) for limit, group in limits if limit is not None
    ]
    known = [limit for limit, _ in limits if limit is not None]
    swap_current, swap_limit = _number(own, files.swap_current), _number(own, files.swap_limit)
    events = _table(own, files.events)
    if files is _V1:
        # Also of groups that cannot be seen.
        hierarchical = _table(own, "memory.stat").get("hierarchical_memory_limit", _UNLIMITED)
        if hierarchical < min(known, default=_UNLIMITED):
            known.append(hierarchical)
            rooms.append(hierarchical - current)
        # Its figures for swap are of memory and swap together.
        limit = _number(own, files.limit)
        swap_current = None if swap_current is None else max(0, swap_current - current)
        if swap_limit is not None:
            swap_limit = None if limit is None else max(0, swap_limit - limit)
        events.pop("oom_kill_disable", None)
        events["failcnt"] = _number(own, "memory.failcnt") or 0
    highs = [_number(group, "memory.high") for group in groups] if files is _V2 else []
    return Cgroup(
        version=files.version,
        path=own,
        current=current,
        limit=min(known, default=None),
        room=max(0, min(rooms)) if rooms else None,
        high=min((high for high in highs if high is not None), default=None),
        swap_current=swap_current,
        swap_limit=swap_limit,
        oom_kills=events.get("oom_kill", 0),
        events=events,
    )


def _place(text: str) -> tuple[_Files, str] | None:
    """Which version counts the memory, and where the process is in it, of /proc/PID/cgroup."""
    unified = None
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _V1, path
        if not controllers:
            unified = _V2, path
    return unified


def _mount(files: _Files) -> tuple[str, str] | None:
    """The group that is at the mount point, and the mount point: as this process sees them."""
    for line in _proc.read("mountinfo").decode("utf-8", "surrogateescape").splitlines():
        about, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2" if files is _V2 else "memory" in options.split(","):
            root, point = about.split(" ")[3:5]
            return _unescaped(root), _unescaped(point)
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _upwards(root: str, point: str, path: str) -> Iterator[str]:
    """The folder of the group, and those of the groups around it, as far as they are mounted.

    Where only a part is mounted (a container without a namespace of its own) the path may not be
    in it: then its own group is what is at the mount point.
    """
    inside = os.path.relpath(path, root) if path.startswith("/") else "."
    if inside.startswith("..") or not os.path.isdir(os.path.join(point, inside)):
        inside = "."
    while inside not in ("", "."):
        yield os.path.join(point, inside)
        inside = os.path.dirname(inside)
    yield point


def _text(group: str, name: str) -> str:
    try:
        with open(os.path.join(group, name), encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def _number(group: str, name: str) -> int | None:
    """A file with one number; None when it is not there, or says that there is no limit."""
    text = _text(group, name).strip()
    number = int(text) if text.isdecimal() else None
    return None if number is None or number >= _UNLIMITED else number


def _table(group: str, name: str) -> dict[str, int]:
    rows = (line.split() for line in _text(group, name).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}

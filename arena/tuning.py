"""``tune()``: settings of glibc's malloc that keep a long-running process small, set in time."""

from __future__ import annotations

import dataclasses
import os
import struct
import time
import warnings
from collections.abc import Mapping

from arena import _native, _proc
from arena._native import ffi, lib

__all__ = ["TuneResult", "lines", "settings", "tune"]

_MiB = 1 << 20
_LARGEST = 2**31 - 1  # mallopt() takes an int
# Half of HEAP_MAX_SIZE of glibc: from there on mallopt() refuses.
_MOST_MMAP = 32 * _MiB if struct.calcsize("P") == 8 else _MiB // 2
# When a heap is wanted and there are more than 8 (M_ARENA_TEST), glibc fixes how many there may be
# at 8 for each core, for good: so with 10 it has done that. Seen with 2.36.
_FIXED = 10


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    option: int
    """Of mallopt()."""
    variable: str
    tunable: str


_SETTINGS = {
    "arena_max": _Setting(-8, "MALLOC_ARENA_MAX", "glibc.malloc.arena_max"),
    "mmap_threshold": _Setting(-3, "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold"),
    "trim_threshold": _Setting(-1, "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold"),
}
_arena_max: int | None = None  # what an earlier tune() has set, in time


@dataclasses.dataclass(frozen=True, slots=True)
class TuneResult:
    """What ``tune()`` did, and how to have it from the start of the process."""

    backend: str
    """Whose malloc it is: see ``TrimResult.backend``."""
    applied: dict[str, int]
    """What was set, by name, and can take effect. Bytes, and a number of heaps."""
    late: tuple[str, ...]
    """What came too late to take effect, or all of it, and why."""
    notes: tuple[str, ...]
    """What else should be known: what was not set, what the environment says."""
    environment: str
    """The same settings as variables of the environment, which must be there when the process
    starts."""

    dockerfile: str
    """The line for a Dockerfile."""
    unit: str
    """The line for the [Service] section of a systemd unit file."""

    def __str__(self) -> str:
        done = ", ".join(f"{name}={value}" for name, value in self.applied.items())
        return "; ".join([f"set: {done or 'nothing'} ({self.backend})", *self.late, *self.notes])


def tune(
    mmap_threshold: int | str | None = "1 MiB",
    arena_max: int | None = 2,
    trim_threshold: int | str | None = "auto",
) -> TuneResult:
    """Set how glibc's malloc keeps memory, for this process. Call it before threads start.

    - ``mmap_threshold`` (bytes, or "1 MiB"): what is larger gets a mapping of its own, which goes
      back when it is freed. glibc starts with 128 KiB and raises it, to 32 MiB at the most, each
      time that a larger mapping is freed; once set it stays.
    - ``arena_max``: how many heaps threads share. By default each thread gets its own, up to 8 for
      each core, and each keeps what was freed in it.
    - ``trim_threshold`` (bytes): how much free memory may be at the end of a heap. "auto" is twice
      ``mmap_threshold``, as in glibc's own rule: that rule is off once one of the two is set.

    None leaves a setting alone. All are checked before the first is set. When there are more heaps
    already than ``arena_max`` (they are counted) a RuntimeWarning says so: those stay. Where malloc
    is not glibc's nothing is set, and ``notes`` says so. What is kept and what is not:
    ``python -m benchmarks tune``. Any thread may call it; it waits for whoever has the main heap,
    with the GIL released. Raises TypeError, ValueError. C: mallopt, malloc_info.
    """
    global _arena_max
    values = settings(mmap_threshold, arena_max, trim_threshold)
    backend = ffi.string(lib.arena_heap_name(lib.arena_heap_kind())).decode()
    if lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC:
        what = "is not glibc's" if backend == "none" else f"is {backend}'s, not glibc's"
        note = f"this process's malloc {what}: nothing was set"
        return TuneResult(backend, {}, (), (note,), *lines(values).values())
    started, notes = _started_with()
    late, fixed = _too_late(values.get("arena_max"), started.get("arena_max"))
    applied = {}
    for name, value in values.items():
        if started.get(name, value) != value:
            notes.append(f"{name}={started[name]} is in the environment that the process has")
        if not _native._heap_set(_SETTINGS[name].option, value):
            notes.append(f"glibc refused {name}={value}")
        elif name != "arena_max" or not fixed:
            applied[name] = value
    _arena_max = applied.get("arena_max", _arena_max)
    result = TuneResult(backend, applied, late, tuple(notes), *lines(values).values())
    if late:
        warnings.warn(
            f"arena.tune() came late: {'; '.join(late)}. Call it before threads start, or set "
            f"{result.environment} in the environment of the process",
            RuntimeWarning,
            stacklevel=2,
        )
    return result


def settings(
    mmap_threshold: int | str | None, arena_max: int | None, trim_threshold: int | str | None
) -> dict[str, int]:
    """Check what ``tune()`` is given; return what is to be set. Raises TypeError, ValueError."""
    values: dict[str, int] = {}
    if arena_max is not None:
        if isinstance(arena_max, bool) or not isinstance(arena_max, int):
            raise TypeError(f"arena_max is a number of heaps such as 2, or None, not {arena_max!r}")
        if not 1 <= arena_max <= _LARGEST:
            raise ValueError(f"arena_max is a number of heaps, 1 to {_LARGEST}, not {arena_max}")
        values["arena_max"] = arena_max
    if mmap_threshold is not None:
        values["mmap_threshold"] = _bytes("mmap_threshold", mmap_threshold, _MOST_MMAP)
    if trim_threshold == "auto":
        if mmap_threshold is not None:
            values["trim_threshold"] = 2 * values["mmap_threshold"]
    elif trim_threshold is not None:
        values["trim_threshold"] = _bytes("trim_threshold", trim_threshold, _LARGEST)
    if not values:
        raise ValueError(
            "nothing is to be set: give one of mmap_threshold, arena_max and trim_threshold"
        )
    return values


def _bytes(name: str, value: int | str, most: int) -> int:
    size = _native._size(value, name)
    if not 1 <= size <= most:
        raise ValueError(f"{name} is 1 to {most} bytes, the most that glibc takes, not {value!r}")
    return size


def lines(values: Mapping[str, int]) -> dict[str, str]:
    """The settings for the environment, a Dockerfile and a unit file, by where they go."""
    row = " ".join(f"{_SETTINGS[name].variable}={value}" for name, value in values.items())
    return {
        "environment": row,
        "Dockerfile": f"ENV {row}",
        "unit file, in [Service]": f"Environment={row}",
    }


def _too_late(arena_max: int | None, started: int | None) -> tuple[tuple[str, ...], bool]:
    """Why ``arena_max`` has not all of its effect any more, by the number of heaps; whether it has
    none."""
    if arena_max is None:
        return (), False
    while (heaps := _native._heap_count()) is None:  # a trim runs
        time.sleep(0.005)
    if heaps <= 1:  # or they cannot be counted
        return (), False
    there = f"{heaps} heaps exist already (counted)"
    before = started if _arena_max is None else _arena_max
    if before is not None and before != arena_max:
        return (
            f"{there}, and glibc keeps to the arena_max={before} that was set first once another "
            f"heap was wanted: arena_max={arena_max} may change nothing",
        ), False
    if before is None and heaps >= _FIXED:
        return (
            f"{there}, and from {_FIXED} on glibc has fixed how many there may be: "
            f"arena_max={arena_max} changes nothing",
        ), True
    if heaps > arena_max:
        return (f"{there}: arena_max={arena_max} stops new ones only",), False
    return (), False


def _started_with() -> tuple[dict[str, int], list[str]]:
    """What glibc has read of the environment when the process started; what was set too late."""
    now = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
    try:
        rows = _proc.read("environ").split(b"\0")
    except _proc.ProcError:
        first = now
    else:
        first = dict(row.split(b"=", 1) for row in rows if b"=" in row)
    found: dict[str, int] = {}
    notes = []
    tunables = dict(
        one.split(b"=", 1) for one in first.get(b"GLIBC_TUNABLES", b"").split(b":") if b"=" in one
    )
    for name, setting in _SETTINGS.items():
        variable = setting.variable.encode()
        text = tunables.get(setting.tunable.encode(), first.get(variable, b""))
        if text.isdigit():
            found[name] = int(text)
        if variable in now and variable not in first:
            notes.append(
                f"{setting.variable} was put into os.environ by the process itself: that has no "
                "effect here, only on programs that it starts"
            )
    return found, notes

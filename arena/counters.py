"""What memory arena holds at this moment: ``stats()``."""

from __future__ import annotations

import dataclasses

from arena._native import ffi, lib
from arena.retention import Retention, retention

__all__ = ["Stats", "stats"]


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """Counters of the whole process, in bytes unless the name says otherwise.

    Scratch counts what callers asked for; chunks count the pages mapped for it.
    """

    ticks_begun: int
    """Ticks begun, ever."""
    ticks_ended: int
    """Ticks ended, ever."""
    ticks_open: int
    """Ticks open now."""
    scratch: int
    """Bytes that open ticks have asked for. 0 when none is open."""
    scratch_peak: int
    """The most that one tick had asked for at its end."""
    chunks: int
    """Bytes mapped for open ticks now."""
    chunks_peak: int
    """The most bytes mapped for open ticks at one time."""
    cached: int
    """Bytes of chunks kept for the next ticks."""
    high_water: int
    """Bytes that the retention window says the next ticks need."""
    pinned: int
    """Bytes of chunks that outlive their tick because a view into them lives."""
    pinned_count: int
    """How many chunks that is."""
    pinned_ever: int
    """Chunks that were ever pinned past their tick."""
    persisted: int
    """Bytes of persisted memory now (a growing string by its capacity)."""
    persisted_count: int
    """Persisted allocations now."""
    persisted_peak: int
    """The most bytes of persisted memory at one time."""
    strays: int
    """Bytes that were allocated through the C API with no tick open, and live on."""
    strays_count: int
    """Such allocations now."""
    strays_ever: int
    """Such allocations, ever."""
    maps: int
    """Mappings of chunks asked of the operating system, ever."""
    unmaps: int
    """Mappings of chunks given back to it, ever."""
    retired: int
    """Bytes that ``debug(noreuse=True)`` or ``debug(guard=True)`` keep out of use, ever."""
    limit: int | None
    """The most bytes that the process may hold, or None: see ``set_limit()``."""
    quarantined: int
    """Bytes of chunks of ended ticks that an ``audit()`` keeps now."""
    retention: tuple[Retention, ...]
    """What is cached by which policy: see ``set_retention()``."""


_NO_LIMIT = 2**64 - 1
_COUNTERS = tuple(field.name for field in dataclasses.fields(Stats) if field.name != "retention")


def stats() -> Stats:
    """Return the process's counters as they are now.

    Any thread may call it while others allocate. It walks the open ticks that hold memory.
    C: arena_stats_get.
    """
    raw = ffi.new("arena_stats *")
    lib.arena_stats_get(raw)
    values = {name: getattr(raw, name) for name in _COUNTERS}
    if values["limit"] == _NO_LIMIT:
        values["limit"] = None
    return Stats(**values, retention=retention())

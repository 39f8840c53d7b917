"""What the C heap's allocator tells of itself. Light: ``trim()`` needs it."""

from __future__ import annotations

import dataclasses

from arena import _native
from arena._native import ffi, lib

__all__ = [
    "BUSY",
    "HeapFigures",
    "UnknownError",
    "ask_heap",
    "count_heaps",
    "heap_count",
    "heap_figures",
]

BUSY = "a trim runs: {} not looked at meanwhile"
"""What is said of what cannot be looked at while a trim runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeapFigures:
    """What the C heap's allocator tells of itself. Bytes; None: it does not tell."""

    backend: str
    """Whose it is: "glibc", "jemalloc", "mimalloc", "macos"."""
    held: int | None
    """Taken from the system and not unmapped. What a trim has returned inside of it is still
    counted: it is addresses without memory. (jemalloc: resident; mimalloc: committed.)"""
    used: int | None
    """In use, the mmapped too. glibc counts what threads keep to reuse as used: some 60 KB each."""
    free: int | None
    """Free inside the allocator: a trim returns the whole pages in it, and has returned some."""
    top: int | None
    """Of it, at the end of glibc's main heap, which goes back by itself."""
    mmapped: int | None
    """Of what is used, pieces in a mapping of their own, which go back when they are freed."""
    blocks_free: int | None
    """The number of free pieces."""
    heaps: int | None = None
    """How many heaps there are: with glibc a thread may have one of its own. None unless asked
    for."""


class UnknownError(Exception):
    """What was asked for cannot be had; the text says why."""


def heap_figures() -> HeapFigures | None:
    """``memory(heap=True).heap`` alone: None while a trim runs, or where the allocator tells
    nothing."""
    try:
        return ask_heap()
    except UnknownError:
        return None


def heap_count() -> int | None:
    """The number of heaps alone: None while a trim runs, or where the allocator does not tell."""
    try:
        return count_heaps()
    except UnknownError:
        return None


def ask_heap() -> HeapFigures:
    raw = _native._heap_figures()
    if raw is None:
        raise UnknownError(BUSY.format("the C heap is"))
    backend, wraps, held, used, free, top, mmapped, pieces = raw
    if backend == lib.ARENA_HEAP_NONE:
        raise UnknownError("this process's allocator tells nothing of its heap")
    if wraps:
        raise UnknownError("glibc before 2.33 has figures of 32 bits only: they wrap at 4 GB")
    name = ffi.string(lib.arena_heap_name(backend)).decode()
    return HeapFigures(name, held, used, free, top, mmapped, pieces)


def count_heaps() -> int:
    count = _native._heap_count()
    if count is None:
        raise UnknownError(BUSY.format("the heaps are"))
    if count < 0:
        raise UnknownError("this process's allocator does not tell how many heaps it has")
    return count

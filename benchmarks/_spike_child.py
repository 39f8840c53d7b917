"""The process that ``spike`` watches: small ticks, and one that needs 256 MiB.

Its argument says how. It is told "tick COUNT" or "spike BYTES", and answers with what the program
keeps, in bytes; or it is started with "SMALL SPIKE MORE" for so many small ticks, bytes, and small
ticks, and ends: for strace. It measures nothing: who watches it does.

A tick works on pieces of 64 KiB, or on one piece. Each 256th piece is kept for good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import arena
from benchmarks._child import serve
from benchmarks._heap import by_hand

PIECE = 64 << 10
SMALL = 2 * PIECE
KEPT = 256  # one of so many pieces
EACH = 16  # ticks from one malloc_trim to the next
SOURCE = b"x" * PIECE
kept: list[bytes] = []


def pieces(size: int) -> None:
    """A tick, in pieces."""
    with arena.tick() as tick:
        for index in range(size // PIECE):
            piece = tick.strdup(SOURCE)
            if index % KEPT == KEPT - 1:
                kept.append(bytes(piece))


def one(size: int) -> None:
    """A tick with one piece of that size."""
    with arena.tick() as tick:
        block = tick.alloc(size)
        with memoryview(block) as view:
            for start in range(0, size, PIECE):
                view[start : start + PIECE] = SOURCE
            for start in range(PIECE * (KEPT - 1), size, PIECE * KEPT):
                kept.append(bytes(view[start : start + PIECE]))


def plain(size: int) -> None:
    """The same without arena: a list of bytes that is dropped."""
    held = []
    for index in range(size // PIECE):
        held.append(bytes(memoryview(SOURCE)))
        if index % KEPT == KEPT - 1:
            kept.append(held[-1])


def by_ctypes(size: int) -> None:
    """And with the recipe, each 16 ticks."""
    global ticks
    plain(size)
    ticks += 1
    if ticks % EACH == 0:
        by_hand()


ticks = 0
WAYS: dict[str, Callable[[int], None]] = {
    "pieces": pieces,
    "one": one,
    "plain": plain,
    "ctypes": by_ctypes,
}


def repeat(count: str) -> int:
    for _ in range(int(count)):
        way(SMALL)
    return sum(map(len, kept))


def spike(size: str) -> int:
    way(int(size))
    return sum(map(len, kept))


if __name__ == "__main__":
    way = WAYS[sys.argv[1]]
    if len(sys.argv) > 2:
        small, size, more = sys.argv[2:]
        repeat(small)
        spike(size)
        repeat(more)
    else:
        serve({"tick": repeat, "spike": spike})

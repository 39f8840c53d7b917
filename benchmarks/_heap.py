"""The C heap of this process, by hand: a heap in pieces, and the recipes that give it back."""

from __future__ import annotations

import ctypes
import os
import time
from array import array
from collections.abc import Callable, Iterator

import arena
import arena.trimming  # here, and not in the first trim that is timed

LIBC = ctypes.CDLL("libc.so.6")
_HELD = ctypes.PyDLL("libc.so.6")  # keeps the GIL: quicker for short calls
_HELD.malloc.restype, _HELD.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_HELD.free.restype, _HELD.free.argtypes = None, [ctypes.c_void_p]
_HELD.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
malloc: Callable[[int], int] = _HELD.malloc
free: Callable[[int], None] = _HELD.free

KEPT = {"15/16": lambda index: index % 16 == 0, "3/4": lambda index: index % 4 == 0}
"""Shares that are freed, and which blocks are not."""


def fragment(size: int, block: int, share: str) -> tuple[array[int], int]:
    """Allocate ``size`` bytes in blocks, then free a share. Returns those that live, bytes freed.

    Blocks are 16 bytes less than their name says, which is what glibc puts to each.
    """
    blocks = array("Q", (malloc(block - 16) for _ in range(size // block)))
    for at in blocks:
        _HELD.memset(at, 1, block - 16)
    kept = KEPT[share]
    alive = array("Q", (at for index, at in enumerate(blocks) if kept(index)))
    for index, at in enumerate(blocks):
        if not kept(index):
            free(at)
    return alive, (len(blocks) - len(alive)) * block


class _Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]


LIBC.mallinfo2.restype = _Figures


def _allocate() -> None:
    """4 KB: what glibc keeps by thread, where no lock is needed, are pieces of 1 KB at the most."""
    free(malloc(4096))


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


TURNS: dict[str, Callable[[], object]] = {
    "allocates": _allocate,
    "forks": _fork,
    "calls mallinfo2": LIBC.mallinfo2,
    "does none of it": lambda: None,
}
"""What a thread may do while another one trims."""


def gaps(until: Callable[[], bool], turn: Callable[[], object]) -> Iterator[float]:
    """Yield the seconds between turns of a busy loop."""
    last = time.perf_counter()
    while not until():
        turn()
        now = time.perf_counter()
        yield now - last
        last = now


def by_hand() -> int:
    """The recipe. ctypes lets go of the GIL."""
    return int(LIBC.malloc_trim(0))


def by_hand_held() -> int:
    """The same, by the library object that keeps the GIL (``ctypes.pythonapi`` is one, too)."""
    return int(_HELD.malloc_trim(0))


def by_arena() -> int | None:
    """``arena.trim()``."""
    return arena.trim().code


def by_arena_budget() -> int | None:
    """``arena.trim()`` that may take 20 ms."""
    return arena.trim(budget_ms=20).code


RECIPES: dict[str, Callable[[], int | None]] = {
    "malloc_trim by ctypes": by_hand,
    "malloc_trim by ctypes.PyDLL": by_hand_held,
    "arena.trim()": by_arena,
    "arena.trim(budget_ms=20)": by_arena_budget,
}

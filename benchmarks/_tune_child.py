"""The process that ``tune`` watches: 64 threads that cycle buffers of 11 MiB.

Its argument says what it sets first. It is told "cycle THREADS TURNS", and answers when the threads
have ended; resident memory is read by who watches.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

import arena
from benchmarks._child import serve
from benchmarks._heap import LIBC

BUFFER = 11 << 20
SMALL, EACH = 2000, 50  # bytes; in each turn
HELD = 0.01  # seconds that a turn holds its memory: those of several threads lie between each other
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8


def mallopt(option: int, value: int) -> None:
    if LIBC.mallopt(ctypes.c_int(option), ctypes.c_int(value)) != 1:
        raise OSError(f"mallopt({option}, {value}) was refused")


def environ() -> None:
    os.environ["MALLOC_ARENA_MAX"] = "2"


def both_by_hand() -> None:
    mallopt(M_ARENA_MAX, 2)
    mallopt(M_MMAP_THRESHOLD, 1 << 20)


SETTINGS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "environ": environ,
    "heaps": lambda: arena.tune(arena_max=2, mmap_threshold=None),
    "mmap": lambda: arena.tune(arena_max=None, mmap_threshold="1 MiB"),
    "tune": arena.tune,
    "heaps by hand": lambda: mallopt(M_ARENA_MAX, 2),
    "mmap by hand": lambda: mallopt(M_MMAP_THRESHOLD, 1 << 20),
    "both by hand": both_by_hand,
}


def cycle(threads: str, turns: str) -> int:
    def work() -> None:
        for _ in range(int(turns)):
            small = [bytes(SMALL) for _ in range(EACH)]
            buffer = bytearray(BUFFER)
            time.sleep(HELD)
            del small, buffer

    workers = [threading.Thread(target=work) for _ in range(int(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(workers)


if __name__ == "__main__":
    SETTINGS[sys.argv[1]]()
    serve({"ready": lambda: 0, "cycle": cycle})

"""The nine little programs that ``doctor`` looks at: each has one known condition, and a real one.

``python -m benchmarks._doctor_cases CASE --size MB --rate MB_PER_SECOND --seconds N`` runs one of
them. They know nothing of a doctor. Each makes its condition, says "ready", and works on until its
seconds are over: what it does then does not change its memory, unless the condition is to grow.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

TURN = 0.01  # seconds
MB = 10**6


class Knot:
    """An object that refers to itself, and so is freed by the collector alone."""

    def __init__(self, size: int) -> None:
        self.me = self
        self.payload = bytes(size)


def churn(random: random.Random) -> None:
    """What any turn of a loop does: allocates a little, and lets go of it."""
    records = [{"id": n, "text": "x" * random.randrange(20, 300)} for n in range(50)]
    "".join(str(record["text"]) for record in records).encode()


def per_turn(rate: float) -> int:
    """Return bytes."""
    return int(rate * MB * TURN)


def leaking_list(size: float, rate: float, random: random.Random) -> Iterator[None]:
    """Keep a list of what was read, and never look at it again."""
    kept: list[object] = []
    wanted = int(size * MB)
    while True:
        got = 0
        while got < wanted:
            text = "y" * random.choice((30, 80, 200, 700, 3000))
            kept.append({"id": len(kept), "text": text, "tags": [1.5 * len(kept)]})
            got += 360 + len(text)
        wanted = per_turn(rate)
        yield


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc


def _malloc(libc: Any, size: int) -> int:
    at: int = libc.malloc(size)
    ctypes.memset(at, 1, size)
    return at


def leaking_c(size: float, rate: float, random: random.Random) -> Iterator[None]:
    """Take memory from malloc, and lose the pointer."""
    libc = _libc()
    wanted = int(size * MB)
    while True:
        got = 0
        while got < wanted:
            piece = random.choice((100, 1000, 10_000, 60_000))
            _malloc(libc, piece)
            got += piece
        wanted = per_turn(rate)
        yield


def retained(size: float, rate: float, random: random.Random) -> Iterator[None]:
    """Free memory that malloc keeps: whole pages lie between the few pieces that stay."""
    libc = _libc()
    pieces = [_malloc(libc, random.randrange(20_000, 60_000)) for _ in range(int(size * MB / 4e4))]
    for number, piece in enumerate(pieces):
        if number % 16:
            libc.free(piece)
    while True:
        yield


def fragmented(size: float, rate: float, random: random.Random) -> Iterator[None]:
    """Free three small pieces of four: each page keeps one that is in use."""
    libc = _libc()
    piece = random.choice((256, 512, 700))
    pieces = [_malloc(libc, piece) for _ in range(int(size * MB / piece))]
    for number, one in enumerate(pieces):
        if number % 4:
            libc.free(one)
    while True:
        yield


def pinned(size: float, rate: float, random: random.Random) -> Iterator[None]:
    """Keep views into memory of ticks that have ended."""
    import arena

    views = []
    got = 0
    while got < size * MB:
        with arena.tick("reader") as tick:
            block = tick.alloc(random.randrange(50_000, 200_000))
            memoryview(block)[:] = b"x" * len(block)
            views.append(memoryview(block)[:100])
            got += len(block)
    while True:
        with arena.tick("reader") as tick:
            tick.strdup("scratch")
        yield


def cycles(size: float, rate: float, random: random.Random) -> Iterator[None]:
    """Drop objects that refer to themselves, with the collector's thresholds raised."""
    gc.set_threshold(150_000, 10, 10)
    wanted = int(size * MB)
    while True:
        got = 0
        while got < wanted:
            payload = random.choice((500, 2000, 10_000))
            Knot(payload)
            got += payload + 100
        wanted = per_turn(rate)
        yield


def mapped_file(size: float, rate: float, random: random.Random) -> Iterator[None]:
    """Map a large file and read it."""
    with tempfile.TemporaryFile(dir=os.environ.get("ARENA_CASES_DIR", ".")) as file:
        block = os.urandom(1 << 20)
        for _ in range(int(size)):
            file.write(block)
        file.flush()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            touched = 0
            while True:
                for at in range(0, len(view), mmap.PAGESIZE):
                    touched ^= view[at]
                yield


def warm_up(size: float, rate: float, random: random.Random) -> Iterator[None]:
    """Fill a cache to its bound in the first turns, and then replace what is in it."""
    room = int(size * MB / 2000)
    cache: collections.deque[bytes] = collections.deque(maxlen=room)
    while True:
        for _ in range(max(50, room // 100)):
            cache.append(bytes(2000))
        yield


CASES: dict[str, Callable[[float, float, random.Random], Iterator[None]]] = {
    "leaking list": leaking_list,
    "leaking C memory": leaking_c,
    "freed but retained": retained,
    "fragmented": fragmented,
    "pinned views": pinned,
    "uncollected cycles": cycles,
    "mapped file": mapped_file,
    "warm-up, then flat": warm_up,
    "jemalloc": retained,
}


def main() -> None:
    """Run the case that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--size", type=float, default=100.0, help="MB that it holds or frees")
    parser.add_argument("--rate", type=float, default=5.0, help="MB a second, where it grows")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    turns = CASES[args.case](args.size, args.rate, chance)
    end = time.monotonic() + args.seconds
    told = False
    while time.monotonic() < end:
        next(turns)
        churn(chance)
        if not told:
            print("ready", flush=True)
            told = True
        time.sleep(TURN)


if __name__ == "__main__":
    main()

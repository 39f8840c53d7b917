"""A process that ``slope`` watches from outside: ticks of one kind, whose number it exports.

``python -m benchmarks._slope_child KIND SEED TICKS`` with ARENA_EXPORT=1 says "ready" when all is
imported, runs its ticks as fast as a pause allows, says "done" and waits until its input ends.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import arena

__all__ = ["KINDS"]

LEAK = 1_000  # bytes a tick
PAUSE = 0.0003  # seconds: others, and who watches, get their turn

Turn: TypeAlias = Callable[[int], object]


def level(draw: random.Random) -> Turn:
    """A tick's work, and nothing kept."""
    words = [f"word {draw.random()}" for _ in range(200)]
    return lambda number: [word.upper() for word in words]


def buffers(draw: random.Random) -> Turn:
    """1 kB a tick, of the C heap."""
    kept: list[object] = []
    work = level(draw)

    def turn(number: int) -> None:
        work(number)
        kept.append(bytearray(LEAK))

    return turn


def objects(draw: random.Random) -> Turn:
    """1 kB a tick, of small Python objects."""
    kept: list[object] = []
    work = level(draw)

    def turn(number: int) -> None:
        work(number)
        kept.append([float(number + n) for n in range(LEAK // 32)])  # 24 each, and 8 to point to it

    return turn


def emptied(draw: random.Random) -> Turn:
    """A cache of large values that is emptied when it is full: a saw."""
    cache: list[object] = []
    size, most = draw.randrange(150_000, 400_000), draw.randrange(40, 300)

    def turn(number: int) -> None:
        if len(cache) >= most:
            cache.clear()
        if number % 2:
            cache.append(bytearray(size // 8) + b"x")

    return turn


def filled(draw: random.Random) -> Turn:
    """A cache of as many keys as there are, asked for at random: a warm-up."""
    cache: dict[int, bytes] = {}
    keys = draw.randrange(200, 1_200)

    def turn(number: int) -> None:
        key = draw.randrange(keys)
        if key not in cache:
            cache[key] = bytes(20_000) + b"x"

    return turn


def arrays(draw: random.Random) -> Turn:
    """Arrays of numpy of all sizes, the last few of them alive."""
    import numpy as np

    last: list[Any] = [None] * draw.randrange(2, 12)

    def turn(number: int) -> None:
        last[number % len(last)] = np.ones(int(10 ** draw.uniform(2, 5.2)))

    return turn


def both(one: Callable[[random.Random], Turn], other: Callable[[random.Random], Turn]) -> Any:
    def made(draw: random.Random) -> Turn:
        first, second = one(draw), other(draw)
        return lambda number: (first(number), second(number))

    return made


KINDS: dict[str, tuple[bool, Callable[[random.Random], Turn]]] = {
    "nothing kept": (False, level),
    "a cache that is emptied": (False, emptied),
    "a cache that fills": (False, filled),
    "numpy, the last few arrays": (False, arrays),
    "bytearrays kept": (True, buffers),
    "lists of floats kept": (True, objects),
    "numpy, and bytearrays kept": (True, both(arrays, buffers)),
    "a cache emptied, bytearrays kept": (True, both(emptied, buffers)),
}


def main() -> None:
    """Do what the arguments say."""
    kind, seed, ticks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    turn = KINDS[kind][1](random.Random(seed))
    print("ready", flush=True)
    for number in range(ticks):
        with arena.tick():
            turn(number)
        time.sleep(PAUSE)
    print("done", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

"""The process that ``stall`` watches: an asyncio ticker at 1 ms over a heap in pieces.

Its argument says who trims. It is told "heap SIZE", then "run SECONDS": each turn of the ticker
allocates a little from that heap. It answers with the gaps between turns and what the ``Trimmer``
says; resident memory is read by who watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import arena
from benchmarks._child import serve
from benchmarks._heap import by_hand, fragment, free, malloc

EACH = 500  # turns
alive: array[int] | None = None


async def nothing() -> None:
    pass


async def on_the_loop() -> None:
    by_hand()


async def in_a_thread() -> None:
    await asyncio.to_thread(by_hand)


async def trim_async() -> None:
    await arena.trim_async(budget_ms=20)


TRIMS: dict[str, Callable[[], Awaitable[None]]] = {
    "nothing": nothing,
    "Trimmer": nothing,
    "loop": on_the_loop,
    "thread": in_a_thread,
    "trim_async": trim_async,
}


def heap(size: str) -> int:
    global alive
    alive, freed = fragment(int(size), 64 << 10, "15/16")
    return freed


async def tick(seconds: float, trim: Callable[[], Awaitable[None]]) -> list[float]:
    gaps, turn, tasks = [], 0, set()
    last = start = time.perf_counter()
    while last - start < seconds:
        await asyncio.sleep(0.001)
        free(malloc(4096))
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        turn += 1
        if turn % EACH == EACH // 2:
            task = asyncio.ensure_future(trim())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return gaps


async def work(seconds: float, who: str) -> dict[str, Any]:
    await asyncio.to_thread(int)  # what is loaded at the first use is not what is measured
    async with contextlib.AsyncExitStack() as stack:
        trimmer = None
        if who == "Trimmer":
            trimmer = arena.Trimmer(every=0.2, every_ticks=None, max_stall_ms=20, cooldown=0.1)
            await stack.enter_async_context(trimmer)
        gaps = await tick(seconds, TRIMS[who])
        told = dataclasses.asdict(trimmer.stats()) if trimmer else {}
    return {
        "worst ms": max(gaps) * 1e3,
        "p99 ms": statistics.quantiles(gaps, n=100)[-1] * 1e3,
        "turns": len(gaps),
        "trimmer": told,
    }


def run(seconds: str) -> dict[str, Any]:
    return asyncio.run(work(float(seconds), sys.argv[1]))


if __name__ == "__main__":
    arena.trim()
    serve({"heap": heap, "run": run})

"""The process that ``trim`` watches: a heap in pieces, and one way to give it back.

It is told "heap SIZE BLOCK SHARE", then "trim" (answers with milliseconds and the return code), or
"beside NUMBER": a trim in another thread, while this one runs a busy loop that does that one of
_heap.TURNS, and records its worst gap. The argument names the recipe. Resident memory is read by
who watches.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from typing import Any

from benchmarks._child import serve
from benchmarks._heap import RECIPES, TURNS, fragment, gaps

recipe = RECIPES[sys.argv[1]]
alive: array[int] | None = None


def heap(size: str, block: str, share: str) -> int:
    global alive
    alive, freed = fragment(int(size), int(block), share)
    return freed


def trim() -> dict[str, Any]:
    start = time.perf_counter()
    code = recipe()
    return {"ms": (time.perf_counter() - start) * 1e3, "code": code}


def beside(number: str) -> dict[str, float]:
    ends = False

    def work() -> None:
        nonlocal ends
        time.sleep(0.02)  # the other is at work
        recipe()
        ends = True

    thread = threading.Thread(target=work)
    thread.start()
    worst = max(gaps(lambda: ends, list(TURNS.values())[int(number)]))
    thread.join()
    return {"worst ms": worst * 1e3}


if __name__ == "__main__":
    recipe()  # what is loaded at the first use is not what is measured
    serve({"heap": heap, "trim": trim, "beside": beside})

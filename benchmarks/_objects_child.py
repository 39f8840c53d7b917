"""The process that ``objects`` watches: threads that parse, keep a little, and write JSON.

``python -m benchmarks._objects_child VARIANT TURNS``: says ``ready``, waits for a line on standard
input, runs, answers with the seconds that it took, and waits for the next line while its state
lives. It measures no memory: who watches it does.

The documents differ in size and shape. Each turn is a tick: a document is parsed, changed and
written; every fourth leaves a record in the state, in a ring, so that what lives long is made
between what does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import arena

THREADS = 4
DOCUMENTS = 24
KEPT = 4000
WORDS = "state tick name value of a the loop memory graph node edge plan step user".split()  # noqa: SIM905

Scope = Callable[[], contextlib.AbstractContextManager[object]]


def text(rng: random.Random, length: int) -> str:
    """Return words of about ``length`` characters."""
    words = []
    while length > 0:
        words.append(rng.choice(WORDS))
        length -= len(words[-1]) + 1
    return " ".join(words)


def record(rng: random.Random, number: int) -> dict[str, Any]:
    """Return one record: of 1 to 20 KB as JSON."""
    return {
        "id": number,
        "name": text(rng, 20),
        "note": text(rng, rng.choice((40, 200, 700, 3000))),
        "tags": [rng.choice(WORDS) for _ in range(rng.randrange(4, 90))],
        "samples": [rng.randrange(10**6) for _ in range(rng.choice((8, 70, 300)))],
        "fields": {f"{rng.choice(WORDS)}_{i}": i for i in range(rng.choice((5, 30, 120)))},
    }


def documents() -> list[str]:
    """Return the documents as JSON: 20 to 400 records each."""
    rng = random.Random(12)
    return [
        json.dumps([record(rng, i) for i in range(rng.randrange(20, 400))])
        for _ in range(DOCUMENTS)
    ]


def captured() -> arena.Tick:
    """Return a tick whose objects are captured."""
    return arena.tick(objects=True)


def trim_now_and_then() -> None:
    """Call malloc_trim every 10 seconds, on a thread of its own."""
    trim = ctypes.CDLL(None).malloc_trim

    def run() -> None:
        while True:
            time.sleep(10)
            trim(0)

    threading.Thread(target=run, daemon=True).start()


def work(seed: int, turns: int, texts: list[str], state: list[Any], scope: Scope) -> None:
    """Run the turns of one thread."""
    rng = random.Random(seed)
    for turn in range(turns):
        with scope():
            document = json.loads(rng.choice(texts))
            for entry in document:
                entry["samples"].append(turn)
            if turn % 4 == 0:
                state[rng.randrange(len(state))] = rng.choice(document)
            json.dumps(document)


def main() -> None:
    """Do what the command line says."""
    variant, turns = sys.argv[1], int(sys.argv[2])
    texts = documents()
    state: list[Any] = [None] * KEPT
    scope: Scope = captured if variant == "objects" else arena.tick
    if variant == "trim":
        trim_now_and_then()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    threads = [
        threading.Thread(target=work, args=(seed, turns // THREADS, texts, state, scope))
        for seed in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.perf_counter() - start, flush=True)
    sys.stdin.readline()
    print(sum(entry is not None for entry in state), flush=True)


if __name__ == "__main__":
    main()

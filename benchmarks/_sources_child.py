"""The process that ``sources`` looks at: fills its memory, and times each source of ``memory()``.

python -m benchmarks._sources_child MB KIND ROUNDS, where KIND is ``live`` or ``holes``: half of the
bytes are small Python objects and half blocks of 1 KB in the C heap; with holes each second one of
both is freed. Prints the median milliseconds of each source, and the resident bytes, as JSON.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys

import arena

BLOCK = 1000  # above 512 bytes: in the C heap
SMALL = 400  # a bytes object of that many is one of Python's small objects


def fill(mb: int, holes: bool) -> list[bytes]:
    """Return what fills so much memory."""
    kept: list[bytes] = []
    for size in (BLOCK, SMALL):
        made = [bytes(size) for _ in range(mb * 10**6 // 2 // (size + 33))]
        kept += made[::2] if holes else made
        del made
    return kept


def main() -> None:
    """Fill, look, print."""
    mb, kind, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    gc.disable()
    kept = fill(mb, kind == "holes")
    costs: dict[str, list[float]] = {}
    for _ in range(rounds):
        report = arena.memory(private=True, heaps=True, objects=True)
        for name, ms in report.costs_ms.items():
            costs.setdefault(name, []).append(ms)
    assert not report.notes, report.notes
    medians = {name: statistics.median(taken) for name, taken in costs.items()}
    print(json.dumps({"ms": medians, "resident": report.resident, "kept": len(kept)}))


if __name__ == "__main__":
    main()

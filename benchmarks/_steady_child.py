"""The process that ``steady`` watches: runs ticks of 117 KB as its standard input says.

Each line of the input is a number of ticks in all; it runs up to that many, answers with the
scratch of its last tick in bytes, and waits. It measures nothing: who watches it does.
"""

from __future__ import annotations

import sys

import arena

SCRATCH = 117 * 1024
TEXT = "the state of one tick: names, numbers, and whatever was read; "


def pieces() -> tuple[list[str], list[list[str]]]:
    """Return what a tick copies, 30 strings, and what it builds, 10 strings of 40 pieces each."""
    copied = [(TEXT * 60)[: 128 + 97 * index] for index in range(30)]
    built = [[TEXT[: 20 + turn] for turn in range(40)] for _ in range(10)]
    left = SCRATCH - sum(map(len, copied)) - sum(len(piece) for parts in built for piece in parts)
    for parts in built:
        parts.append("x" * (left // len(built)))
    built[0].append("x" * (left % len(built)))
    return copied, built


def run(count: int, copied: list[str], built: list[list[str]]) -> int:
    """Run ``count`` ticks, and return the bytes of scratch that the last one asked for."""
    used = 0
    for _ in range(count):
        with arena.tick() as tick:
            strdup, strbuf = tick.strdup, tick.strbuf
            kept: list[object] = [strdup(text) for text in copied]
            for parts in built:
                buf = strbuf()
                append = buf.append
                for piece in parts:
                    append(piece)
                kept.append(buf)
            used = tick.used
    return used


def main() -> None:
    """Do what standard input says."""
    copied, built = pieces()
    done = 0
    for line in sys.stdin:
        total = int(line)
        used = run(total - done, copied, built)
        done = total
        print(used, flush=True)


if __name__ == "__main__":
    main()

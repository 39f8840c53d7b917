"""One child of the demo: ``python -m arena.cli._loop ticked|unscoped RATE``, driven over pipes.

On stdin come the records of the feed, one a line, and an empty line. The child warms up, waits for
one more line, and then runs the loop until stdin ends. So it also ends when its parent is gone,
however that died. After each tick it tells its Progress: a line of JSON on stdout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

import arena
from arena.cli._mind import Mind, Permanent, Scratch

__all__ = ["RUNS", "WARM_UP", "Progress"]

# Unmeasured ticks at the start, without pauses: imports, the interpreter's own heap and malloc have
# by then taken what they take once.
WARM_UP = 100

ScratchSource: TypeAlias = Callable[[], AbstractContextManager[Scratch]]


@dataclasses.dataclass
class Progress:
    """What a child has done."""

    ticks: int = 0
    """Measured ticks. Below 0 while it warms up."""
    scratch: int = 0
    """Bytes, over all measured ticks."""
    broken: int = 0
    """Ticks, those of the warm-up included, that did not find the state whole."""

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.ticks >= 0


def _ticked() -> ScratchSource:
    return lambda: arena.tick("awareness")


def _unscoped() -> ScratchSource:
    permanent = Permanent()
    return lambda: contextlib.nullcontext(permanent.begin())


RUNS = {"unscoped": _unscoped, "ticked": _ticked}


def _beats(interval: float) -> Iterator[None]:
    """Yield once an interval, on a fixed grid, until stdin ends; late beats follow at once."""
    due = time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        yield
        due += interval


def _tell(progress: Progress) -> None:
    print(json.dumps(dataclasses.asdict(progress)), flush=True)


def _run(scratch_source: ScratchSource, rate: float) -> None:
    feed = [line.rstrip("\n") for line in itertools.takewhile(lambda line: line != "\n", sys.stdin)]
    if not feed:
        return
    mind = Mind(feed)
    progress = Progress(ticks=-WARM_UP)

    def turn() -> None:
        with scratch_source() as scratch:
            progress.broken += not mind.turn(scratch, progress.ticks)
            progress.scratch += scratch.used if progress.warm else 0
        progress.ticks += 1
        _tell(progress)

    # The warm-up does all that the loop does later: nothing then happens for the first time.
    for _ in itertools.islice(_beats(0), WARM_UP):
        turn()
    if sys.stdin.readline():
        for _ in _beats(1 / rate):
            turn()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        _run(RUNS[sys.argv[1]](), float(sys.argv[2]))

"""Tells memory that keeps rising from memory that is merely there; numbers in, a verdict out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

__all__ = ["History", "keeps_rising", "slope", "summed"]

History: TypeAlias = Sequence[tuple[int, int]]
"""Points (turn, bytes), oldest first: the lowest number of live bytes from that turn on to the next
point's. The last point is now."""

_PARTS = 8
_WARM_UP = 2  # of the parts: what is allocated once, and caches that fill at the start


def slope(history: History) -> float:
    """Bytes per turn: the least-squares line through the history, 0.0 for less than two turns."""
    if len({turn for turn, _ in history}) < 2:
        return 0.0
    from statistics import linear_regression  # dear to import, and wanted only here

    return linear_regression(*zip(*history, strict=True)).slope


def keeps_rising(history: History) -> bool:
    """Whether live bytes keep rising, turn after turn.

    Take for each turn the floor: the least that was alive at that turn or at any later one, now
    included, so only what was never given back. Cut the turns into eight equal parts and leave out
    the first two. The bytes keep rising when the floor rises in each of the other six.

    So it takes eight turns at the least. What is allocated once raises the floor in one part, a
    cache that is full in none, and one that is emptied pulls it down to what it held then. A leak
    each tenth turn shows once each part has ten. Of noise about a level, one history in 720 looks
    so (the six floors are in order by chance).
    """
    if len(history) < _PARTS - _WARM_UP + 2:
        return False
    turns = [turn for turn, _ in history]
    floors = [0] * len(history)
    floor = history[-1][1]
    for index in range(len(history) - 1, -1, -1):
        floor = min(floor, history[index][1])
        floors[index] = floor
    # Now may be the middle of a turn, before it has given anything back: it can only lower floors.
    first, last = turns[0], turns[-1]
    levels = []
    index = 0
    for part in range(_WARM_UP, _PARTS + 1):
        while index + 1 < len(turns) - 1 and (turns[index + 1] - first) * _PARTS <= part * (
            last - first
        ):
            index += 1
        levels.append(floors[index])
    return all(earlier < later for earlier, later in pairwise(levels))


def summed(one: History, other: History) -> tuple[tuple[int, int], ...]:
    """The history of both together: at each turn no more than the lowest number of their sum."""
    *_, now = one
    *_, other_now = other
    points = []
    for turn in sorted({turn for turn, _ in (*one[:-1], *other[:-1])}):
        points.append((turn, _at(one, turn) + _at(other, turn)))
    return (*points, (max(now[0], other_now[0]), now[1] + other_now[1]))


def _at(history: History, turn: int) -> int:
    """Bytes at this turn; what is now is no part of any turn."""
    return next((live for begun, live in reversed(history[:-1]) if begun <= turn), 0)

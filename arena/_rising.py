"""Tells memory that keeps rising from memory that is merely there; numbers in, a verdict out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

__all__ = ["History", "keeps_rising", "slope", "summed"]

History: TypeAlias = Sequence[tuple[int, int]]
"""Points (turn, bytes), oldest first: the lowest number of live bytes from that turn on to the next
point's. The last point is now."""

_PARTS = 8
_WARM_UP = 2  # of the parts: what is allocated once, and caches that fill at the start

_RISES = 3  # of a table, after its first size
_FACTOR = 1.1  # each of them: a list grows by 1.125, a dict by 2, a small set by 4
_IN_ALL = 8  # times its first size
_STEADY = 0.7  # the power of the turns by which it rises: 1 for one thing a turn
_DIP = 1 / 8  # of a table's bytes: what else the line makes may come and go
_LATE = 1.3  # times the wait that is due: turns do not all put the same number of things in
_WAITS = 3  # the last ones, of which the longest tells how a table grows


def slope(history: History) -> float:
    """Bytes per turn: the least-squares line through the history, 0.0 for less than two turns."""
    # By hand: an import of `statistics` here would be an escape of the tick that asks for its map.
    # In whole numbers, so that what is flat is 0 to the last bit.
    count = len(history)
    turns, lives = sum(turn for turn, _ in history), sum(live for _, live in history)
    spread = count * sum(turn * turn for turn, _ in history) - turns * turns
    along = count * sum(turn * live for turn, live in history) - turns * lives
    return along / spread if spread else 0.0


def keeps_rising(history: History) -> bool:
    """Whether live bytes keep rising: turn after turn, or as a table that is filled does."""
    return _rises_throughout(history) or _rises_as_a_table(history)


def _rises_throughout(history: History) -> bool:
    """Whether live bytes rise in all parts of the history.

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
    floors = _floors(history)
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


def _rises_as_a_table(history: History) -> bool:
    """Whether live bytes rise as those of a dict, set or list that each turn puts something in.

    Such a table is one block, replaced by one that is larger by a factor when it is full: the more
    it holds, the rarer it rises, so most parts of a long history have no rise. It grows when its
    bytes never fall (but for a dip of an eighth), have risen three times at the least, each time by
    a tenth or more and in all to eight times the first size, about as fast as the turns went by (or
    at least by the power 0.7 of them, which tells it from caches that meet few new keys), and when
    the last rise is not too long ago. Each wait is in proportion to the turns before it, so the
    longest of the last three tells when the next rise is due; when it is late by a third, the table
    is full.

    What it cannot tell: a bounded cache that is still filling, or was filled so lately that the
    next rise is not due yet, grows; so does a buffer that is as large as the largest message yet,
    for records come ever rarer too. A table that was emptied once is not seen before it has grown
    throughout. One that holds less than eight times its first size (the first over 512 bytes, for
    Python objects: some 80 keys of a dict, 300 of a set or list) is too small to tell.
    """
    if len(history) < _RISES + 2:
        return False
    points = list(zip(history, _floors(history), strict=True))[:-1]  # now may be mid-turn
    if any(live - floor > live * _DIP for (_, live), floor in points):
        return False
    begun = history[0][0]
    rises: list[tuple[int, int]] = []  # (turns since the first point, bytes from then on)
    for (turn, _), floor in points:
        if floor > 0 and (not rises or floor >= rises[-1][1] * _FACTOR):
            rises.append((turn - begun, floor))
    if len(rises) <= _RISES or rises[-1][1] < _IN_ALL * rises[0][1]:
        return False
    (early, little), (late, much) = rises[1], rises[-1]
    if math.log(much / little) < _STEADY * math.log(late / early):
        return False
    waits = [after / before - 1 for (before, _), (after, _) in pairwise(rises[1:])]
    return history[-1][0] - begun - late <= _LATE * max(waits[-_WAITS:]) * late


def _floors(history: History) -> list[int]:
    """The least that was alive at each point or at any later one."""
    floors = [0] * len(history)
    floor = history[-1][1]
    for index in range(len(history) - 1, -1, -1):
        floor = min(floor, history[index][1])
        floors[index] = floor
    return floors


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

"""The demo's loop with three escapes planted: the map names exactly those three lines.

What else the loop keeps, it keeps in a Store that replaces what it holds, and nothing of it grows.
"""

from __future__ import annotations

import abc
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest

import arena
from arena.cli._feed import generated
from arena.cli._mind import Mind

pytestmark = pytest.mark.as_ever
TURNS = 300  # each node of the graph is replaced in the first 112, and from then on nothing is new
CACHE: dict[int, object] = {}
"""A module's global that nobody empties."""


def remembering() -> tuple[Callable[[object], None], list[object]]:
    """Return a closure that keeps all it is given, and where."""
    kept: list[object] = []

    def remember(what: object) -> None:
        kept.append(what)

    return remember, kept


class Planted(Mind, abc.ABC):
    """The demo's mind, which leaves three things behind in each turn."""

    def __init__(self, feed: list[str]) -> None:
        super().__init__(feed)
        self.remember, self.closure = remembering()
        self.log: list[object] = []

    def turn(self, scratch: Any, number: int) -> bool:
        """Do the demo's turn, and forget to forget."""
        whole = super().turn(scratch, number)
        self.plant(scratch, f"{number} " + "x" * 700, number)
        return whole

    @abc.abstractmethod
    def plant(self, scratch: Any, text: str, number: int) -> None:
        """Leave something behind on three lines."""


class Scratch(Planted):
    def plant(self, scratch: Any, text: str, number: int) -> None:
        CACHE[number] = scratch.strdup(text)  # stale: cache
        self.remember(scratch.strdup(text))  # stale: closure
        self.log.append(scratch.strdup(text))  # stale: list


class Persisted(Planted):
    def plant(self, scratch: Any, text: str, number: int) -> None:
        CACHE[number] = arena.strdup_persist(text)  # persist: cache
        self.remember(arena.strdup_persist(text))  # persist: closure
        self.log.append(scratch.strbuf(text).persist())  # persist: list


class Objects(Planted):
    def plant(self, scratch: Any, text: str, number: int) -> None:
        CACHE[number] = text.upper()  # object: cache
        self.remember(text.split() * 100)  # object: closure
        self.log.append(text.encode())  # object: list


KINDS: dict[str, type[Planted]] = {"stale": Scratch, "persist": Persisted, "object": Objects}


def planted(kind: str) -> set[int]:
    """Return the lines that a comment marks as planted for that kind."""
    with open(__file__, encoding="utf-8") as lines:
        marked = {
            number
            for number, line in enumerate(lines, 1)
            if re.search(rf"\)  # {kind}: \w+$", line.rstrip())
        }
    assert len(marked) == 3
    return marked


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_map_names_the_three_planted_lines_and_no_other(kind: str) -> None:
    if kind == "object":
        pytest.importorskip("arena._objects")
    before = arena.escapes()
    mind = KINDS[kind](generated().records)
    with arena.trace():
        for number in range(TURNS):
            with arena.tick(f"planted {kind}", objects=kind == "object") as scratch:
                assert mind.turn(scratch, number)
        gc.collect()
        found = arena.escapes().diff(before)
    mine = [row for row in found.rows if row.tick == f"planted {kind}"]
    growing = [row for row in mine if row.growing]
    assert {(row.kind, row.site[0].file, row.site[0].line) for row in growing} == {
        (kind, __file__, line) for line in planted(kind)
    }, str(found)
    assert len(growing) == 3
    # Of objects the table of the dict and of the list are blocks, too, and so is each long word.
    assert all(row.count == TURNS or (kind == "object" and row.count > TURNS) for row in growing)
    assert all(row.bytes > 700 * TURNS for row in growing)
    # Nothing else of scratch is held. (Of objects the tables of lists that grow now and then are.)
    others = [row for row in mine if row.kind == "stale" and row not in growing and row.count]
    assert not others, str(found)
    CACHE.clear()
    del mind, scratch
    gc.collect()
    after = [row for row in arena.escapes().rows if row.tick == f"planted {kind}"]
    assert sum(row.bytes + row.count for row in after if row.kind == kind) == 0

"""The mind that the demo runs: a graph and caches in a Store, and what one tick does with them.

Both runs call the same ``Mind.turn``; all that differs is where the scratch that it asks for lives.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import arena

__all__ = ["EDGES", "NODES", "SCRATCH", "Mind", "Permanent", "Scratch"]

NODES = 889
EDGES = 2_592
SCRATCH = 117_000  # bytes a tick: the report's 117 KB, and 35.1 MB in its 300 ticks a minute
_TOUCHED = 8  # nodes that a tick changes
_CACHES = 16  # digests that are kept; the oldest is replaced
# When nodes were seen counts from here: as many digits in every tick, and never one of the small
# ints that Python keeps anyway, so that a snapshot costs the interpreter the same from the start.
_EPOCH = 1_700_000_000
_KINDS = ("person", "place", "thing", "event", "topic")


class Scratch(Protocol):
    """Where a tick's scratch comes from. ``arena.Tick`` is one as it is."""

    @property
    def used(self) -> int: ...
    def strdup(self, text: str, /) -> arena.Str: ...
    def strbuf(self) -> arena.StrBuf: ...


class Permanent:
    """Scratch of the report's runtime: its loop ran outside any arena, so nothing ever went.

    Every piece is persisted, and its handle is kept in a list that only grows.
    """

    def __init__(self) -> None:
        self._kept: list[arena.Str | arena.StrBuf] = []
        self._before = 0

    def begin(self) -> Permanent:
        """Count ``used`` from here on."""
        self._before = len(self._kept)
        return self

    @property
    def used(self) -> int:
        """Bytes asked for since ``begin``."""
        return sum(piece.nbytes for piece in self._kept[self._before :])

    def strdup(self, text: str, /) -> arena.Str:
        piece = arena.strdup_persist(text)
        self._kept.append(piece)
        return piece

    def strbuf(self) -> arena.StrBuf:
        piece = arena.strbuf_persist()
        self._kept.append(piece)
        return piece


class Mind:
    """State that outlives ticks, all of it in one Store, and the input that it attends to."""

    def __init__(self, feed: Sequence[str]) -> None:
        self._feed = itertools.cycle(feed)
        self.store = arena.Store()
        for ident, targets in enumerate(_edges()):
            self.store[f"node:{ident}"] = _node(ident, 0, targets)

    def turn(self, scratch: Scratch, number: int) -> bool:
        """Do one tick's work with SCRATCH bytes of scratch; return whether the state is whole.

        Reads the whole graph out of the Store, counts it, reads input until the budget is used up,
        and writes what it learnt back into the graph and the caches.
        """
        snapshot = scratch.strbuf()
        snapshot.append("[")
        snapshot.join(",", (self.store[key] for key in self.store if key.startswith("node:")))
        snapshot.append("]")
        graph = json.loads(str(snapshot))

        context = scratch.strbuf()
        context.append(f"tick {number}: {len(graph)} nodes")
        for node in self._touch(graph, number):
            context.append(f"; {node['kind']} {node['id']} knows {len(node['to'])}")
        self._attend(scratch, context, number)
        return _whole(graph)

    def _touch(self, graph: list[dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
        """Mark a few nodes as seen in this tick: their old text is replaced, and so freed."""
        for index in range(_TOUCHED):
            node = graph[(number * _TOUCHED + index) % NODES]
            self.store[f"node:{node['id']}"] = _node(node["id"], number, node["to"])
            yield node

    def _attend(self, scratch: Scratch, context: arena.StrBuf, number: int) -> None:
        """Read documents, digest each into ``context``, and look at the one that no longer fits."""
        digest = scratch.strbuf()
        for record in self._feed:
            room = SCRATCH - scratch.used
            if 3 * len(record) >= room:  # the text, and at most as much twice for its digest
                break
            document = scratch.strdup(record)
            digest.clear()
            digest.extend(itertools.islice(_words(json.loads(str(document))), 24))
            context.append("\n")
            context.append(digest)
        self.store[f"cache:{number % _CACHES}"] = digest
        self.store["cache:context"] = context
        while (room := SCRATCH - scratch.used) > 0:
            context.append(record[:room])


def _edges() -> list[list[int]]:
    """For each node the nodes it points to: EDGES distinct edges, the same in every run."""
    dice = random.Random(NODES)
    targets: list[set[int]] = [set() for _ in range(NODES)]
    count = 0
    while count < EDGES:
        source, target = dice.randrange(NODES), dice.randrange(NODES)
        if source != target and target not in targets[source]:
            targets[source].add(target)
            count += 1
    return [sorted(some) for some in targets]


def _node(ident: int, seen: int, targets: Iterable[int]) -> str:
    kind = _KINDS[ident % len(_KINDS)]
    to = ",".join(map(str, targets))
    return f'{{"id":{ident},"kind":"{kind}","seen":{_EPOCH + seen},"to":[{to}]}}'


def _whole(graph: list[dict[str, Any]]) -> bool:
    """Whether the graph has every node and every edge once."""
    edges = {(node["id"], target) for node in graph for target in node["to"]}
    return sorted(node["id"] for node in graph) == list(range(NODES)) and len(edges) == EDGES


def _words(document: object) -> Iterator[bytes]:
    """The text in a JSON document, a little of each piece. Not recursive: input nests at will."""
    todo = [document]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)
        elif isinstance(value, str):
            # JSON can hold half a surrogate pair; UTF-8 cannot.
            yield (value[:40] + " ").encode(errors="replace")

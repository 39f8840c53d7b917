"""The demo's input: turns JSON documents, the user's or generated ones, into a bounded feed.

The feed is a list of JSON arrays of at most a few KB each, so that a tick of 117 KB reads several
whole ones, whether they come from one large document or from thousands of small ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import random
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from arena.cli._errors import UsageError

__all__ = ["Feed", "generated", "read"]

_RECORD = 4_000  # bytes of one record, about
_FEED = 4_000_000  # bytes of the whole feed: more would only make the children larger
_FILE = 16_000_000  # bytes of one file: more would take long to parse
_WORDS = ("alder", "birch", "cedar", "dune", "ember", "fjord", "grove", "harbor", "inlet")


@dataclasses.dataclass(frozen=True)
class Feed:
    """What both children read, over and over."""

    records: list[str]
    """JSON texts in ASCII without line breaks."""
    source: str
    """One line for people: where it comes from, and how much of it is used."""


class _Taken:
    """Counts what a reader takes from files, and stops it when the feed is full."""

    def __init__(self) -> None:
        self.documents = 0
        self.bytes = 0
        self.skipped = 0

    def pieces(self, files: Iterable[Path]) -> Iterator[str]:
        for path in files:
            try:
                some = list(_pieces(_load(path)))
            except (OSError, EOFError, ValueError, RecursionError, zlib.error):
                self.skipped += 1
                continue
            self.documents += 1
            for piece in some:
                self.bytes += len(piece)
                yield piece
                if self.full:
                    return

    @property
    def full(self) -> bool:
        return self.bytes >= _FEED


def read(path: Path) -> Feed:
    """Read a JSON file or a folder of them. Raises UsageError when there is nothing to use."""
    shown = os.fsencode(path).decode(errors="replace")
    if path.is_dir():
        files: Iterable[Path] = _files(path)
    elif path.is_file():
        files = [path]
    else:
        raise UsageError(f"--input {shown!r} is no file and no folder")
    taken = _Taken()
    records = _records(taken.pieces(files))
    skipped = f"{taken.skipped} skipped: not readable as JSON, or over {_FILE // 10**6} MB"
    if not records:
        raise UsageError(f"no usable JSON in --input {shown!r} ({skipped})")
    source = f"{taken.documents} documents of {shown}, {taken.bytes / 1e6:.1f} MB"
    if taken.full:
        source += " (the most that is used)"
    if taken.skipped:
        source += f"; {skipped}"
    return Feed(records, source)


def generated() -> Feed:
    """Documents as an awareness loop would see them, the same in every run."""
    documents = [_event(random.Random(number), number) for number in range(1_000)]
    pieces = [piece for document in documents for piece in _pieces(document)]
    size = sum(map(len, pieces))
    source = f"{len(documents):,} generated documents, {size / 1e6:.1f} MB (--input reads yours)"
    return Feed(_records(pieces), source)


def _files(folder: Path) -> Iterator[Path]:
    """The JSON files of a folder, in order, found while they are read."""
    for here, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(here, name)
            if name.lower().endswith((".json", ".json.gz")) and path.is_file():
                yield path


def _load(path: Path) -> object:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        packed = path.suffix.lower() == ".gz"
        data = (stack.enter_context(gzip.open(file)) if packed else file).read(_FILE + 1)
    if len(data) > _FILE:
        raise ValueError(f"over {_FILE} bytes")
    return json.loads(data)


def _pieces(value: object) -> Iterator[str]:
    """The JSON texts of a value and, where it is too large for a record, of its parts."""
    text = json.dumps(value, separators=(",", ":"))
    if len(text) <= _RECORD:
        yield text
    elif isinstance(value, dict):
        for key, part in value.items():
            pair = json.dumps({key: part}, separators=(",", ":"))
            if len(pair) <= _RECORD:
                yield pair
            else:
                yield from _pieces(part)
    elif isinstance(value, list):
        for part in value:
            yield from _pieces(part)
    else:
        # A long string, or an absurdly long number. One character is at most 12 bytes of JSON.
        words, step = str(value), _RECORD // 12
        for start in range(0, len(words), step):
            yield json.dumps(words[start : start + step])


def _records(pieces: Iterable[str]) -> list[str]:
    """Pack pieces into JSON arrays of about _RECORD bytes; too few of them are repeated."""
    records: list[str] = []
    batch: list[str] = []
    size = 0
    for piece in pieces:
        if batch and size + len(piece) > _RECORD:
            records.append(f"[{','.join(batch)}]")
            batch, size = [], 0
        batch.append(piece)
        size += len(piece) + 1
    if batch and not records:
        batch *= max(1, _RECORD // size)
    if batch:
        records.append(f"[{','.join(batch)}]")
    return records


def _event(dice: random.Random, number: int) -> dict[str, object]:
    return {
        "id": f"event-{number:05d}",
        "source": dice.choice(["calendar", "mail", "sensor", "chat", "news"]),
        "at": 1_700_000_000 + 37 * number,
        "confidence": round(dice.random(), 4),
        "title": " ".join(dice.choices(_WORDS, k=6)),
        "body": " ".join(dice.choices(_WORDS, k=dice.randrange(40, 160))),
        "mentions": [
            {"node": dice.randrange(889), "weight": round(dice.random(), 3)}
            for _ in range(dice.randrange(4, 24))
        ],
        "tags": sorted(dice.sample(_WORDS, k=3)),
    }

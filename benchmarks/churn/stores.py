"""Where parked requests and their bodies live, in four ways that the server uses alike.

All of them unblock before they drop: ``Parked.unblock`` runs once for each request, on every way
out, and finds its waiter without any registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import orjson
from aiohttp import web

import arena
from arena._native import StrBuf
from arena.aiohttp import read_body

MOST = 64 << 20  # bytes of one body


class Gone(Exception):  # noqa: N818 - it is not an error of this program
    """The request was ended before its answer was complete."""


class Plain:
    """A handler that waits for a whole answer."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def finish(self, answer: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    def unblock(self) -> None:
        """Let the handler go without an answer, if it has none yet."""
        if not self._answer.done():
            self._answer.set_result(None)

    async def answer(self) -> bytes:
        answer = await self._answer
        if answer is None:
            raise Gone
        return answer


class Streamed:
    """A handler that passes on events until the end marker."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = False
        self._complete = False

    def put(self, event: bytes) -> None:
        if not self._ended:
            self._events.put_nowait(event)

    def finish(self, event: bytes) -> None:
        self.put(event)
        self._complete = True
        self.unblock()

    def unblock(self) -> None:
        """Put the end marker, if it is not there yet."""
        if not self._ended:
            self._ended = True
            self._events.put_nowait(None)

    async def events(self) -> Any:
        while (event := await self._events.get()) is not None:
            yield event
        if not self._complete:
            raise Gone


@dataclasses.dataclass(eq=False)
class Parked:
    """One request that waits for the model."""

    key: int
    group: str
    reading: asyncio.Timeout | None = None
    """Around its handler, while that reads the body."""
    waiter: Plain | Streamed | None = None
    """What its handler waits for after that."""
    body: bytes | StrBuf = b""
    unblocked: int = 0

    def unblock(self) -> None:
        """Let its handler go on, whatever it waits for."""
        self.unblocked += 1
        if self.waiter is not None:
            self.waiter.unblock()
        elif self.reading is not None:
            self.reading.reschedule(0)  # expired, whatever the time


class Store(ABC):
    """What the server asks of a store."""

    @abstractmethod
    def open(self, parked: Parked) -> None:
        """Take a new request in."""

    @abstractmethod
    async def read(self, parked: Parked, request: web.Request) -> None:
        """Read its body."""

    def parse(self, parked: Parked) -> Any:
        """Return the parsed body."""
        with memoryview(parked.body) as view:  # orjson takes no other buffers
            return orjson.loads(view)

    @abstractmethod
    def delivering(self, parked: Parked) -> contextlib.AbstractContextManager[object]:
        """At the end of this the answer is delivered, or never will be."""

    @abstractmethod
    def discard(self, parked: Parked) -> None:
        """Its handler returns."""

    @abstractmethod
    def close_group(self, group: str) -> None:
        """The rollout has ended."""

    @abstractmethod
    def figures(self) -> dict[str, int]:
        """Return what is open, and its bytes."""


class Keep(Store):
    """A dict, in which each body stays until its rollout ends."""

    def __init__(self) -> None:
        self._open: dict[int, Parked] = {}

    def open(self, parked: Parked) -> None:
        self._open[parked.key] = parked

    async def read(self, parked: Parked, request: web.Request) -> None:
        parked.body = await request.read()

    @contextlib.contextmanager
    def delivering(self, parked: Parked) -> Iterator[None]:
        try:
            yield
        finally:
            self.discard(parked)

    def discard(self, parked: Parked) -> None:
        if not parked.unblocked:
            parked.unblock()

    def close_group(self, group: str) -> None:
        for parked in [one for one in self._open.values() if one.group == group]:
            self.discard(parked)
            self._open.pop(parked.key, None)
            parked.body = b""

    def figures(self) -> dict[str, int]:
        return {
            "open": len(self._open),
            "bytes": sum(len(one.body) for one in self._open.values()),
            "pinned": 0,
        }


class Discard(Keep):
    """A dict, from which each request goes once it is delivered: unblocked first."""

    def discard(self, parked: Parked) -> None:
        super().discard(parked)
        self._open.pop(parked.key, None)
        parked.body = b""


class Naive(Discard):
    """A dict, from which each request goes in a ``finally`` once it is delivered, and no more.

    This is the mistake that the others do not make: what the end of the rollout would unblock is
    no longer in the dict.
    """

    @contextlib.contextmanager
    def delivering(self, parked: Parked) -> Iterator[None]:
        try:
            yield
        finally:
            self._open.pop(parked.key, None)
            parked.body = b""


class Arena(Store):
    """``arena.Requests``."""

    def __init__(self) -> None:
        self._requests = arena.Requests("bodies")

    def open(self, parked: Parked) -> None:
        self._requests.open(parked.key, parked.group, MOST).on_discard(parked.unblock)

    async def read(self, parked: Parked, request: web.Request) -> None:
        parked.body = await read_body(request, self._requests.get(parked.key), MOST)

    def delivering(self, parked: Parked) -> contextlib.AbstractContextManager[object]:
        return self._requests.delivering(parked.key)

    def discard(self, parked: Parked) -> None:
        self._requests.discard(parked.key)

    def close_group(self, group: str) -> None:
        self._requests.close_group(group)

    def figures(self) -> dict[str, int]:
        seen = self._requests.stats()
        return {"open": seen.open, "bytes": seen.bytes, "pinned": seen.pinned}


STORES: dict[str, type[Store]] = {
    "keep": Keep,
    "discard": Discard,
    "naive": Naive,
    "arena": Arena,
}

"""The process of the agents: rollouts that ask a model turn by turn, each time with all before.

``python -m benchmarks.churn.agent PORT``. Each turn's body is the whole history with one more
screenshot. Now and then a turn goes wrong, in each of the ways there are, and is asked again; at
the end of a rollout one request is still in flight. An answer must name the size and the CRC of
the body that was sent: what arrived at the model is what left here.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from benchmarks._child import serve
from benchmarks.churn.protocols import PROTOCOLS, Protocol

MODEL = "stub-1"
FAILURES = ("before", "middle", "after", "away", "synthesis")
EACH = 9  # turns from one failure to the next
PATIENCE = 3.0  # seconds, for a turn that is to fail
LONG = 30.0  # seconds: a model that thinks for longer than anybody waits


class Body:
    """The history of a rollout as a request's body, and its CRC, without building it anew."""

    def __init__(self, protocol: Protocol) -> None:
        head = protocol.head(MODEL)
        self._protocol = protocol
        self._turns = [head]
        self._size = len(head)
        self._crc = zlib.crc32(head)

    def add(self, turn: dict[str, Any]) -> None:
        """Add a turn to the history."""
        data = orjson.dumps(turn)
        if len(self._turns) > 1:
            data = b"," + data
        self._turns.append(data)
        self._size += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def sent(self, stream: bool) -> tuple[list[bytes], int, str]:
        """Return the pieces of a body, its size, and what an answer must begin with."""
        tail = self._protocol.tail(stream)
        size = self._size + len(tail)
        return [*self._turns, tail], size, f"{size} bytes, crc {zlib.crc32(tail, self._crc)}: "


async def each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def screenshot(size: int) -> str:
    """Return ``size`` characters of base64."""
    return base64.b64encode(os.urandom(size * 3 // 4)).decode()


class Rollout:
    """One conversation."""

    def __init__(
        self, session: aiohttp.ClientSession, server: str, name: str, protocol: Protocol
    ) -> None:
        self._session = session
        self._url = f"{server}/rollouts/{name}"
        self._protocol = protocol
        self._body = Body(protocol)
        self.seen: Counter[str] = Counter()
        self._last = "nothing"

    async def run(self, turns: int, size: int, failing: bool) -> Counter[str]:
        """Ask ``turns`` times; return what was seen."""
        async with self._session.post(self._url) as response:
            response.raise_for_status()
        for turn in range(turns):
            self._body.add(self._protocol.user(f"What now, in turn {turn}?", screenshot(size)))
            stream = turn % 2 == 0
            if failing and turn % EACH == EACH // 2:
                failure = FAILURES[turn // EACH % len(FAILURES)]
                self.seen[f"failed: {failure}"] += await self.ask(stream, failure) is None
            text = await self.ask(stream)
            if text is None:
                raise RuntimeError(f"turn {turn} of {self._url} got {self._last}")
            self._body.add(self._protocol.assistant(text))
        if failing:  # cancelled with a request in flight
            last = asyncio.create_task(self.ask(True, "cancel"))
            await asyncio.sleep(0.3)
            await self.end()
            self.seen["failed: cancel"] += await last is None
        else:
            await self.end()
        return self.seen

    async def end(self) -> None:
        async with self._session.delete(self._url) as response:
            response.raise_for_status()

    async def ask(self, stream: bool, failure: str | None = None) -> str | None:
        """Ask for the next turn; return the text, or None when there was no whole answer."""
        pieces, size, begin = self._body.sent(stream)
        headers = {"Content-Type": "application/json", "Content-Length": str(size)}
        patience = None if failure is None else PATIENCE
        if failure is not None:
            headers["X-Fail"] = failure
        if failure in ("away", "cancel"):
            headers["X-Delay"] = str(LONG)
        if failure == "away":
            patience = 0.3
        self.seen["requests"] += 1
        self.seen["bytes"] += size
        try:
            async with self._session.post(
                self._url + self._protocol.path,
                data=each(pieces),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=patience),
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._last = f"a {type(error).__name__}: {error}"
            return None
        self._last = f"a {response.status}: {answer[-200:]!r}"
        if response.status != 200:
            return None
        if stream:
            text = self._protocol.streamed(answer)
        else:
            text = self._protocol.text(orjson.loads(answer))
        if text is not None and not text.startswith(begin):
            raise RuntimeError(f"the model got something else than {begin!r}: {text[:60]!r}")
        return text


async def rollouts(
    server: str, wave: str, count: int, turns: int, size: int, failing: bool
) -> dict[str, int]:
    """Run so many at the same time; return what all have seen."""
    seen: Counter[str] = Counter()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        protocols = list(PROTOCOLS.values())
        runs = [
            Rollout(session, server, f"{wave}-{number}", protocols[number % len(protocols)])
            for number in range(count)
        ]
        async with asyncio.TaskGroup() as group:
            done = [group.create_task(one.run(turns, size, failing)) for one in runs]
        for one in done:
            seen.update(one.result())
    return dict(seen)


def main() -> None:
    """Do what the standard input says."""
    server = f"http://127.0.0.1:{sys.argv[1]}"

    def wave(name: str, count: str, turns: str, size: str) -> dict[str, int]:
        return asyncio.run(rollouts(server, name, int(count), int(turns), int(size), True))

    def warm() -> dict[str, int]:
        return asyncio.run(rollouts(server, "warm", len(PROTOCOLS), 2, 1000, False))

    serve({"wave": wave, "warm": warm})


if __name__ == "__main__":
    main()

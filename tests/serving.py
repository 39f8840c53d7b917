"""Real servers on loopback, and a client that can misbehave: for test_asgi.py and test_aiohttp.py.

Server and clients share one event loop, so a test can wait for what the server does by letting the
loop turn, and no test sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Self, TypeVar

import uvicorn
from aiohttp import web

from arena.requests import Requests

WAIT = 30.0  # seconds: the end of a test that hangs; none takes that long
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop of its own, which never hangs."""

    async def limited() -> T:
        async with asyncio.timeout(WAIT):
            return await main

    return asyncio.run(limited())


async def until(reached: Callable[[], object]) -> None:
    """Let the loop turn until something is so; run() sees to it that this ends."""
    while not reached():
        await asyncio.sleep(0)


async def idle(requests: Requests) -> None:
    """Wait until the registry is empty, and no view keeps anything; see that nothing is lost.

    A server may hold a view that it has sent until the connection is closed, on which it waits.
    """
    await until(lambda: not len(requests) and not requests.stats().pinned)
    now = requests.stats()
    assert (now.open, now.bytes) == (0, 0)
    assert now.opened == now.discarded + now.swept


@contextlib.asynccontextmanager
async def under_uvicorn(app: Any) -> AsyncIterator[int]:
    """Serve an ASGI app, and give the port."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=10)
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def under_aiohttp(app: web.Application, **options: Any) -> AsyncIterator[int]:
    """Serve an aiohttp application, and give the port."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=10, **options)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=512)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@dataclasses.dataclass(frozen=True)
class Answer:
    """A response; what was cut off is not there."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection, in bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Self]:
        # A small window: what a slow reader leaves stays with the server.
        here = socket.socket()
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        here.setblocking(False)
        await asyncio.get_running_loop().sock_connect(here, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=here, limit=4096)
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    async def head(self, path: str, *headers: str, method: str = "POST") -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: here", *headers, "", ""]
        await self.send("\r\n".join(lines).encode())

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def answer(self) -> Answer:
        """Read one response: to its end, or to the connection's."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value
            for name, _, value in (line.partition(": ") for line in head[1:] if line)
        }
        body = b""
        with contextlib.suppress(asyncio.IncompleteReadError):
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readexactly(2)
            else:
                body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(head[0].split()[1]), headers, body)


async def post(port: int, path: str, body: bytes | Iterable[bytes] = b"") -> Answer:
    """Post a body with a Content-Length, or in chunks, to its end, also when the answer is there.

    A server that refuses it must not make the client wait, and need not read it.
    """
    async with Client.to(port) as client:

        async def upload() -> None:
            with contextlib.suppress(ConnectionError):
                if isinstance(body, bytes):
                    await client.head(path, f"Content-Length: {len(body)}")
                    await client.send(body)
                    return
                await client.head(path, "Transfer-Encoding: chunked")
                for piece in body:
                    await client.chunk(piece)
                await client.send(b"0\r\n\r\n")

        uploading = asyncio.create_task(upload())
        answer = await client.answer()
        await uploading
        # Until the server has read all of it, too: it closes then.
        with contextlib.suppress(OSError):
            client.writer.write_eof()
            await client.reader.read()
        return answer

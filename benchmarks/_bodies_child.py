"""The server that ``bodies`` watches: one way of collecting a body, on a port of its own.

python -m benchmarks._bodies_child WAY CAP. Told "port", it answers with that. It answers each POST
with the number of bytes that came, or with 413; it measures nothing: who watches it does.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from aiohttp import web
from starlette.requests import Request

import arena
from benchmarks._child import serve

WAY, CAP = sys.argv[1], int(sys.argv[2])


async def answer(send: Any, status: int, text: str) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": text.encode()})


async def asgi_arena(scope: Any, receive: Any, send: Any) -> None:
    body = await arena.asgi.read_body(receive, scope["arena"], CAP)
    await answer(send, 200, str(len(body)))


async def asgi_bytes(scope: Any, receive: Any, send: Any) -> None:
    """As one writes it by hand; the cap is looked at for each piece, too."""
    body, more = b"", True
    while more:
        message = await receive()
        piece, more = message.get("body", b""), message.get("more_body", False)
        if len(body) + len(piece) > CAP:
            return await answer(send, 413, "too large")
        body += piece
    await answer(send, 200, str(len(body)))
    return None


async def starlette_body(scope: Any, receive: Any, send: Any) -> None:
    """It has no cap: what has come is looked at when all of it is there."""
    body = await Request(scope, receive).body()
    await answer(send, 413 if len(body) > CAP else 200, str(len(body)))


async def aiohttp_arena(request: web.Request) -> web.Response:
    body = await arena.aiohttp.read_body(request, request["arena"], CAP)
    return web.Response(text=str(len(body)))


async def aiohttp_bytes(request: web.Request) -> web.Response:
    body = b""
    async for piece in request.content.iter_any():
        if len(body) + len(piece) > CAP:
            return web.Response(status=413, text="too large")
        body += piece
    return web.Response(text=str(len(body)))


async def aiohttp_read(request: web.Request) -> web.Response:
    """The cap is the application's client_max_size."""
    return web.Response(text=str(len(await request.read())))


def run_uvicorn(app: Any, listening: socket.socket) -> None:
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    server.run([listening])


def run_aiohttp(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], listening: socket.socket
) -> None:
    app = web.Application(client_max_size=CAP, middlewares=[arena.aiohttp.middleware])
    app.router.add_post("/", handler)

    async def main() -> None:
        runner = web.AppRunner(app)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        await asyncio.Event().wait()

    asyncio.run(main())


WAYS: dict[str, Callable[[socket.socket], None]] = {
    "asgi-arena": lambda at: run_uvicorn(arena.asgi.ArenaMiddleware(asgi_arena), at),
    "asgi-bytes": lambda at: run_uvicorn(asgi_bytes, at),
    "asgi-body": lambda at: run_uvicorn(starlette_body, at),
    "aiohttp-arena": lambda at: run_aiohttp(aiohttp_arena, at),
    "aiohttp-bytes": lambda at: run_aiohttp(aiohttp_bytes, at),
    "aiohttp-read": lambda at: run_aiohttp(aiohttp_read, at),
}

if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=WAYS[WAY], args=(listening,), daemon=True).start()
    serve({"port": lambda: listening.getsockname()[1]})

"""Per-request memory for aiohttp's server: bodies straight into a request, which ends with it.

::

    app = web.Application(middlewares=[arena.aiohttp.middleware])

    async def chat(request):
        body = await arena.aiohttp.read_body(request, request["arena"], "32 MiB")
        return web.json_response(answer(orjson.loads(memoryview(body))))

Needs aiohttp: ``pip install 'tick-arena[aiohttp]'``.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from arena import _web
from arena._native import StrBuf
from arena.errors import BodyLimitError, DisconnectError, LimitError
from arena.requests import Request, Requests

try:
    from aiohttp import WSMessage, web
except ModuleNotFoundError as _why:
    raise ImportError(
        f"arena.aiohttp needs {_why.name}: pip install 'tick-arena[aiohttp]'"
    ) from None

__all__ = ["ArenaMiddleware", "Messages", "messages", "middleware", "read_body", "requests"]

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOOK = 0.5
"""Seconds from one look to the next whether the client of a request has gone."""

requests = Requests("aiohttp")
"""The registry of ``middleware``, and of every ``ArenaMiddleware`` that was given none."""


async def read_body(
    request: web.BaseRequest, r: Request, limit: int | str | None = "32 MiB"
) -> StrBuf:
    """Read the body of an aiohttp request into a ``StrBuf`` of ``r``, piece by piece.

    ``r`` is an open request: ``request["arena"]``, or one of your own. No ``bytes`` of the whole
    body is ever made; ``client_max_size`` of the application, which is about those, plays no part.

    ``limit`` is the most bytes that the body may have, decompressed, as an int or as "32 MiB";
    None leaves it to the limit of ``r``, which holds in any case. A piece that would pass it raises
    ``BodyLimitError``, and so does a Content-Length over it, before anything is read; ``r`` is then
    discarded, so nothing of the body stays. Under ``middleware`` that becomes a 413. So it is with
    a ``LimitError`` for the limit of the registry or the process, which becomes a 503.

    Raises ``DisconnectError``, a ``ConnectionError``, when the client goes away before the end;
    ``TickError`` when ``r`` has ended, ``StaleError`` when it ends meanwhile; RuntimeError
    when the body was read before, or a part of it; TypeError and ValueError for wrong arguments.
    The event loop of the request calls it; any thread may use what it returns.
    """
    if not isinstance(request, web.BaseRequest):
        raise TypeError(f"request is one of aiohttp.web, not {type(request).__name__}")
    content = request.content
    # What the reader has handed out; at its end aiohttp does not say so in public, and no less.
    if request.body_exists and (content._cursor or (content.at_eof() and content.total_bytes)):
        raise RuntimeError(
            "the body was read before, or a part of it, as by request.read(), request.json() or "
            "request.content: leave all of it to read_body()"
        )
    body = _web.Body(r, limit, request.content_length)
    try:
        while piece := await content.readany():
            body.append(piece)
            del piece  # or it lives until the next one is here
    except ConnectionError as error:
        raise DisconnectError(
            f"the client went away after {len(body.buf)} bytes of the body of {r.key}"
        ) from error
    return body.buf


class ArenaMiddleware:
    """Opens an ``arena.Request`` for each request, and ends it after the last byte is sent.

    ``arena.aiohttp.middleware`` is one. Handlers find the request in ``request["arena"]``. It ends
    with the task in which aiohttp handles the request and sends the response, and so it does on an
    error and a cancellation; a ``StreamResponse`` has it to its end. When the client goes it ends
    within a second, though the handler may still work on it: what must be done all the same takes
    a copy first. Handlers that work in a thread may use it there: it is no thread's. Put it first
    of the middlewares: one around it that runs the rest in another task, as a timeout may, would
    end it before the response is sent.

    A ``BodyLimitError`` that leaves the handler before the response has begun becomes
    ``web.HTTPRequestEntityTooLarge``, a 413. aiohttp then drops what the client still sends for 10
    s, and closes. Any other ``LimitError``, as for the limit of the registry, becomes a 503. For
    WebSockets see ``messages()``.

    aiohttp holds the last response of a connection until the next one on it is due. A view that is
    its body pins that memory as long: ``write()`` the view to a ``StreamResponse`` instead.

    ``requests`` is the registry, by default ``arena.aiohttp.requests``; ``limit`` the most bytes
    that each request may hold, as an int or as "64 MiB". What ``on_discard`` callbacks raise goes
    to the exception handler of the event loop, which logs it. Raises TypeError and ValueError for
    wrong arguments.
    """

    __middleware_version__ = 1  # what web.middleware() puts on a function

    def __init__(self, requests: Requests | None = None, *, limit: int | str | None = None) -> None:
        self.requests = _web.registry(requests, globals()["requests"], limit)
        """The registry of its requests."""
        self._limit = limit

    async def __call__(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        r = self.requests.open(_web.key(request.method, request.path), limit=self._limit)
        # The response is sent when all middlewares have returned, in this task, which aiohttp makes
        # for each request: web_protocol.py, _handle_request(). Its end comes on every way out.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: r.discard())
        _watch(request, r)
        request._state["arena"] = r  # request["arena"] = r, of which aiohttp 3.14 warns
        try:
            return await handler(request)
        except BodyLimitError as error:
            if request.writer.output_size:  # the response has begun: aiohttp closes
                raise
            raise web.HTTPRequestEntityTooLarge(
                max_size=error.limit, actual_size=error.size, text=f"{error}\n"
            ) from error
        except LimitError as error:
            if request.writer.output_size:
                raise
            # Of the registry or the process: another time there may be room.
            raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
        except DisconnectError:  # nobody is there to get an answer, and it is nobody's fault
            return web.Response(status=499, reason="Client Closed Request")
        except (ConnectionError, asyncio.CancelledError) as error:
            if request.transport is None or request.transport.is_closing():
                # The client has gone. aiohttp keeps this until the next collection of all, and its
                # frames have what the handler was sending: a view, which pins the body.
                traceback.clear_frames(error.__traceback__)
            raise


def _watch(request: web.Request, r: Request) -> None:
    """Look now and then whether the client has gone, which aiohttp tells to nobody who waits."""
    if not r.open:
        return
    if request.transport is None:
        r.discard()
    else:
        asyncio.get_running_loop().call_later(LOOK, _watch, request, r)


middleware = ArenaMiddleware()


class Messages:
    """The messages of a WebSocket, each with a request of its own; made by ``messages()``."""

    __slots__ = ("_messages", "_ws")

    def __init__(self, ws: web.WebSocketResponse, ticks: _web.Messages) -> None:
        self._ws = ws
        self._messages = ticks

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> tuple[WSMessage, Request]:
        self._messages.end()
        message = await self._ws.__anext__()
        return message, self._messages.next()


def messages(ws: web.WebSocketResponse, r: Request, *, limit: int | str | None = None) -> Messages:
    """Iterate over the messages of a WebSocket, with a request of its own for each.

    ``async for message, m in arena.aiohttp.messages(ws, request["arena"]): ...``. ``m`` is open
    until the next message is asked for, and ends with ``r``, the request of the connection, at the
    latest. It is in the registry and in a group of that: the group is ``r.key``.

    ``limit`` is the most bytes that each may hold, as an int or as "1 MiB". Raises TypeError and
    ValueError for wrong arguments.
    """
    if not isinstance(ws, web.WebSocketResponse):
        raise TypeError(f"ws is a web.WebSocketResponse, not {type(ws).__name__}")
    if not isinstance(r, Request):
        raise TypeError(f"r is an arena.Request, not {type(r).__name__}")
    ticks = _web.Messages(_web.registry(r._registry, requests, limit), str(r.key), limit)
    r.on_discard(ticks.end)
    return Messages(ws, ticks)

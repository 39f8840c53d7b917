"""Per-request memory for ASGI: bodies straight into a request, which ends with the response.

With FastAPI or Starlette::

    app.add_middleware(arena.asgi.ArenaMiddleware)

    @app.post("/v1/chat")
    async def chat(request: Request):
        body = await arena.asgi.read_body(request.receive, request.scope["arena"], "32 MiB")
        return answer(orjson.loads(memoryview(body)))

Nothing of a framework is imported. It runs on asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from arena import _web
from arena._native import StrBuf
from arena.errors import BodyLimitError, DisconnectError, LimitError
from arena.requests import Request, Requests

__all__ = ["ArenaMiddleware", "read_body", "requests"]

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]

LINGER = 10.0
"""Seconds for which the rest of a refused body is read and dropped, so that its sender gets to the
413; as long as aiohttp does it."""

requests = Requests("asgi")
"""The registry of every ``ArenaMiddleware`` that was given none."""


async def read_body(receive: _Receive, r: Request, limit: int | str | None = "32 MiB") -> StrBuf:
    """Read the body of an HTTP request into a ``StrBuf`` of ``r``, piece by piece, and return it.

    ``receive`` is ASGI's, or ``request.receive`` of Starlette and FastAPI; ``r`` an open request:
    ``scope["arena"]``, or one of your own. No ``bytes`` of the whole body is ever made.

    ``limit`` is the most bytes that the body may have, as an int or as "32 MiB"; None leaves it to
    the limit of ``r``, which holds in any case. A piece that would pass it raises
    ``BodyLimitError``, and so does a Content-Length over it, before anything is read; ``r`` is then
    discarded, so nothing of the body stays. Under ``ArenaMiddleware`` that becomes a 413. So it is
    with a ``LimitError`` for the limit of the registry or the process, which becomes a 503.

    Raises ``DisconnectError``, a ``ConnectionError``, when the client goes away before the end;
    ``TickError`` when ``r`` has ended, ``StaleError`` when it ends meanwhile; RuntimeError
    when the body was read before, or a part of it, which only ``ArenaMiddleware`` can know;
    TypeError and ValueError for wrong arguments. The event loop of the request calls it; any thread
    may use what it returns. The body is then read: ``request.body()`` of a framework would wait for
    another one until the client goes.
    """
    exchange = _exchanges.get(r) if isinstance(r, Request) else None
    if exchange is None:
        return await _read(receive, r, limit, None)
    if exchange.reading:
        raise RuntimeError("the body is being read by another call of read_body()")
    exchange.reading = True
    try:
        return await _read(receive, r, limit, exchange.announced)
    except LimitError as error:
        exchange.refused = error
        raise
    finally:
        exchange.reading = False


async def _read(
    receive: _Receive, r: Request, limit: int | str | None, announced: int | None
) -> StrBuf:
    body = _web.Body(r, limit, announced)
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise DisconnectError(
                f"the client went away after {len(body.buf)} bytes of the body of {r.key}"
            )
        body.append(message.get("body", b""))
        if not message.get("more_body", False):
            return body.buf
        del message  # or this piece lives until the next one is here


class _Exchange:
    """One HTTP request and its response, as they pass through the middleware."""

    __slots__ = (
        "_receive",
        "_request",
        "_scope",
        "_send",
        "_trailers",
        "_watching",
        "announced",
        "arrived",
        "reading",
        "refused",
        "replaced",
        "started",
        "taken",
        "touched",
    )

    def __init__(self, r: Request, scope: _Message, receive: _Receive, send: _Send) -> None:
        self._request = r
        self._scope = scope
        self._receive = receive
        self._send = send
        self._trailers = False
        self._watching: asyncio.Future[_Message] | None = None
        self.announced = _content_length(scope)
        self.touched = False
        """Something of the body was asked for: then the client sends it."""
        self.arrived = False
        """All of the body was received, by whomever, or the client has gone."""
        self.reading = False
        """It is read_body() that receives."""
        self.taken = False
        """Somebody else has received some of the body."""
        self.started = False
        """The response has begun."""
        self.refused: LimitError | None = None
        """What read_body() has raised."""
        self.replaced = False
        """The app answers that with a 500, which is not sent."""

    async def receive(self) -> _Message:
        if self.reading and (self.arrived or self.taken):
            raise RuntimeError(
                "the body was read before, or a part of it, as by request.body(), request.stream() "
                "or a parameter of the endpoint that takes it: leave all of it to read_body()"
            )
        self.touched = True
        if self._watching is not None:  # a receiver that gives up does not end it
            return await asyncio.shield(self._watching)
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self.arrived = True
            if message["type"] == "http.request":
                self._watch()
        if not self.reading and message.get("body"):
            self.taken = True
        return message

    def _watch(self) -> None:
        """Wait for the client to go, of which an app learns only while it receives."""
        self._watching = asyncio.ensure_future(self._receive())
        self._watching.add_done_callback(self._gone)

    def _gone(self, watching: asyncio.Future[_Message]) -> None:
        # Whoever waits for an answer to this request waits in vain. After the response it is over.
        if not watching.cancelled() and watching.exception() is None:
            self._request.discard()

    def end(self) -> None:
        """The app has returned."""
        if self._watching is not None:
            self._watching.cancel()

    async def send(self, message: _Message) -> None:
        if message["type"] == "http.response.start":
            # The error handler of an app within, which then raises the error on: what is outermost
            # in Starlette, and in each app that is mounted in another one.
            self.replaced = self.refused is not None and message["status"] == 500
            self.started = not self.replaced
            self._trailers = message.get("trailers", False)
        if self.replaced:
            return
        await self._send(message)
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and not self._trailers:
            self._request.discard()

    async def refuse(self) -> None:
        """Answer 413 or 503, and drop what the client still sends: it may read no answer before.

        A server that closes while there is something unread resets the connection, and the answer
        is lost with it. A client that waits for "100 Continue" sends nothing: it got the 413.
        """
        text = f"{self.refused}\n".encode()
        linger = not self.arrived and (self.touched or not _expects_continue(self._scope))
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(text)),
        ]
        if not self.arrived and str(self._scope.get("http_version", "1.1")).startswith("1"):
            headers.append((b"connection", b"close"))
        status = 413 if isinstance(self.refused, BodyLimitError) else 503
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": text, "more_body": linger})
        if not linger:
            return
        try:
            async with asyncio.timeout(LINGER):
                while not self.arrived:
                    await self.receive()
        except TimeoutError:
            pass
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


_exchanges: dict[Request, _Exchange] = {}


def _header(scope: _Message, name: bytes) -> bytes:
    return next((value for header, value in scope.get("headers", ()) if header == name), b"")


def _content_length(scope: _Message) -> int | None:
    try:
        return int(_header(scope, b"content-length"))
    except ValueError:  # none, or the server lets anything through
        return None


def _expects_continue(scope: _Message) -> bool:
    return _header(scope, b"expect").lower() == b"100-continue"


class ArenaMiddleware:
    """Opens an ``arena.Request`` for each HTTP request, and ends it after the last byte is sent.

    The app finds it in ``scope["arena"]``, also in a copy of the scope: ``request.scope["arena"]``
    in Starlette and FastAPI. It ends when the last ``http.response.body`` has been sent, and at the
    latest when the app returns or raises: a streaming response has it to its end, and so it goes on
    an error and a cancellation. When the client goes it ends at once if its body had been received,
    though the app may still work on it: what must be done all the same takes a copy first. What
    runs after the response, as a ``BackgroundTask`` does, finds it ended, and gets ``StaleError``:
    take a copy (``persist()``) for it. Endpoints that run in a thread pool may use it as any other:
    it is no thread's.

    A ``BodyLimitError`` that leaves the app before the response has begun, or that an error handler
    of the app answers with a 500, becomes a 413; the connection is closed once the client has
    stopped sending, or after 10 s. An app that answers it otherwise has its own way.

    For a WebSocket ``scope["arena"].message`` is the request of the message that came last: each
    has its own, from when it is received until the next is asked for, and to the end of the
    connection at most. An app that reads ahead opens requests of its own.

    ``requests`` is the registry, by default ``arena.asgi.requests``; ``limit`` the most bytes that
    each request, or each message, may hold, as an int or as "64 MiB". Other types of scope pass
    through. What ``on_discard`` callbacks raise comes out of the app's last ``send()``, or of the
    ``receive()`` of the next message, as an ExceptionGroup. Raises TypeError and ValueError for
    wrong arguments.
    """

    def __init__(
        self, app: _App, requests: Requests | None = None, *, limit: int | str | None = None
    ) -> None:
        if not callable(app):
            raise TypeError(f"app is an ASGI application, not {type(app).__name__}")
        self.app = app
        self.requests = _web.registry(requests, globals()["requests"], limit)
        """The registry of its requests."""
        self._limit = limit

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        r = self.requests.open(_web.key(scope["method"], scope["path"]), limit=self._limit)
        exchange = _exchanges[r] = _Exchange(r, scope, receive, send)
        try:
            with self.requests.delivering(r.key):
                await self.app({**scope, "arena": r}, exchange.receive, exchange.send)
        except DisconnectError:
            if exchange.started:
                raise
            # Else nobody is there to get an answer, and it is nobody's fault.
        except Exception as error:
            if isinstance(error, LimitError):
                exchange.refused = error
            if exchange.started or exchange.refused is None:
                raise
            await exchange.refuse()
            if error is not exchange.refused:  # told, and not hidden by the 413
                raise
        else:
            if exchange.refused is not None and not exchange.started:
                await exchange.refuse()
        finally:
            exchange.end()
            del _exchanges[r]

    async def _websocket(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        with _web.Messages(
            self.requests, _web.key("WebSocket", scope["path"]), self._limit
        ) as messages:

            async def receive_next() -> _Message:
                messages.end()
                message = await receive()
                if message["type"] == "websocket.receive":
                    messages.next()
                return message

            await self.app({**scope, "arena": messages}, receive_next, send)

"""What ``arena.asgi`` and ``arena.aiohttp`` share: bodies under a cap, keys, ticks of messages."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from arena import _native
from arena._native import StrBuf
from arena.errors import BodyLimitError, LimitError, TickError
from arena.requests import Request, Requests

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Body", "Messages", "key", "registry"]

_log = logging.getLogger("arena")
_numbers: Iterator[int] = itertools.count(1)
_PROVEN = 1 << 20  # bytes of a body that have come, before its Content-Length is believed
_MOST = 1 << 30  # bytes of address space that are taken on the word of a client


def key(method: str, path: str) -> str:
    """Return a key that no other request has, and that tells in a log which one it was."""
    return f"#{next(_numbers)} {method} {path}"


def registry(requests: Requests | None, default: Requests, limit: int | str | None) -> Requests:
    """Check the arguments of a middleware, and return its registry."""
    if requests is not None and not isinstance(requests, Requests):
        raise TypeError(f"requests is an arena.Requests, not {type(requests).__name__}")
    if limit is not None:
        _native._size(limit, "limit")
    return default if requests is None else requests


class Body:
    """A body on its way into a request: ``append()`` looks at the cap before it takes a piece."""

    __slots__ = ("_announced", "_cap", "_request", "buf")

    def __init__(self, r: Request, limit: int | str | None, announced: int | None) -> None:
        if not isinstance(r, Request):
            raise TypeError(f"a body is read into an arena.Request, not {type(r).__name__}")
        caps = [] if limit is None else [_native._size(limit, "limit")]
        if r.limit is not None:
            caps.append(r.limit - r.used)
        self._request = r
        self._cap = min(caps, default=None)
        if self._cap is not None and announced is not None and announced > self._cap:
            self._refuse(BodyLimitError(self._cap, announced, announced=True))
        self.buf: StrBuf = r.strbuf()
        self._announced = announced

    def append(self, piece: Buffer) -> None:
        """Take a piece, or refuse the whole body."""
        size = len(self.buf) + memoryview(piece).nbytes
        if self._cap is not None and size > self._cap:
            self._refuse(BodyLimitError(self._cap, size))
        if self._announced is not None and size > _PROVEN:
            # All the rest in one mapping, so that it need not move again and again. Not before some
            # of it has come: the first byte in a huge page is 2 MiB, and a header is only a word.
            room = min(max(self._announced - len(self.buf), 0), _MOST)
            self._announced = None
            with contextlib.suppress(MemoryError):  # a wish: what comes may fit all the same
                self.buf._reserve(room)
        try:
            self.buf.append(piece)
        except LimitError as error:  # the registry's, or the process's
            self._refuse(error)

    def _refuse(self, error: LimitError) -> NoReturn:
        # What has come must not stay until somebody handles the error.
        self._request._registry._end(self._request, error)
        for note in getattr(error, "__notes__", ()):  # a middleware makes an answer of the error
            _log.error("while the body of %s was refused: %s", self._request.key, note)
        raise error


class Messages:
    """The ticks of a WebSocket: a request for each message, from its arrival to the next one's.

    ``scope["arena"]`` of a WebSocket under ``arena.asgi.ArenaMiddleware``.
    """

    __slots__ = ("_connection", "_count", "_limit", "_message", "_requests")

    def __init__(self, requests: Requests, connection: str, limit: int | str | None) -> None:
        self._requests = requests
        self._connection = connection
        self._limit = limit
        self._count = 0
        self._message: Request | None = None

    @property
    def message(self) -> Request:
        """The request of the message that came last, open until the next is asked for.

        Raises TickError before the first message and after the last.
        """
        if self._message is None:
            raise TickError(f"no message of {self._connection} is here: receive one first")
        return self._message

    def next(self) -> Request:
        """Open the request of a message that has come."""
        self._count += 1
        self._message = self._requests.open(
            f"{self._connection}, message {self._count}", self._connection, self._limit
        )
        return self._message

    def end(self, error: BaseException | None = None) -> None:
        """End the request of the message before."""
        message, self._message = self._message, None
        if message is not None:
            self._requests._end(message, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self.end(error)

    def __repr__(self) -> str:
        return f"<arena messages of {self._connection}: {self._count} so far>"

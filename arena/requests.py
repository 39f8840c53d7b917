"""``Requests``: a tick for each request of a server, by key, that ends when it is delivered.

A request lives while others wait for it: a handler for its answer, a stream for its end marker. So
its end is two steps, in this order: unblock whoever waits (``on_discard``), then drop the memory.
The first step is a list of the request's own tick, which runs on every way out, also when the
registry itself is forgotten; nothing has to be found by a key that may be gone.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self

from arena import _native
from arena._native import Block, Str, StrBuf, Tick
from arena.errors import TickError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Delivery", "Group", "Request", "RequestStats", "Requests", "registries"]

_P = ParamSpec("_P")
_LABEL = 80  # characters of a key that errors and logs show
_log = logging.getLogger("arena")
_clock = time.monotonic
_numbers = itertools.count()
_alive: dict[int, weakref.ref[Requests]] = {}  # no WeakSet: it may change while it is iterated


def registries() -> list[Requests]:
    """Return the registries that are alive, oldest first. Any thread may call it."""
    found = (reference() for reference in list(_alive.values()))
    return [registry for registry in found if registry is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestStats:
    """The figures of a registry at one moment."""

    name: str
    """Of the registry."""
    open: int
    """Requests that are open now."""
    bytes: int
    """What they have asked for, a StrBuf by its length."""
    oldest: float
    """Seconds since the oldest of them was opened; 0.0 when none is open."""
    opened: int
    """Requests ever opened."""
    discarded: int
    """Requests that were ended by a delivery, by discard(), or with their tick."""
    swept: int
    """Requests that were ended by sweep(), close_group() or close(): nobody had delivered them."""
    pinned: int
    """Bytes of chunks of ended requests that live views keep, now."""
    pinned_count: int
    """How many chunks that is."""
    limit: int | None
    """The most bytes that the open requests may hold together, or None."""


def _is_lazy(fn: object) -> bool:
    """A call of it runs nothing yet."""
    return (
        inspect.iscoroutinefunction(fn)
        or inspect.isasyncgenfunction(fn)
        or inspect.isgeneratorfunction(fn)
    )


def _shown(key: object) -> str:
    try:
        text = repr(key)
    except Exception:  # a key's own mistake must not keep the others of a sweep waiting
        text = f"<{type(key).__name__} that cannot be shown>"
    return text if len(text) <= _LABEL else f"{text[:_LABEL]}..."


class Request:
    """One open request: a key, a group, and a tick of its own. Made by ``Requests.open()``.

    It is no thread's: any thread may allocate in it, read it and discard it. Its tick is never
    the current one, and nothing that is current has a part in it.
    """

    __slots__ = ("__weakref__", "_born", "_registry", "group", "key", "tick")

    tick: Tick
    """Its tick, with the name of the registry."""

    def __init__(self, registry: Requests, key: Hashable, group: Hashable) -> None:
        self.key = key
        """What it was opened by."""
        self.group = group
        """What it goes with, or None."""
        self._registry = registry
        self._born = _clock()

    @property
    def open(self) -> bool:
        """True until its end begins."""
        return self.tick.open

    @property
    def age(self) -> float:
        """Seconds since it was opened."""
        return _clock() - self._born

    @property
    def used(self) -> int:
        """Bytes asked for now; a StrBuf counts by its length."""
        return self.tick.used

    @property
    def limit(self) -> int | None:
        """The most bytes that it may hold, or None."""
        return self.tick.limit

    def alloc(self, size: int, /) -> Block:
        """``Tick.alloc()`` in the request: a zeroed, writable Block of ``size`` bytes."""
        return self.tick.alloc(size)

    def strdup(self, text: str | Buffer, /) -> Str:
        """``Tick.strdup()`` in the request: an immutable copy."""
        return self.tick.strdup(text)

    def strbuf(self, initial: str | Buffer | None = None) -> StrBuf:
        """``Tick.strbuf()`` in the request: a growing string.

        Beyond 64 KiB it has a mapping of its own: it grows by moving pages, without a copy, and
        goes back to the system with the request.
        """
        return self.tick.strbuf(initial)

    def on_discard(self, fn: Callable[_P, object], /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call ``fn(*args, **kwargs)`` when the request ends, before its memory goes.

        That is where a waiter's future is settled, and where the end marker goes into its queue.
        It runs on every way out, exactly once, last in first out with the other ones, all of them
        even when some fail. It may read the request's memory, not allocate in it.

        It runs in the thread that ends the request: for an event loop of another thread use
        ``on_discard(loop.call_soon_threadsafe, ...)``. Raises TypeError for what cannot be called,
        and for an ``async def``, which nobody would await; TickError when the request has ended.
        """
        if not callable(fn):
            raise TypeError(
                f"on_discard(fn, *args, **kwargs) takes a callable first, not {fn!r:.80}"
            )
        # An object may have an async __call__; of a function that is nothing of the kind.
        call = getattr(fn, "__call__", None)  # noqa: B004
        if _is_lazy(fn) or _is_lazy(call):
            raise TypeError(
                f"on_discard() takes a plain function, and {_shown(fn)} is async or a generator: "
                "nobody would await it; settle a future, put_nowait() into a queue, or make a task "
                "in it"
            )
        self.tick.cleanup(fn, *args, **kwargs)

    def discard(self) -> bool:
        """End this request, as ``Requests.discard()`` does, whoever has its key by now."""
        return self._registry._end(self)

    def __repr__(self) -> str:
        state = f"open, {self.used} bytes" if self.open else "ended"
        return f"<arena.Request {_shown(self.key)} of {self._registry.name!r}, {state}>"


class Delivery(_native._Ending):
    """The way out of a request: made by ``Requests.delivering()``.

    The end of its ``with`` is one step in C, which no signal can come into the middle of.
    """

    __slots__ = ()

    async def __aenter__(self) -> Request:
        request: Request = self.__enter__()
        return request


class Group(_native._Ending):
    """Requests that go together: made by ``Requests.group()``."""

    __slots__ = ("_registry", "name")

    def __init__(self, registry: Requests, name: Hashable) -> None:
        super().__init__(registry._open, name, registry._label(name))
        self._registry = registry
        self.name = name
        """What its requests have as ``group``."""

    def open(self, key: Hashable, limit: int | str | None = None) -> Request:
        """``Requests.open()`` in this group."""
        return self._registry.open(key, group=self.name, limit=limit)

    def close(self) -> int:
        """``Requests.close_group()`` of this group."""
        return self._registry.close_group(self.name)

    async def __aenter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<arena.Group {_shown(self.name)} of {self._registry.name!r}>"


class Requests:
    """A registry of requests by key, each with memory of its own that goes when it is delivered.

    ``limit`` is the most bytes that all open requests may hold together, as an int or as "2 GiB",
    exact to the byte: what would pass it raises ``LimitError``, a ``MemoryError``.

    Any thread, task and callback may call anything here, for any request. What the requests keep
    is not copied: views of a body pin just that body when it is discarded, until they die. Raises
    TypeError and ValueError for a wrong name or limit.
    """

    __slots__ = ("__weakref__", "_native", "_open", "name")

    def __init__(self, name: str, limit: int | str | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a registry is a str, not {type(name).__name__}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the name of a registry is text, not {name!r}") from None
        self.name = name
        """The name of its ticks, in the map of what escapes and in set_retention()."""
        self._native = _native._registry(name, limit)
        self._open: dict[Hashable, Request] = {}
        number = next(_numbers)
        _alive[number] = weakref.ref(self, lambda _: _alive.pop(number, None))

    @property
    def limit(self) -> int | None:
        """The most bytes that the open requests may hold together, or None."""
        return self._native.limit

    def open(
        self, key: Hashable, group: Hashable = None, limit: int | str | None = None
    ) -> Request:
        """Open a request, and return it.

        ``limit`` is the most bytes that it may hold. Raises TickError when the key is open, or
        while its callbacks run (that request stays as it is), and after close(); TypeError for a
        key that cannot be hashed and for a wrong limit; ValueError; MemoryError.
        """
        hash(group)  # one that cannot be compared would fail when groups are closed
        request = Request(self, key, group)
        there = self._native.open(self._open, key, request, _shown(key), limit)
        if there is not request:
            state = f"open, with {there.used} bytes" if there.open else "ending: its callbacks run"
            raise TickError(
                f"request {_shown(key)} of {self.name!r} is {state}, since {there.age:.3g} s: "
                "discard it first, or take another key"
            )
        return request

    def get(self, key: Hashable) -> Request:
        """Return the open request of a key. Raises KeyError with the key when there is none."""
        return self._open[key]

    def delivering(self, key: Hashable) -> Delivery:
        """Return what discards the request of ``key`` at the end of a ``with`` or ``async with``.

        ``with reqs.delivering(key) as r:`` ends it on success, on an error and on cancellation.
        The body's own exception is what the caller sees; what its ``on_discard`` callbacks raise
        becomes notes of that, or an ExceptionGroup when there is none. Entering raises KeyError
        with the key when it is not open. That it was discarded meanwhile is no error.
        """
        return Delivery(self._open, key)

    def discard(self, key: Hashable) -> bool:
        """End the request of ``key``: unblock whoever waits, then drop its memory.

        Returns whether there was something to do: False when no such request is open, also while
        another call ends it. Raises an ExceptionGroup of what its callbacks raised, when all is
        done. C: arena_end.
        """
        request = self._open.get(key)
        return request is not None and self._end(request)

    def group(self, group: Hashable) -> Group:
        """Return what closes a group at the end of a ``with`` or ``async with``."""
        return Group(self, group)

    def close_group(self, group: Hashable) -> int:
        """End all requests of a group that nobody delivered, and return how many those were.

        All of them, even when callbacks of some fail: then an ExceptionGroup of all failures is
        raised at the end. None is no group: TypeError.
        """
        done, error = self._native.close_group(self._open, group, self._label(group))
        if error is not None:
            raise error
        return sum(done)

    def sweep(self, older_than: float) -> int:
        """End all requests that were opened more than ``older_than`` seconds ago.

        For what neither side ever ended: call it now and then. Logs a WARNING for each (logger
        "arena") with its key, group, age and bytes; no warnings.warn(), which would keep each
        text. Returns how many those were. Raises TypeError and ValueError for a wrong number, and
        an ExceptionGroup as close_group() does.
        """
        if isinstance(older_than, bool) or not isinstance(older_than, (int, float)):
            raise TypeError(f"older_than is a number of seconds, not {type(older_than).__name__}")
        if not 0 <= older_than <= sys.float_info.max:
            raise ValueError(f"older_than is a number of seconds from 0, not {older_than!r:.40}")
        late = [r for r in list(self._open.values()) if r.age > older_than]
        return self._sweep(
            late, f"requests older than {older_than:g} s of {self.name!r}", tell=True
        )

    def close(self) -> int:
        """End all requests, and open no more. Returns how many those were; raises as close_group().

        ``with arena.Requests("bodies") as reqs:`` calls it at the end.
        """
        return self._close(None)

    def stats(self) -> RequestStats:
        """Return the figures of this moment."""
        requests = list(self._open.values())
        opened, discarded, swept, pinned, pinned_count = self._native.figures()
        return RequestStats(
            name=self.name,
            open=opened - discarded - swept,
            bytes=sum(r.used for r in requests),
            oldest=max((r.age for r in requests), default=0.0),
            opened=opened,
            discarded=discarded,
            swept=swept,
            pinned=pinned,
            pinned_count=pinned_count,
            limit=self.limit,
        )

    def _close(self, body: BaseException | None) -> int:
        self._native.close()
        return self._sweep(list(self._open.values()), f"the requests of {self.name!r}", body)

    def _end(self, request: Request, body: BaseException | None = None) -> bool:
        return self._native.end(request.tick, body)

    def _label(self, group: Hashable) -> str:
        if group is None:
            raise TypeError("None is no group: it would be all that were opened without one")
        hash(group)
        return f"group {_shown(group)} of {self.name!r}"

    def _sweep(
        self,
        requests: list[Request],
        what: str,
        body: BaseException | None = None,
        tell: bool = False,
    ) -> int:
        """End all of them, and return how many were open. Their failures come as one group."""
        sizes = [(r.age, r.used) for r in requests] if tell else []
        done, error = self._native.sweep(requests, what, body)
        for request, (age, size), was_open in zip(requests, sizes, done, strict=False):
            if was_open:
                _log.warning(
                    "request %s of %r, group %s, was never ended: "
                    "swept after %.1f s, with %d bytes",
                    _shown(request.key),
                    self.name,
                    _shown(request.group),
                    age,
                    size,
                )
        if error is not None:
            raise error
        return sum(done)

    def __contains__(self, key: object) -> bool:
        return key in self._open

    def __len__(self) -> int:
        return len(self._open)

    def __bool__(self) -> bool:
        return True  # a registry with nothing open is a registry

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys that are open at the start, oldest first."""
        return iter(list(self._open))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._close(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._close(error)

    def __repr__(self) -> str:
        return f"<arena.Requests {self.name!r}: {len(self)} open>"

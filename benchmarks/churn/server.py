"""The interception server: it stands between agents that ask a model and the model.

``python -m benchmarks.churn.server STORE MODEL_PORT [objects|unparsed] [trim] [tune]``. A handler
reads a request, parks it and waits; a task forwards the body to the model and hands the answer
over, whole through a future or as the events of a stream through a queue with an end marker. A
rollout is a group of requests: when it ends or is cancelled, its tasks are cancelled and what is
still parked is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from aiohttp import web

import arena
from arena._native import StrBuf
from arena.trimmer import active
from benchmarks.churn import _loop
from benchmarks.churn.protocols import PROTOCOLS, Asked, Protocol
from benchmarks.churn.stores import MOST, STORES, Gone, Parked, Plain, Store, Streamed

PIECE = 256 << 10  # bytes of a body that are sent at a time
LATE = 1.0  # seconds: a handler that takes longer to return is hung
TICK = 0.005  # seconds between two looks of the ticker


class SynthesisError(Exception):
    """The events of a stream could not be made: injected."""


class Server:
    """The application, and what it has seen."""

    def __init__(self, store: Store, model: str, *options: str) -> None:
        self._store = store
        self._model = model
        self._objects = "objects" in options
        self._glimpse = "unparsed" in options
        self._keys = itertools.count(1)
        self._rollouts: dict[str, set[asyncio.Task[None]]] = {}
        self._handlers: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._hung: set[int] = set()
        self._unblocked: Counter[int] = Counter()
        self._failures: Counter[str] = Counter()
        self._worst_gap = 0.0

    def application(self) -> web.Application:
        """Return it for aiohttp."""
        app = web.Application(client_max_size=MOST)
        app.router.add_post("/rollouts/{rollout}", self._begin)
        app.router.add_delete("/rollouts/{rollout}", self._end)
        app.router.add_get("/figures", self._tell)
        for protocol in PROTOCOLS.values():
            handler = functools.partial(self._handle, protocol)
            app.router.add_post(f"/rollouts/{{rollout}}{protocol.path}", handler)
        app.cleanup_ctx.append(self._running)
        return app

    def figures(self) -> dict[str, Any]:
        """Return what it has seen so far."""
        return {
            **self._store.figures(),
            "handlers": len(self._handlers),
            "tasks": len(self._tasks),
            "hung": len(self._hung),
            "unblocked": {str(times): count for times, count in self._unblocked.items()},
            "failures": dict(self._failures),
            "gap ms": self._worst_gap * 1e3,
        }

    def forget_gap(self) -> float:
        """Begin anew with the worst gap of the loop; return the one so far, in milliseconds."""
        worst, self._worst_gap = self._worst_gap, 0.0
        return worst * 1e3

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        ticker = asyncio.create_task(self._tick())
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield
            for rollout in list(self._rollouts):
                self._close(rollout)
        ticker.cancel()

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            self._worst_gap = max(self._worst_gap, now - last - TICK)
            last = now

    async def _begin(self, request: web.Request) -> web.Response:
        rollout = request.match_info["rollout"]
        if rollout in self._rollouts:
            raise web.HTTPConflict(text=f"rollout {rollout!r} is there already\n")
        self._rollouts[rollout] = set()
        return web.json_response({"rollout": rollout})

    async def _end(self, request: web.Request) -> web.Response:
        rollout = request.match_info["rollout"]
        if rollout not in self._rollouts:
            raise web.HTTPNotFound(text=f"there is no rollout {rollout!r}\n")
        self._close(rollout)
        return web.json_response({"rollout": rollout})

    def _close(self, rollout: str) -> None:
        for task in self._rollouts.pop(rollout):
            task.cancel()
        self._store.close_group(rollout)
        self._watch(*(key for key, group in self._handlers.items() if group == rollout))

    async def _tell(self, request: web.Request) -> web.Response:
        return web.json_response(self.figures())

    def _watch(self, *keys: int) -> None:
        """Look in a second whether the handlers have returned."""
        asyncio.get_running_loop().call_later(LATE, self._look, keys)

    def _look(self, keys: tuple[int, ...]) -> None:
        self._hung.update(key for key in keys if key in self._handlers)

    async def _handle(self, protocol: Protocol, request: web.Request) -> web.StreamResponse:
        rollout = request.match_info["rollout"]
        if rollout not in self._rollouts:
            raise web.HTTPNotFound(text=f"there is no rollout {rollout!r}: POST it first\n")
        parked = Parked(next(self._keys), rollout)
        self._handlers[parked.key] = rollout
        self._store.open(parked)
        try:
            return await self._answer(request, parked, protocol)
        finally:
            self._store.discard(parked)
            del self._handlers[parked.key]
            self._unblocked[parked.unblocked] += 1

    async def _answer(
        self, request: web.Request, parked: Parked, protocol: Protocol
    ) -> web.StreamResponse:
        try:
            await self._read(parked, request)
            asked = self._parse(parked, protocol)
        except Gone:
            return web.Response(status=410, text="the rollout has ended\n")
        except arena.LimitError:
            raise web.HTTPRequestEntityTooLarge(MOST) from None
        except ValueError as error:  # of the parser, too
            return web.Response(status=400, text=f"{error}\n")
        tasks = self._rollouts[parked.group]
        waiter = parked.waiter = Streamed() if asked.stream else Plain()
        task = asyncio.create_task(self._deliver(parked, protocol, asked, request.headers))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if isinstance(waiter, Streamed):
                return await self._stream(request, protocol, waiter)
            answer = await waiter.answer()
            return web.Response(body=answer, content_type="application/json")
        except Gone:
            # Not raised: a response that is an exception has a traceback, whose frames have this
            # response; such a cycle keeps the request, and its body, until the next collection.
            return web.Response(status=502, text="the model gave no whole answer\n")
        except BaseException:  # nobody is there any more to deliver to
            task.cancel()
            raise

    async def _read(self, parked: Parked, request: web.Request) -> None:
        try:
            async with asyncio.timeout(None) as parked.reading:
                await self._store.read(parked, request)
        except (TimeoutError, arena.StaleError):
            raise Gone from None
        finally:
            parked.reading = None
        if parked.unblocked:
            raise Gone

    def _parse(self, parked: Parked, protocol: Protocol) -> Asked:
        if self._glimpse:
            with memoryview(parked.body) as view:
                return protocol.glimpsed(view)
        with arena.tick("parse", objects=True) if self._objects else contextlib.nullcontext():
            parsed = self._store.parse(parked)
            asked = protocol.asked(parsed)
            # What outlives the tick is taken out of it; the parsed body is not.
            asked = dataclasses.replace(asked, model="".join(list(asked.model)))
            del parsed
        return asked

    async def _stream(
        self, request: web.Request, protocol: Protocol, waiter: Streamed
    ) -> web.StreamResponse:
        response = None
        try:
            async for event in waiter.events():
                if response is None:  # a failure before the first byte still has a status
                    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                    await response.prepare(request)
                await response.write(event)
            assert response is not None
        except Gone:
            if response is None:
                raise
            await response.write(protocol.failure("the model gave no whole answer"))
        return response

    async def _deliver(
        self, parked: Parked, protocol: Protocol, asked: Asked, headers: Any
    ) -> None:
        """Forward a request to the model, and hand over what it answers."""
        fail = headers.get("X-Fail")
        try:
            with self._store.delivering(parked):
                await self._forward(parked, protocol, asked, headers, fail)
        except (aiohttp.ClientError, SynthesisError) as error:
            self._failures[type(error).__name__] += 1
        finally:
            self._watch(parked.key)

    async def _forward(
        self, parked: Parked, protocol: Protocol, asked: Asked, headers: Any, fail: str | None
    ) -> None:
        key, model, waiter, said = parked.key, asked.model, parked.waiter, ""
        async for piece in self._ask(parked, headers):
            if "usage" not in piece:
                if isinstance(waiter, Streamed):
                    if not said:
                        waiter.put(protocol.begin(key, model))
                    elif fail == "synthesis":
                        raise SynthesisError
                    waiter.put(protocol.piece(key, model, piece["text"]))
                said += piece["text"]
            elif isinstance(waiter, Streamed):
                waiter.finish(protocol.end(key, model, said, piece["usage"]))
            else:
                assert waiter is not None
                if fail == "synthesis":
                    raise SynthesisError
                waiter.finish(orjson.dumps(protocol.answer(key, model, said, piece["usage"])))

    async def _ask(self, parked: Parked, headers: Any) -> AsyncIterator[dict[str, Any]]:
        assert self._session is not None
        told = {name: headers[name] for name in ("X-Fail", "X-Delay") if name in headers}
        told |= {"Content-Type": "application/json", "Content-Length": str(len(parked.body))}
        async with self._session.post(
            self._model, data=pieces(parked.body), headers=told
        ) as response:
            response.raise_for_status()
            async for line in response.content:
                yield orjson.loads(line)


async def pieces(body: bytes | StrBuf) -> AsyncIterator[memoryview]:
    """Pass a body on without a copy of it, and without the loop standing still for all of it."""
    with memoryview(body) as view:
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def at_rest() -> dict[str, int]:
    """Return what the memory of this process is made of, in bytes; what is not known is left out.

    It runs in the thread that listens to the standard input.
    """
    seen = arena.memory(heap=True, objects=True)
    heap, objects, own = seen.heap, seen.objects, seen.arena
    found = {
        "resident": seen.resident,
        "files": seen.file,
        "heap used": heap.used if heap else None,
        "heap free": heap.free if heap else None,
        "objects": objects.arena_bytes if objects else None,
        "arena": own.scratch + own.persisted + own.pinned + own.cached,
        "captured": arena.object_stats().cached,
    }
    return {name: size for name, size in found.items() if size is not None}


def trimmer() -> dict[str, Any] | None:
    """Return what the Trimmer has done, if there is one."""
    running = active()
    return None if running is None else dataclasses.asdict(running.stats())


def main() -> None:
    """Serve as the command line says."""
    name, port, *more = sys.argv[1:]
    server = Server(STORES[name](), f"http://127.0.0.1:{port}/generate", *more)
    commands = {
        "figures": server.figures,
        "gap": server.forget_gap,
        "rest": at_rest,
        "collect": gc.collect,
        "trimmer": trimmer,
    }
    if "tune" in more:
        arena.tune(
            mmap_threshold="4 MiB"
        )  # what is larger goes back, and all above 8 MiB at the end
    with arena.Trimmer(every=10.0) if "trim" in more else contextlib.nullcontext():
        _loop.run(server.application(), commands)


if __name__ == "__main__":
    main()

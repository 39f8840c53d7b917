"""arena.aiohttp: bodies, and the requests of a real server on loopback."""

from __future__ import annotations

import asyncio
import gc
import gzip
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request
from serving import Answer, Client, idle, post, run, under_aiohttp, until

import arena
from arena.aiohttp import ArenaMiddleware, messages, read_body

PIECE = b"x" * 65536
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def requests() -> Iterator[arena.Requests]:
    """A registry, in which nothing may be open after the test."""
    with arena.Requests("bodies") as requests:
        yield requests
        assert list(requests) == []
        assert requests.stats().bytes == 0


async def length(request: web.Request) -> web.Response:
    return web.Response(text=f"{len(await read_body(request, request['arena'], '1 MiB'))}")


def serve(
    requests: arena.Requests,
    handler: Handler,
    test: Callable[[int], Awaitable[object]],
    limit: int | str | None = None,
    **options: Any,
) -> None:
    """Run a test against a handler; after it nothing is open, and the server still answers."""

    async def main() -> None:
        app = web.Application(middlewares=[ArenaMiddleware(requests, limit=limit)])
        app.router.add_route("*", "/", handler)
        app.router.add_post("/length", length)
        async with under_aiohttp(app, **options) as port:
            await test(port)
            await idle(requests)
            assert (await post(port, "/length", b"alive")).body == b"5"
            await idle(requests)

    run(main())


# Bodies.


@pytest.mark.parametrize("body", [b"", b"one ", PIECE * 40])
def test_the_pieces_of_a_body_become_one_string_in_the_request(
    requests: arena.Requests, body: bytes
) -> None:
    bodies: list[arena.StrBuf] = []

    async def handler(request: web.Request) -> web.Response:
        r = request["arena"]
        bodies.append(await read_body(request, r))
        assert isinstance(bodies[-1], arena.StrBuf)
        assert r.used == len(bodies[-1])
        return web.Response(body=bytes(bodies[-1]))

    async def test(port: int) -> None:
        assert (await post(port, "/", body)).body == body
        assert (await post(port, "/", iter([body, b"two ", b"three"][not body :]))).body == (
            body + b"two three"
        )

    serve(requests, handler, test)
    assert all(body.stale for body in bodies)


def test_a_body_of_just_its_limit_is_taken_and_a_byte_more_refused(
    requests: arena.Requests,
) -> None:
    seen: list[arena.BodyLimitError] = []

    async def handler(request: web.Request) -> web.Response:
        r = request["arena"]
        try:
            return web.Response(text=f"{len(await read_body(request, r, 10))}")
        except arena.BodyLimitError as error:
            assert not r.open  # nothing is kept, whatever the handler does next
            assert requests.stats().bytes == 0
            seen.append(error)
            raise

    async def test(port: int) -> None:
        for body in (b"1234567890", iter([b"12345", b"67890"])):
            assert (await post(port, "/", body)).body == b"10"
        for body in (b"12345678901", iter([b"12345", b"678901"])):
            answer = await post(port, "/", body)
            assert answer.status == 413
            assert answer.body == f"{seen[-1]}\n".encode()

    serve(requests, handler, test)
    assert [(error.limit, error.size, error.announced) for error in seen] == [
        (10, 11, True),
        (10, 11, False),
    ]


def test_client_max_size_is_about_other_bodies(requests: arena.Requests) -> None:
    async def handler(request: web.Request) -> web.Response:
        request = request.clone(client_max_size=10)
        body = await read_body(request, request["arena"])
        return web.Response(text=f"{len(body)}")

    async def test(port: int) -> None:
        assert (await post(port, "/", b"x" * 1000)).body == b"1000"

    serve(requests, handler, test)


def test_the_limit_of_the_request_holds_too(requests: arena.Requests) -> None:
    async def test(port: int) -> None:
        for body in (b"x" * 11, iter([b"x" * 11])):
            answer = await post(port, "/length", body)
            assert answer.status == 413
            assert b"10 bytes are allowed" in answer.body

    async def main() -> None:
        app = web.Application(middlewares=[ArenaMiddleware(requests, limit=10)])
        app.router.add_post("/length", length)
        async with under_aiohttp(app) as port:
            await test(port)
            await idle(requests)

    run(main())


def test_what_counts_of_a_compressed_body_is_what_it_holds(requests: arena.Requests) -> None:
    async def test(port: int) -> None:
        for size, status in ((1 << 20, 200), (100 << 20, 413)):
            packed = gzip.compress(bytes(size), 1)
            assert len(packed) < 1 << 20
            async with Client.to(port) as client:
                await client.head(
                    "/length", f"Content-Length: {len(packed)}", "Content-Encoding: gzip"
                )
                await client.send(packed)
                assert (await client.answer()).status == status

    serve(requests, length, test)


def test_a_body_that_was_read_before_is_an_error(requests: arena.Requests) -> None:
    async def handler(request: web.Request) -> web.Response:
        await request.read()
        with pytest.raises(RuntimeError, match="the body was read before"):
            await read_body(request, request["arena"])
        return web.Response(text="told")

    async def test(port: int) -> None:
        assert (await post(port, "/", b"body")).body == b"told"

    serve(requests, handler, test)


def test_a_body_of_which_a_part_was_read_is_an_error_and_not_cut_short(
    requests: arena.Requests,
) -> None:
    async def handler(request: web.Request) -> web.Response:
        await request.content.read(3)
        with pytest.raises(RuntimeError, match="or a part of it"):
            await read_body(request, request["arena"])
        return web.Response(text="told")

    async def test(port: int) -> None:
        for body in (b"short", PIECE * 20):
            assert (await post(port, "/", body)).body == b"told"

    serve(requests, handler, test)


def test_what_finds_no_room_in_the_registry_is_a_503() -> None:
    async def test(port: int) -> None:
        for body in (bytes(900_000), iter([PIECE] * 13)):
            answer = await post(port, "/length", body)
            assert answer.status == 503
            assert b"the open requests of 'small' would pass their limit" in answer.body
        assert (await post(port, "/length", bytes(1 << 19))).status == 200

    async def main(small: arena.Requests) -> None:
        app = web.Application(middlewares=[ArenaMiddleware(small)])
        app.router.add_post("/length", length)
        async with under_aiohttp(app) as port:
            await test(port)
            await idle(small)

    with arena.Requests("small", limit="512 KiB") as small:
        run(main(small))


def test_when_the_client_goes_the_request_ends_and_whoever_waits_is_woken(
    requests: arena.Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena.aiohttp, "LOOK", 0.001)
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        answer = asyncio.get_running_loop().create_future()
        request["arena"].on_discard(answer.set_result, "nobody is there")
        await read_body(request, request["arena"])
        seen.append(await answer)
        return web.Response()

    async def test(port: int) -> None:
        async with Client.to(port) as client:
            await client.head("/", "Content-Length: 4")
            await client.send(b"body")
            await until(lambda: requests.stats().bytes == 4)
        await until(lambda: seen)

    serve(requests, handler, test)
    assert seen == ["nobody is there"]


def test_an_upload_that_breaks_off_is_no_error_in_the_log(
    requests: arena.Requests, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(port: int) -> None:
        async with Client.to(port) as client:
            await client.head("/", "Content-Length: 1000000")
            await client.send(PIECE)
            await until(lambda: requests.stats().bytes >= len(PIECE))
        await idle(requests)

    serve(requests, length, test)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_the_frames_of_a_handlers_own_connection_error_are_left_for_whoever_looks(
    requests: arena.Requests,
) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        in_the_frame = "the database"
        raise ConnectionRefusedError(in_the_frame)

    @web.middleware
    async def outer(request: web.Request, handler: Any) -> Any:
        try:
            return await handler(request)
        except ConnectionRefusedError as error:
            frame = [f for f, _ in traceback.walk_tb(error.__traceback__)][-1]
            seen.append(frame.f_locals.get("in_the_frame"))
            return web.Response(status=502)

    async def main() -> None:
        app = web.Application(middlewares=[outer, ArenaMiddleware(requests)])
        app.router.add_post("/", handler)
        async with under_aiohttp(app) as port:
            assert (await post(port, "/", b"")).status == 502
            await idle(requests)

    run(main())
    assert seen == ["the database"]


@pytest.mark.parametrize("how", ["whole", "slices"])
def test_a_download_that_breaks_off_does_not_pin_the_body_until_a_collection(
    requests: arena.Requests, how: str
) -> None:
    gc.collect()
    gc.disable()
    try:

        async def handler(request: web.Request) -> web.StreamResponse:
            body = await read_body(request, request["arena"])
            response = web.StreamResponse()
            await response.prepare(request)
            view = memoryview(body)
            for start in range(0, len(view), len(view) if how == "whole" else len(PIECE)):
                await response.write(view[start:])
            return response

        async def test(port: int) -> None:
            async with Client.to(port) as client:
                body = PIECE * 64
                await client.head("/", f"Content-Length: {len(body)}")
                await client.send(body)
                await client.reader.readuntil(b"\r\n\r\n")
            await idle(requests)  # of what is pinned, too

        serve(requests, handler, test)
    finally:
        gc.enable()


def test_a_client_that_goes_away_is_a_connection_error(requests: arena.Requests) -> None:
    gone: list[ConnectionError] = []

    async def handler(request: web.Request) -> web.Response:
        try:
            await read_body(request, request["arena"])
        except ConnectionError as error:
            gone.append(error)
        return web.Response()

    async def test(port: int) -> None:
        for headers in (["Transfer-Encoding: chunked"], ["Content-Length: 1000000"]):
            gone.clear()
            async with Client.to(port) as client:
                await client.head("/", *headers)
                await client.chunk(PIECE)
                await until(lambda: requests.stats().bytes >= len(PIECE))
            await until(lambda: gone)
            assert isinstance(gone[0], arena.DisconnectError)
            assert "the client went away after 655" in str(gone[0])

    serve(requests, handler, test)


@pytest.mark.parametrize(
    ("what", "into", "limit", "error", "text"),
    [
        ("text", "open", 1, TypeError, "request is one of aiohttp.web, not str"),
        ("request", "tick", 1, TypeError, "a body is read into an arena.Request, not Tick"),
        ("request", "open", "much", ValueError, "limit"),
        ("request", "open", -1, ValueError, "limit"),
        ("request", "ended", 1, arena.TickError, "has ended"),
    ],
)
def test_wrong_arguments_of_read_body_are_told(
    requests: arena.Requests,
    what: str,
    into: str,
    limit: Any,
    error: type[Exception],
    text: str,
) -> None:
    async def main() -> None:
        request: Any = "text"
        if what == "request":
            request = make_mocked_request("POST", "/", payload=EMPTY_PAYLOAD)
        with requests.delivering(requests.open("open").key) as opened:
            ended = requests.open("ended")
            ended.discard()
            r: Any = {"open": opened, "ended": ended, "tick": opened.tick}[into]
            with pytest.raises(error, match=text):
                await read_body(request, r, limit)

    run(main())


# When the request ends.


def test_it_is_used_as_the_readme_says_and_keys_tell_which_request_it_is() -> None:
    keys: list[str] = []
    own = arena.aiohttp.requests

    async def handler(request: web.Request) -> web.Response:
        keys.append(request["arena"].key)
        assert list(own) == [keys[-1]]
        return web.Response(text=f"{len(await read_body(request, request['arena']))}")

    async def main() -> None:
        app = web.Application(middlewares=[arena.aiohttp.middleware])
        app.router.add_post("/", handler)
        async with under_aiohttp(app) as port, Client.to(port) as client:
            for _ in range(2):  # on one connection
                await client.head("/", "Content-Length: 4")
                await client.send(b"body")
                assert (await client.answer()).body == b"4"
                await idle(own)

    run(main())
    assert own is arena.aiohttp.middleware.requests
    assert own.name == "aiohttp"
    assert all(key.endswith(" POST /") for key in keys)
    assert len(set(keys)) == 2


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_request_is_open_until_the_last_byte_has_been_sent(requests: arena.Requests) -> None:
    body = bytes(range(256)) * (32 << 10)  # 8 MiB: more than the sockets' buffers take

    async def handler(request: web.Request) -> web.Response:
        whole = await read_body(request, request["arena"])
        return web.Response(body=memoryview(whole))

    async def test(port: int) -> None:
        async with Client.to(port) as slow:
            await slow.head("/", f"Content-Length: {len(body)}")
            await slow.send(body)
            read = await slow.reader.readexactly(4096)
            for _ in range(100):
                await asyncio.sleep(0)
            assert requests.stats().bytes == len(body)  # it waits for the reader
            read += await slow.reader.readexactly(len(body) - 4096)
            await until(lambda: not len(requests))
            assert body[:100_000] in read

    serve(requests, handler, test)


def test_a_stream_has_its_request_to_the_end_and_a_client_that_goes_ends_it(
    requests: arena.Requests,
) -> None:
    started = asyncio.Event()
    goes_on = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        r = request["arena"]
        body = await read_body(request, r)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(memoryview(body))
        started.set()
        await goes_on.wait()
        while len(body) == 7:
            await response.write(PIECE)
        assert r.open
        await response.write(bytes(body))
        return response

    async def test(port: int) -> None:
        async with Client.to(port) as client:
            await client.head("/", "Content-Length: 4")
            await client.send(b"body")
            await started.wait()
            assert requests.stats().bytes == 4
            goes_on.set()
            assert (await client.answer()).body == b"bodybody"
            await idle(requests)
        async with Client.to(port) as client:
            await client.head("/", "Content-Length: 7")
            await client.send(b"endless")
            await client.reader.readexactly(100_000)
            assert requests.stats().bytes == 7
        await idle(requests)

    serve(requests, handler, test)


@pytest.mark.parametrize("how", ["before", "http", "in the middle"])
def test_an_error_of_the_handler_ends_the_request(requests: arena.Requests, how: str) -> None:
    told: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        body = await read_body(request, request["arena"])
        request["arena"].on_discard(told.append, how)
        if how == "http":
            raise web.HTTPConflict(text=str(body))
        if how == "in the middle":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"part")
        raise KeyError("of the handler")

    async def test(port: int) -> None:
        answer = await post(port, "/", iter([b"body"]))
        expected = {"http": (409, b"body"), "in the middle": (200, b"part")}
        if how in expected:
            assert (answer.status, answer.body) == expected[how]
        else:
            assert answer.status == 500
        await idle(requests)
        assert told == [how]

    serve(requests, handler, test)


def test_a_handler_that_is_cancelled_when_its_client_goes_wakes_who_waits(
    requests: arena.Requests,
) -> None:
    unblocked = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        request["arena"].on_discard(unblocked.set)
        await read_body(request, request["arena"])
        await asyncio.Event().wait()
        return web.Response()

    async def test(port: int) -> None:
        async with Client.to(port) as client:
            await client.head("/", "Content-Length: 4")
            await client.send(b"body")
            await until(lambda: requests.stats().bytes == 4)
        await unblocked.wait()

    serve(requests, handler, test, handler_cancellation=True)


def test_a_callback_that_fails_is_told_to_the_exception_handler_of_the_loop(
    requests: arena.Requests,
) -> None:
    told: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        request["arena"].on_discard(lambda: 1 / 0)
        return web.Response(text="fine")

    async def test(port: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        assert (await post(port, "/")).body == b"fine"
        await until(lambda: told)

    serve(requests, handler, test)
    (failure,) = told
    assert isinstance(failure["exception"], ExceptionGroup)
    assert isinstance(failure["exception"].exceptions[0], ZeroDivisionError)


def test_a_body_that_is_refused_when_the_response_has_begun_cuts_it_off(
    requests: arena.Requests,
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"part")
        await read_body(request, request["arena"], 1)
        return response

    async def test(port: int) -> None:
        answer = await post(port, "/", iter([b"body"]))
        assert (answer.status, answer.body) == (200, b"part")

    serve(requests, handler, test)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"requests": "bodies"}, TypeError, "requests is an arena.Requests, not str"),
        ({"limit": "much"}, ValueError, "limit"),
        ({"limit": 1.5}, TypeError, "limit"),
    ],
)
def test_wrong_arguments_of_the_middleware_are_told(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ArenaMiddleware(**arguments)


def test_without_aiohttp_its_import_is_one_line_that_says_what_to_install() -> None:
    code = "import sys; sys.modules['aiohttp'] = None; import arena; arena.aiohttp"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line == ("ImportError: arena.aiohttp needs aiohttp: pip install 'tick-arena[aiohttp]'")
    assert "During handling" not in done.stderr


# Many clients.


def test_200_clients_at_once_have_a_body_of_their_own_each(requests: arena.Requests) -> None:
    gate = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await read_body(request, request["arena"])
        await gate.wait()
        if len(body) % 5 == 3:
            raise KeyError("of the handler")
        if len(body) % 5 == 4:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(memoryview(body))
            return response
        return web.Response(body=memoryview(body))

    async def test(port: int) -> None:
        async def one(index: int) -> None:
            body = b"y" * (10_000 + index)
            answer = await post(port, "/", iter([body] * 6) if index % 2 else body * 6)
            if len(body * 6) % 5 == 3:
                assert answer.status == 500
            else:
                assert (answer.status, answer.body) == (200, body * 6)

        clients = [asyncio.create_task(one(index)) for index in range(200)]
        whole = sum(6 * (10_000 + index) for index in range(200))
        await until(lambda: requests.stats().bytes == whole)
        assert len(requests) == 200
        gate.set()
        await asyncio.gather(*clients)

    serve(requests, handler, test)


@pytest.mark.parametrize("chunked", [True, False])
def test_clients_get_to_the_413_while_they_still_send(
    requests: arena.Requests, chunked: bool
) -> None:
    async def test(port: int) -> None:
        async def one() -> Answer:
            return await post(port, "/length", iter([PIECE] * 200) if chunked else PIECE * 200)

        for answer in await asyncio.gather(*(one() for _ in range(5))):
            assert answer.status == 413
            assert (b"Content-Length says" in answer.body) is not chunked

    serve(requests, length, test)


# WebSockets.


def test_each_message_has_a_request_until_the_next_is_asked_for(requests: arena.Requests) -> None:
    seen: list[arena.Request] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        r = request["arena"]
        async for message, m in messages(ws, r):
            assert [one.open for one in seen] == [False] * len(seen)
            seen.append(m)
            assert (m.group, m.key) == (r.key, f"{r.key}, message {len(seen)}")
            assert len(requests) == 2
            await ws.send_str(f"{m.strdup(message.data)} {m.used}")
        assert len(requests) == 1
        return ws

    async def test(port: int) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.ws_connect(f"http://127.0.0.1:{port}/") as ws:
                for count in range(1, 4):
                    await ws.send_str("y" * count)
                    assert await ws.receive_str() == f"{'y' * count} {count}"
            await idle(requests)
            assert requests.stats().opened == 4
            seen.clear()
            ws = await session.ws_connect(f"http://127.0.0.1:{port}/")
            await ws.send_str("y")
            await ws.receive_str()
            assert ws._response.connection is not None
            ws._response.connection.transport.abort()
            await idle(requests)
            await ws.close()

    serve(requests, handler, test)


@pytest.mark.parametrize("how", ["break", "error", "limit"])
def test_a_message_ends_with_its_connection_at_the_latest(
    requests: arena.Requests, how: str
) -> None:
    told: list[bool] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        r = request["arena"]
        async for _, m in messages(ws, r, limit=10):
            m.on_discard(lambda: told.append(r.key in requests))
            if how == "error":
                raise KeyError("of the handler")
            if how == "limit":
                m.alloc(11)
            break
        assert m.open
        return ws

    async def test(port: int) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://127.0.0.1:{port}/") as ws,
        ):
            await ws.send_str("message")
            await ws.receive()
        await idle(requests)
        assert told == [True]

    serve(requests, handler, test)


@pytest.mark.parametrize(
    ("ws", "r", "limit", "error", "text"),
    [
        (None, None, None, TypeError, "ws is a web.WebSocketResponse, not NoneType"),
        (web.WebSocketResponse, None, None, TypeError, "r is an arena.Request, not NoneType"),
        (web.WebSocketResponse, "r", "much", ValueError, "limit"),
    ],
)
def test_wrong_arguments_of_messages_are_told(
    requests: arena.Requests, ws: Any, r: Any, limit: Any, error: type[Exception], text: str
) -> None:
    with requests.delivering(requests.open("open").key) as opened, pytest.raises(error, match=text):
        messages(ws and ws(), r and opened, limit=limit)

"""arena.asgi: bodies, and the requests of a server, alone, under Starlette, FastAPI and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import fastapi
import pytest
import websockets
from serving import Answer, Client, idle, post, run, under_uvicorn, until
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

import arena
from arena import asgi
from arena._web import Body
from arena.asgi import ArenaMiddleware, read_body

PIECE = b"x" * 65536
Messages = list[dict[str, Any]]


@pytest.fixture
def requests() -> Iterator[arena.Requests]:
    """A registry, in which nothing may be open after the test."""
    with arena.Requests("bodies") as requests:
        yield requests
        assert list(requests) == []
        assert requests.stats().bytes == 0
        assert asgi._exchanges == {}


def pieces_of(*pieces: bytes, disconnect: bool = False) -> Messages:
    messages: Messages = [
        {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
    ]
    if disconnect:
        return [*messages, {"type": "http.disconnect"}]
    messages[-1]["more_body"] = False
    return messages


class Server:
    """ASGI messages by hand: those to receive, and what was sent."""

    def __init__(self, messages: Messages, **scope: Any) -> None:
        self.messages = list(messages)
        self.sent: Messages = []
        self.on_send: Callable[[], object] = lambda: None
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/body",
            "http_version": "1.1",
            "headers": [],
            **scope,
        }

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: dict[str, Any]) -> None:
        self.on_send()
        self.sent.append(message)

    def run(self, app: Any) -> None:
        run(app(self.scope, self.receive, self.send))


OK = {"type": "http.response.start", "status": 200, "headers": []}


def last(body: bytes = b"") -> dict[str, Any]:
    return {"type": "http.response.body", "body": body}


def read(r: arena.Request, messages: Messages, limit: int | str | None = "32 MiB") -> Any:
    return run(read_body(Server(messages).receive, r, limit))


# Bodies.


def test_the_pieces_of_a_body_become_one_string_in_the_request(requests: arena.Requests) -> None:
    with requests.delivering(requests.open("a").key) as r:
        messages = pieces_of(b"one ", b"", memoryview(b"two "), bytearray(b"three"))
        del messages[1]["body"]  # as ASGI allows
        body = read(r, messages)
        assert isinstance(body, arena.StrBuf)
        assert bytes(body) == b"one two three"
        assert r.used == 13
    assert body.stale


def test_a_body_of_nothing_is_an_empty_string(requests: arena.Requests) -> None:
    with requests.delivering(requests.open("a").key) as r:
        assert len(read(r, [{"type": "http.request"}])) == 0


def test_a_body_of_just_its_limit_is_taken_and_a_byte_more_refused(
    requests: arena.Requests,
) -> None:
    r = requests.open("a")
    assert len(read(r, pieces_of(b"12345", b"67890"), 10)) == 10
    told: list[int] = []
    r.on_discard(lambda: told.append(r.used))
    with pytest.raises(arena.BodyLimitError) as refused:
        read(r, pieces_of(b"12345", b"67890", b"1", PIECE), 10)
    assert (refused.value.limit, refused.value.size, refused.value.announced) == (10, 11, False)
    assert str(refused.value) == "the body is over its limit: 10 bytes are allowed, 11 have come"
    assert isinstance(refused.value, MemoryError)
    assert not r.open  # nothing of the body is kept, although the caller still holds everything
    assert told == [20]  # what had come, and the body before it


def test_what_is_told_of_a_refused_body_survives_a_pickle() -> None:
    error = arena.BodyLimitError(10, 20, announced=True)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error).endswith("10 bytes are allowed, Content-Length says 20")


def test_a_callback_that_fails_at_a_refusal_is_a_note_of_it_and_logged(
    requests: arena.Requests, caplog: pytest.LogCaptureFixture
) -> None:
    r = requests.open("a")
    r.on_discard(lambda: 1 / 0)
    with pytest.raises(arena.BodyLimitError) as refused:
        read(r, pieces_of(b"12345"), 4)
    assert "ZeroDivisionError" in refused.value.__notes__[0]
    (record,) = caplog.records  # a middleware makes a 413 of the error
    assert "ZeroDivisionError" in record.getMessage()


def test_the_limit_of_the_request_holds_with_what_it_has_already(requests: arena.Requests) -> None:
    r = requests.open("a", limit=100)
    r.alloc(40)
    with pytest.raises(arena.BodyLimitError, match="60 bytes are allowed, 61 have come"):
        read(r, pieces_of(b"x" * 61))
    r = requests.open("b", limit=100)
    with pytest.raises(arena.BodyLimitError, match="100 bytes are allowed"):
        read(r, pieces_of(b"x" * 101), None)


def test_no_limit_is_the_limit_of_the_registry(requests: arena.Requests) -> None:
    with arena.Requests("small", limit=200) as small:
        r = small.open("a")
        with pytest.raises(arena.LimitError, match="the open requests of 'small'") as refused:
            read(r, pieces_of(b"x" * 150, b"x" * 51), None)
        assert not isinstance(refused.value, arena.BodyLimitError)
        assert not r.open  # nothing of it is kept
    with requests.delivering(requests.open("a").key) as r:
        assert len(read(r, pieces_of(*[PIECE] * 600), None)) == 600 * len(PIECE)


def test_a_client_that_goes_away_is_a_connection_error(requests: arena.Requests) -> None:
    with requests.delivering(requests.open("a").key) as r:
        with pytest.raises(arena.DisconnectError, match="after 3 bytes of the body of a") as gone:
            read(r, pieces_of(b"abc", disconnect=True))
        assert isinstance(gone.value, ConnectionError)
        assert isinstance(gone.value, arena.ArenaError)


def test_a_body_that_its_request_does_not_live_to_see_is_stale(requests: arena.Requests) -> None:
    r = requests.open("late")

    async def receive() -> dict[str, Any]:
        r.discard()
        return {"type": "http.request", "body": b"abc"}

    with pytest.raises(arena.StaleError, match="late"):
        run(read_body(receive, r))


@pytest.mark.parametrize(
    ("r", "limit", "error", "text"),
    [
        ("tick", 1, TypeError, "a body is read into an arena.Request, not Tick"),
        ("none", 1, TypeError, "not NoneType"),
        ("open", "much", ValueError, "limit"),
        ("open", -1, ValueError, "limit"),
        ("open", 1.5, TypeError, "limit"),
        ("ended", None, arena.TickError, "has ended"),
    ],
)
def test_wrong_arguments_of_read_body_are_told(
    requests: arena.Requests, r: str, limit: Any, error: type[Exception], text: str
) -> None:
    with requests.delivering(requests.open("open").key) as opened:
        ended = requests.open("ended")
        ended.discard()
        into: Any = {"tick": opened.tick, "none": None, "open": opened, "ended": ended}[r]
        with pytest.raises(error, match=text):
            read(into, pieces_of(b"x"), limit)


# The middleware, by hand.


def test_a_request_is_open_until_the_last_byte_has_been_sent(requests: arena.Requests) -> None:
    states: list[bool] = []
    server = Server(pieces_of(b"body"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        r = scope["arena"]
        server.on_send = lambda: states.append(r.open)
        body = await read_body(receive, r)
        await send(OK)
        await send({"type": "http.response.body", "body": bytes(body), "more_body": True})
        await send({"type": "http.response.body", "body": b"!", "more_body": True})
        assert r.open
        await send(last())
        assert not r.open
        assert body.stale

    server.run(ArenaMiddleware(app, requests))
    assert states == [True] * 4
    assert [message.get("body") for message in server.sent] == [None, b"body", b"!", b""]
    assert "arena" not in server.scope  # the server's own stays as it was


def test_trailers_are_sent_while_the_request_is_open(requests: arena.Requests) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**OK, "trailers": True})
        await send(last())
        assert scope["arena"].open
        await send({"type": "http.response.trailers", "headers": []})

    Server([]).run(ArenaMiddleware(app, requests))
    assert requests.stats().discarded == 1


def test_keys_tell_which_request_it_is_and_none_is_used_twice(requests: arena.Requests) -> None:
    keys = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        keys.append(scope["arena"].key)
        assert list(requests) == keys[-1:]

    middleware = ArenaMiddleware(app, requests)
    for _ in range(2):
        Server([]).run(middleware)
    assert all(key.endswith(" POST /body") for key in keys)
    assert len(set(keys)) == 2


@pytest.mark.parametrize("started", [False, True])
def test_an_error_of_the_app_ends_the_request_and_passes(
    requests: arena.Requests, started: bool
) -> None:
    told = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["arena"].on_discard(told.append, "unblocked")
        scope["arena"].on_discard(lambda: 1 / 0)
        if started:
            await send(OK)
        raise KeyError("of the app")

    with pytest.raises(KeyError, match="of the app") as raised:
        Server([]).run(ArenaMiddleware(app, requests))
    assert told == ["unblocked"]
    assert "ZeroDivisionError" in raised.value.__notes__[0]


def test_a_cancelled_request_ends(requests: arena.Requests) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["arena"].strbuf(PIECE * 4)
        await asyncio.Event().wait()

    async def main() -> None:
        server = Server([])
        task = asyncio.create_task(
            ArenaMiddleware(app, requests)(server.scope, server.receive, server.send)
        )
        await until(lambda: len(requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(requests)

    run(main())


def test_a_callback_that_fails_after_the_last_byte_is_raised_by_the_send_of_it(
    requests: arena.Requests,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["arena"].on_discard(lambda: 1 / 0)
        await send(OK)
        await send(last(b"all of it"))

    server = Server([])
    with pytest.raises(ExceptionGroup) as raised:
        server.run(ArenaMiddleware(app, requests))
    assert isinstance(raised.value.exceptions[0], ZeroDivisionError)
    assert server.sent[-1]["body"] == b"all of it"


def test_other_scopes_pass_through_as_they_are(requests: arena.Requests) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    for kind in ("lifespan", "something new"):
        server = Server([])
        scope = {"type": kind}
        receive, send = server.receive, server.send
        run(ArenaMiddleware(app, requests)(scope, receive, send))
        assert seen[-1] == (scope, receive, send)
        assert seen[-1][0] is scope
    assert requests.stats().opened == 0


def reading(limit: int | str | None = 10) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive, scope["arena"], limit)
        await send(OK)
        await send(last(b"%d" % len(body)))

    return app


def announce(size: int | bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-length", b"%d" % size if isinstance(size, int) else size)]


def test_a_body_over_its_limit_is_a_413_and_what_still_comes_is_dropped(
    requests: arena.Requests,
) -> None:
    server = Server(pieces_of(b"12345", b"67890", b"1", b"23", b"4"))
    server.run(ArenaMiddleware(reading(), requests))
    start, body, end = server.sent
    assert start["status"] == 413
    assert (b"connection", b"close") in start["headers"]
    assert (b"content-length", b"%d" % len(body["body"])) in start["headers"]
    assert body["body"] == b"the body is over its limit: 10 bytes are allowed, 11 have come\n"
    # The client has its answer; the server must not close while it still sends.
    assert body["more_body"]
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}
    assert server.messages == []


def test_a_limit_of_each_request_is_a_413_too(requests: arena.Requests) -> None:
    server = Server(pieces_of(b"12345", b"67890", b"1"))
    server.run(ArenaMiddleware(reading("1 MiB"), requests, limit=10))
    assert server.sent[0]["status"] == 413


def test_a_refused_body_that_is_all_there_leaves_the_connection_open(
    requests: arena.Requests,
) -> None:
    server = Server(pieces_of(b"12345", b"678901"))
    server.run(ArenaMiddleware(reading(), requests))
    start, body = server.sent
    assert start["status"] == 413
    assert not any(name == b"connection" for name, _ in start["headers"])
    assert not body["more_body"]


def test_a_content_length_over_the_limit_is_refused_before_anything_is_read(
    requests: arena.Requests,
) -> None:
    server = Server(pieces_of(b"12345", b"678901"), headers=announce(11))
    middleware = ArenaMiddleware(reading(), requests)
    receive, at = server.receive, []

    async def watched() -> dict[str, Any]:
        at.append(len(server.sent))
        return await receive()

    run(middleware(server.scope, watched, server.send))
    assert server.sent[0]["status"] == 413
    assert server.sent[1]["body"].endswith(b"10 bytes are allowed, Content-Length says 11\n")
    assert at == [2, 2]  # both pieces, to be dropped, when the answer was out
    assert not server.messages


@pytest.mark.parametrize("length", [10, b"ten", b"9" * 5000])
def test_a_content_length_that_says_nothing_useful_is_no_reason_to_refuse(
    requests: arena.Requests, length: Any
) -> None:
    server = Server(pieces_of(b"12345", b"67890"), headers=announce(length))
    server.run(ArenaMiddleware(reading(), requests))
    assert server.sent[0]["status"] == 200
    assert server.sent[1]["body"] == b"10"


def test_a_client_that_waits_to_be_told_to_continue_is_not_waited_for(
    requests: arena.Requests,
) -> None:
    headers = [*announce(11), (b"expect", b"100-Continue")]
    server = Server([], headers=headers)  # it never sends
    server.run(ArenaMiddleware(reading(), requests))
    assert server.sent[0]["status"] == 413
    assert not server.sent[-1]["more_body"]


def test_a_client_that_neither_sends_nor_goes_is_not_waited_for_long(
    requests: arena.Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "LINGER", 0.01)
    server = Server([*pieces_of(b"12345", b"678901", b"")[:-1]])
    server.run(ArenaMiddleware(reading(), requests))
    assert [message.get("more_body") for message in server.sent] == [None, True, False]


def test_http_2_has_no_connection_header(requests: arena.Requests) -> None:
    server = Server(pieces_of(b"12345678901", b""), http_version="2")
    server.run(ArenaMiddleware(reading(), requests))
    assert server.sent[0]["status"] == 413
    assert not any(name == b"connection" for name, _ in server.sent[0]["headers"])


def test_a_body_that_is_refused_when_the_response_has_begun_is_an_error(
    requests: arena.Requests,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(OK)
        await read_body(receive, scope["arena"], 1)

    server = Server(pieces_of(b"12"))
    with pytest.raises(arena.BodyLimitError):
        server.run(ArenaMiddleware(app, requests))
    assert server.sent == [OK]


def test_a_body_that_was_read_before_is_an_error_and_no_wait_for_ever(
    requests: arena.Requests,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        with pytest.raises(RuntimeError, match="the body was read before"):
            await read_body(receive, scope["arena"])
        receiving = asyncio.create_task(receive())  # to wait for the disconnect is as ever
        await asyncio.sleep(0)
        assert not receiving.done()
        receiving.cancel()

    Server(pieces_of(b"all")).run(ArenaMiddleware(app, requests))


def test_a_body_of_which_a_part_was_read_is_an_error_and_not_cut_short(
    requests: arena.Requests,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        with pytest.raises(RuntimeError, match="or a part of it"):
            await read_body(receive, scope["arena"])

    Server(pieces_of(b"first", b"second")).run(ArenaMiddleware(app, requests))


def test_two_readers_of_one_body_do_not_share_it(requests: arena.Requests) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        first = asyncio.create_task(read_body(receive, scope["arena"]))
        await asyncio.sleep(0)
        if not first.done():
            with pytest.raises(RuntimeError, match="is being read by another call"):
                await read_body(receive, scope["arena"])
        assert await first == b"all of it"

    class Slow(Server):
        async def receive(self) -> Any:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return await super().receive()

    Slow(pieces_of(b"all of ", b"it")).run(ArenaMiddleware(app, requests))


@pytest.mark.parametrize("when", ["waiting", "uploading"])
def test_when_the_client_goes_the_request_ends_and_whoever_waits_is_woken(
    requests: arena.Requests, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answer = asyncio.get_running_loop().create_future()
        scope["arena"].on_discard(answer.set_result, "nobody is there")
        seen.append("reads")
        await read_body(receive, scope["arena"])
        seen.append(await answer)

    async def main() -> None:
        async with under_uvicorn(ArenaMiddleware(app, requests)) as port:
            async with Client.to(port) as client:
                await client.head("/", "Content-Length: 4")
                await client.send(b"body" if when == "waiting" else b"bo")
                await until(lambda: requests.stats().bytes == (4 if when == "waiting" else 2))
            await idle(requests)

    run(main())
    assert seen == ["reads", "nobody is there"][: 2 if when == "waiting" else 1]
    assert "Exception in ASGI application" not in caplog.text


def test_what_finds_no_room_in_the_registry_is_a_503(requests: arena.Requests) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive, scope["arena"])
        await send(OK)
        await send({"type": "http.response.body", "body": b"%d" % len(body)})

    async def main() -> None:
        with arena.Requests("small", limit="1 MiB") as small:
            async with under_uvicorn(ArenaMiddleware(app, small)) as port:
                for body in (bytes(20 << 20), iter([PIECE] * 40)):
                    answer = await post(port, "/", body)
                    assert answer.status == 503
                    assert b"the open requests of 'small' would pass their limit" in answer.body
                assert (await post(port, "/", bytes(1 << 20))).status == 200
                await idle(small)

    run(main())


@pytest.mark.as_ever
def test_a_client_that_only_announces_a_body_makes_nothing_resident() -> None:
    with arena.Requests("announced") as announced:
        base = arena.memory().resident
        for key in range(100):
            body = Body(announced.open(key), "64 MiB", 33_000_000)
            body.append(b"x")
        assert arena.memory().resident - base < 8 << 20
        for _ in range(32):
            body.append(bytes(1_000_000))
        assert len(body.buf) == 32_000_001
        maps = arena.stats().maps
        chunks = arena.stats().chunks
        body = Body(announced.open("more"), None, 3 << 30)  # a word that is not wholly believed
        for _ in range(40):
            body.append(PIECE)
        assert arena.stats().maps - maps < 8
        assert arena.stats().chunks - chunks < 2 << 30
        assert body.buf[len(body.buf) - 1] == PIECE[-1]
        body = Body(announced.open("less"), None, 1)  # as of what is compressed
        for _ in range(40):
            body.append(PIECE)
        assert len(body.buf) == 40 * len(PIECE)


def test_with_no_address_space_for_all_that_is_announced_a_body_is_taken_all_the_same() -> None:
    code = (
        "import arena, resource; from arena._web import Body\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "size = pages * resource.getpagesize() + (128 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "body = Body(arena.Requests('bodies').open('k'), None, 1 << 40)\n"
        "for _ in range(40): body.append(bytes(65536))\n"
        "print(len(body.buf))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{40 << 16}\n", "")


def test_who_has_sent_some_of_a_body_gets_room_for_all_of_it_at_once(
    requests: arena.Requests,
) -> None:
    with requests.delivering(requests.open("k").key) as r:
        body = Body(r, None, 33_000_000)
        body.append(bytes(1 << 20))
        small = arena.stats().chunks
        body.append(b"x")
        assert arena.stats().chunks - small > 30_000_000
        large = arena.stats().chunks
        for _ in range(31):
            body.append(bytes(1_000_000))
        assert arena.stats().chunks == large


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"app": None}, TypeError, "app is an ASGI application, not NoneType"),
        ({"requests": "bodies"}, TypeError, "requests is an arena.Requests, not str"),
        ({"limit": "much"}, ValueError, "limit"),
        ({"limit": 1.5}, TypeError, "limit"),
    ],
)
def test_wrong_arguments_of_the_middleware_are_told(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ArenaMiddleware(**{"app": reading(), **arguments})


def test_the_registry_is_the_module_s_own_unless_one_is_given() -> None:
    assert ArenaMiddleware(reading()).requests is arena.asgi.requests
    assert arena.asgi.requests.name == "asgi"
    server = Server(pieces_of(b"1"))
    opened = arena.asgi.requests.stats().opened
    server.run(ArenaMiddleware(reading()))
    assert arena.asgi.requests.stats().opened == opened + 1
    assert not len(arena.asgi.requests)


def test_it_is_there_after_import_arena_and_imports_no_framework() -> None:
    code = (
        "import sys, arena; assert 'asyncio' not in sys.modules; arena.asgi.ArenaMiddleware;"
        "arena.requests.registries;"
        "print(sorted({'starlette', 'fastapi', 'uvicorn', 'aiohttp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# WebSockets, by hand.


def test_a_message_ends_when_the_next_is_asked_for_and_not_when_it_comes(
    requests: arena.Requests,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        first = scope["arena"].message
        waiting = asyncio.create_task(receive())  # nothing comes
        await asyncio.sleep(0)
        assert not waiting.done()
        assert not first.open
        assert requests.stats().bytes == 0
        waiting.cancel()

    messages = [{"type": "websocket.receive", "text": "one"}]
    Server(messages, type="websocket", path="/ws").run(ArenaMiddleware(app, requests))


def test_each_message_has_a_request_until_the_next_is_asked_for(requests: arena.Requests) -> None:
    seen: list[arena.Request] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        copied = dict(scope)["arena"]  # as frameworks do
        assert (await receive())["type"] == "websocket.connect"
        with pytest.raises(arena.TickError, match="no message"):
            _ = copied.message
        for text in ("one", "two"):
            assert (await receive())["text"] == text
            seen.append(copied.message)
            copied.message.strdup(text)
            assert [r.open for r in seen] == [False] * (len(seen) - 1) + [True]
            assert list(requests) == [copied.message.key]
        assert (await receive())["type"] == "websocket.disconnect"
        assert not len(requests)
        with pytest.raises(arena.TickError):
            _ = copied.message

    messages = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": "one"},
        {"type": "websocket.receive", "text": "two"},
        {"type": "websocket.disconnect", "code": 1000},
    ]
    Server(messages, type="websocket", path="/ws").run(ArenaMiddleware(app, requests))
    assert [str(r.key).partition(" ")[2] for r in seen] == [
        "WebSocket /ws, message 1",
        "WebSocket /ws, message 2",
    ]
    assert len({r.group for r in seen}) == 1
    assert requests.stats().opened == 2


def test_an_app_that_fails_in_a_message_ends_its_request(requests: arena.Requests) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        scope["arena"].message.on_discard(lambda: 1 / 0)
        raise KeyError("of the app")

    messages = [{"type": "websocket.receive", "text": "one"}]
    with pytest.raises(KeyError, match="of the app") as raised:
        Server(messages, type="websocket").run(ArenaMiddleware(app, requests))
    assert "ZeroDivisionError" in raised.value.__notes__[0]


def test_a_message_has_the_limit_of_a_request(requests: arena.Requests) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        with pytest.raises(arena.LimitError):
            scope["arena"].message.strdup("12345678901")

    messages = [{"type": "websocket.receive", "text": "one"}]
    Server(messages, type="websocket").run(ArenaMiddleware(app, requests, limit=10))


# Starlette and FastAPI.


async def length(request: Request) -> Response:
    body = await read_body(request.receive, request.scope["arena"], "1 MiB")
    return PlainTextResponse(f"{len(body)}")


async def echo(request: Request) -> Response:
    body = await read_body(request.receive, request.scope["arena"])
    return Response(memoryview(body))


class Passing(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        return response


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_mounts_and_base_http_middleware_find_the_request(
    requests: arena.Requests, order: str
) -> None:
    routes: list[Any] = [Route("/length", length, methods=["POST"])]
    routes += [Route("/echo", echo, methods=["POST"])]
    ours = [Middleware(ArenaMiddleware, requests=requests), Middleware(Passing)]
    app = Starlette(
        routes=[Mount("/v1", Starlette(routes=routes))],
        middleware=ours if order == "outside" else ours[::-1],
    )
    with TestClient(app) as client:
        assert client.post("/v1/length", content=b"x" * 1000).text == "1000"
        assert client.post("/v1/length", content=iter([PIECE] * 3)).text == f"{3 * len(PIECE)}"
        assert client.post("/v1/echo", content=PIECE * 3).content == PIECE * 3
        for body in (b"x" * (1 << 20) + b"x", iter([PIECE] * 17)):
            answer = client.post("/v1/length", content=body)
            assert answer.status_code == 413
            assert "over its limit: 1048576 bytes are allowed" in answer.text
        assert client.post("/v1/length", content=b"again").text == "5"


def test_what_base_http_middleware_has_read_is_read_from_it(requests: arena.Requests) -> None:
    class Peeking(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            await request.body()
            response: Response = await call_next(request)
            return response

    app = Starlette(
        routes=[Route("/", length, methods=["POST"])],
        middleware=[Middleware(ArenaMiddleware, requests=requests), Middleware(Peeking)],
    )
    assert TestClient(app).post("/", content=b"x" * 1000).text == "1000"


@pytest.mark.ends
def test_a_background_task_finds_the_request_ended(requests: arena.Requests) -> None:
    found: list[object] = []

    async def endpoint(request: Request) -> Response:
        r = request.scope["arena"]
        body = await read_body(request.receive, r)
        kept = body.persist()

        def later() -> None:
            found.append((r.open, bytes(kept)))
            kept.free()
            with pytest.raises(arena.StaleError, match="POST /"):
                bytes(body)

        return PlainTextResponse("done", background=BackgroundTask(later))

    app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    app.add_middleware(ArenaMiddleware, requests=requests)
    assert TestClient(app).post("/", content=b"body").text == "done"
    assert found == [(False, b"body")]


@pytest.mark.parametrize("where", ["outermost", "mounted"])
def test_the_500_of_an_app_s_own_error_handler_becomes_the_413(
    requests: arena.Requests, where: str
) -> None:
    app: Any = Starlette(routes=[Route("/", length, methods=["POST"])], debug=True)
    if where == "outermost":
        app = ArenaMiddleware(app, requests)
    else:
        app = Starlette(routes=[Mount("/", app)])
        app.add_middleware(ArenaMiddleware, requests=requests)
    answer = TestClient(app).post("/", content=iter([PIECE] * 17))
    assert answer.status_code == 413
    assert "1048576 bytes are allowed, 1114112 have come" in answer.text


def test_an_app_that_answers_a_refused_body_has_its_own_way(requests: arena.Requests) -> None:
    async def endpoint(request: Request) -> Response:
        try:
            return await length(request)
        except arena.BodyLimitError:
            return PlainTextResponse("I am a teapot", status_code=418)

    app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    app.add_middleware(ArenaMiddleware, requests=requests)
    assert TestClient(app).post("/", content=iter([PIECE] * 17)).status_code == 418


def test_an_app_that_hides_a_refused_body_still_answers_413(requests: arena.Requests) -> None:
    async def quiet(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(arena.BodyLimitError):
            await read_body(receive, scope["arena"], 1)

    async def buggy(scope: Any, receive: Any, send: Any) -> None:
        try:
            await read_body(receive, scope["arena"], 1)
        except arena.BodyLimitError:
            raise KeyError("of the handler") from None

    server = Server(pieces_of(b"12"))
    server.run(ArenaMiddleware(quiet, requests))
    assert server.sent[0]["status"] == 413
    server = Server(pieces_of(b"12"))
    with pytest.raises(KeyError, match="of the handler"):
        server.run(ArenaMiddleware(buggy, requests))
    assert server.sent[0]["status"] == 413


async def body_of(request: fastapi.Request) -> arena.StrBuf:
    return await read_body(request.receive, request.scope["arena"], "1 MiB")


def test_endpoints_of_fastapi_read_bodies_in_the_loop_and_use_them_in_threads(
    requests: arena.Requests,
) -> None:
    app = fastapi.FastAPI()
    app.add_middleware(ArenaMiddleware, requests=requests)

    @app.post("/async")
    async def on_the_loop(request: fastapi.Request) -> str:
        return hashlib.sha256(await body_of(request)).hexdigest()

    @app.post("/def")
    def in_a_thread(
        request: fastapi.Request, body: Annotated[Any, fastapi.Depends(body_of)]
    ) -> str:
        request.scope["arena"].strdup("allocates here, too")
        return hashlib.sha256(body).hexdigest()

    @app.post("/taken")
    async def taken(request: fastapi.Request, item: dict[str, int]) -> str:
        await body_of(request)
        return "not reached"

    client = TestClient(app)
    for path in ("/async", "/def"):
        answer = client.post(path, content=PIECE * 3)
        assert answer.json() == hashlib.sha256(PIECE * 3).hexdigest()
        assert client.post(path, content=PIECE * 17).status_code == 413
    with pytest.raises(RuntimeError, match="a parameter of the endpoint"):
        client.post("/taken", json={"a": 1})


async def chat(ws: WebSocket) -> None:
    """Answer each message from its own request, until the client goes."""
    await ws.accept()
    while True:
        try:
            text = await ws.receive_text()
        except WebSocketDisconnect:
            return
        m = ws.scope["arena"].message
        if text == "fail":
            raise KeyError("asked to")
        await ws.send_text(f"{m.strdup(text)} {m.used} {m.key.rpartition(' ')[2]}")


def test_starlette_s_web_sockets_have_a_request_for_each_message(requests: arena.Requests) -> None:
    app = Starlette(routes=[Mount("/v1", Starlette(routes=[WebSocketRoute("/ws", chat)]))])
    app.add_middleware(ArenaMiddleware, requests=requests)
    with TestClient(app).websocket_connect("/v1/ws") as ws:
        for count in range(1, 4):
            ws.send_text("x" * count)
            assert ws.receive_text() == f"{'x' * count} {count} {count}"
            assert len(requests) <= 1
    assert requests.stats().opened == 3


# uvicorn.


def service(requests: arena.Requests, gates: dict[str, asyncio.Event]) -> Starlette:
    """Return an app with all ways in and out."""

    async def stream(request: Request) -> Response:
        r = request.scope["arena"]
        body = await read_body(request.receive, r)

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 65536):
                yield body[start : start + 65536]

        return StreamingResponse(parts())

    async def endless(request: Request) -> Response:
        request.scope["arena"].strbuf(PIECE * 2)

        async def parts() -> AsyncIterator[bytes]:
            while True:
                yield PIECE
                await asyncio.sleep(0)  # uvicorn's send() does not wait once the client is gone

        return StreamingResponse(parts())

    async def fail(request: Request) -> Response:
        await read_body(request.receive, request.scope["arena"])
        raise KeyError("before the response")

    async def fail_late(request: Request) -> Response:
        await read_body(request.receive, request.scope["arena"])

        async def parts() -> AsyncIterator[bytes]:
            yield b"part"
            raise KeyError("in the middle")

        return StreamingResponse(parts())

    async def wait(request: Request) -> Response:
        await read_body(request.receive, request.scope["arena"])
        await gates["open"].wait()
        return PlainTextResponse("waited")

    async def upload(request: Request) -> Response:
        try:
            return await length(request)
        except arena.DisconnectError:
            gates["gone"].set()
            raise

    handlers = (length, echo, stream, endless, fail, fail_late, wait, upload)
    return Starlette(
        routes=[
            *(Route(f"/{one.__name__}", one, methods=["POST"]) for one in handlers),
            WebSocketRoute("/ws", chat),
        ],
        middleware=[Middleware(ArenaMiddleware, requests=requests)],
    )


def serve(requests: arena.Requests, test: Callable[[int, dict[str, asyncio.Event]], Any]) -> None:
    """Run a test against the service; after it nothing is open, and the server still answers."""

    async def main() -> None:
        gates = {"open": asyncio.Event(), "gone": asyncio.Event()}
        async with under_uvicorn(service(requests, gates)) as port:
            await test(port, gates)
            await idle(requests)
            assert (await post(port, "/length", b"alive")).body == b"5"
            await idle(requests)

    run(main())


def test_uvicorn_serves_200_clients_at_once_each_with_a_body_of_its_own(
    requests: arena.Requests,
) -> None:
    async def test(port: int, gates: dict[str, asyncio.Event]) -> None:
        async def one(index: int) -> Answer:
            return await post(port, "/wait", iter([b"%d" % index] * 50))

        clients = [asyncio.create_task(one(index)) for index in range(200)]
        await until(lambda: requests.stats().bytes == sum(50 * len(f"{i}") for i in range(200)))
        assert len(requests) == 200
        gates["open"].set()
        assert {answer.body for answer in await asyncio.gather(*clients)} == {b"waited"}

        async def other(index: int) -> None:
            path = ("/stream", "/echo", "/length", "/fail", "/fail_late")[index % 5]
            body = b"%03d" % index * 9_000
            answer = await post(port, path, iter([body] * 3) if index % 2 else body * 3)
            if index % 5 < 2:
                assert answer.body == body * 3
            else:
                assert (answer.status, answer.body) == {
                    2: (200, b"81000"),
                    3: (500, b"Internal Server Error"),
                    4: (200, b"part"),
                }[index % 5]

        await asyncio.gather(*map(other, range(200)))

    serve(requests, test)


@pytest.mark.parametrize("chunked", [True, False])
def test_uvicorn_s_clients_get_to_the_413_while_they_still_send(
    requests: arena.Requests, chunked: bool
) -> None:
    async def test(port: int, gates: dict[str, asyncio.Event]) -> None:
        async def one() -> Answer:
            # More than fits into the sockets' buffers: it is read to its end, or sending fails.
            return await post(port, "/length", iter([PIECE] * 200) if chunked else PIECE * 200)

        for answer in await asyncio.gather(*(one() for _ in range(5))):
            assert answer.status == 413
            assert (b"Content-Length says" in answer.body) is not chunked
            assert answer.headers["connection"] == "close"

    serve(requests, test)


def test_uvicorn_s_clients_that_go_in_the_middle_of_an_upload_leave_nothing(
    requests: arena.Requests,
) -> None:
    async def test(port: int, gates: dict[str, asyncio.Event]) -> None:
        for headers in (["Transfer-Encoding: chunked"], ["Content-Length: 1000000"]):
            gates["gone"].clear()
            async with Client.to(port) as client:
                await client.head("/upload", *headers)
                await client.chunk(PIECE)
                await until(lambda: requests.stats().bytes >= len(PIECE))
            await gates["gone"].wait()  # and no handler is left
            await idle(requests)

    serve(requests, test)


def test_uvicorn_s_slow_readers_hold_their_request_until_they_read_or_go(
    requests: arena.Requests,
) -> None:
    async def test(port: int, gates: dict[str, asyncio.Event]) -> None:
        body = bytes(range(256)) * (32 << 10)  # 8 MiB: more than the sockets' buffers take
        sent = len(body)
        async with Client.to(port) as slow:
            await slow.head("/stream", f"Content-Length: {sent}")
            await slow.send(body)
            await until(lambda: requests.stats().bytes == sent)
            first = await slow.reader.readexactly(4096)
            for _ in range(100):
                await asyncio.sleep(0)
            assert requests.stats().bytes == sent  # it waits for the reader
            total = len(first)
            while total < sent:
                total += len(await slow.reader.read(1 << 20))
            await idle(requests)
        async with Client.to(port) as gone:
            await gone.head("/endless", "Content-Length: 0")
            await gone.reader.readexactly(100_000)
            assert requests.stats().bytes == 2 * len(PIECE)
        await idle(requests)

    serve(requests, test)


def test_uvicorn_s_web_sockets_have_a_request_for_each_message(requests: arena.Requests) -> None:
    async def test(port: int, gates: dict[str, asyncio.Event]) -> None:
        async def one() -> None:
            async with websockets.connect(f"ws://127.0.0.1:{port}/ws") as ws:
                for count in range(1, 6):
                    await ws.send("y" * count * 1000)
                    assert await ws.recv() == f"{'y' * count * 1000} {count * 1000} {count}"

        opened = requests.stats().opened
        await asyncio.gather(*(one() for _ in range(20)))
        assert requests.stats().opened == opened + 100
        async with websockets.connect(f"ws://127.0.0.1:{port}/ws") as ws:
            await ws.send("fail")
            with pytest.raises(websockets.ConnectionClosedError):
                await ws.recv()
        await idle(requests)
        async with websockets.connect(f"ws://127.0.0.1:{port}/ws") as ws:
            await ws.send("message")
            assert await ws.recv() == "message 7 1"
            ws.transport.abort()
        await idle(requests)

    serve(requests, test)

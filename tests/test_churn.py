"""The interception server of benchmarks/churn: whatever fails, nobody waits, and nothing stays."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

aiohttp = pytest.importorskip("aiohttp")
orjson = pytest.importorskip("orjson")

T = TypeVar("T")
PATIENCE = 10.0  # seconds, for what takes milliseconds: a handler that hangs waits for ever
STORES = ("arena", "discard")
PROTOCOLS = ("chat", "responses", "messages")
SCREENSHOT = 300_000


class Site:
    """A server and a model, each on loopback, in the event loop of a thread."""

    def __init__(self, store: str) -> None:
        from benchmarks.churn import _loop, model
        from benchmarks.churn.server import Server
        from benchmarks.churn.stores import STORES

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def start() -> None:
            self._runners = [(await _loop.start(model.application()))[0]]
            at = self._runners[0].addresses[0][1]
            self._server = Server(STORES[store](), f"http://127.0.0.1:{at}/generate")
            runner, port = await _loop.start(self._server.application())
            self._runners.append(runner)
            self.url = f"http://127.0.0.1:{port}"

        self.run(start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def figures(self) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            return self._server.figures()

        return self.run(ask())

    def settled(self) -> dict[str, Any]:
        """Return the figures when nobody works or waits any more: or as they are in the end."""
        until = time.monotonic() + PATIENCE
        while True:
            seen = self.figures()
            if not any(seen[what] for what in ("handlers", "tasks", "open", "pinned")):
                return seen
            if time.monotonic() > until:
                return seen
            time.sleep(0.01)

    def close(self) -> None:
        async def stop() -> None:
            for runner in reversed(self._runners):
                await runner.cleanup()

        self.run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent)


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(request.param)
    yield site
    site.close()


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key)}


class Client:
    """A rollout of a few turns, which asks once; and what came back."""

    def __init__(self, session: Any, site: Site, name: str, protocol: str) -> None:
        from benchmarks.churn.agent import MODEL, Body, screenshot
        from benchmarks.churn.protocols import PROTOCOLS

        self._session = session
        self.protocol = PROTOCOLS[protocol]
        self.rollout = f"{site.url}/rollouts/{name}"
        body = Body(self.protocol)
        self._body = body
        for turn in range(2):
            body.add(self.protocol.user(f"turn {turn}", screenshot(SCREENSHOT)))
        self.model = MODEL

    async def begin(self) -> None:
        async with self._session.post(self.rollout) as response:
            assert response.status == 200

    async def end(self) -> None:
        async with self._session.delete(self.rollout) as response:
            assert response.status == 200

    async def ask(self, stream: bool, **headers: str) -> tuple[int, bytes, str]:
        """Return the status, what came, and how the answer must begin."""
        pieces, _, begin = self._body.sent(stream)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(
            self.rollout + self.protocol.path, data=b"".join(pieces), headers=named
        ) as response:
            return response.status, await response.read(), begin

    def text(self, stream: bool, answer: bytes) -> str | None:
        if stream:
            return self.protocol.streamed(answer)
        return self.protocol.text(orjson.loads(answer))


async def fail(client: Client, failure: str | None, stream: bool) -> None:
    """Let a request fail, and check what its client sees."""
    told = {} if failure is None else {"X_Fail": failure}
    if failure in ("away", "cancel"):
        asking = asyncio.ensure_future(client.ask(stream, X_Delay="60", **told))
        await asyncio.sleep(0.1)  # until it is with the model, mostly; it may be anywhere
        if failure == "away":
            asking.cancel()
            assert (await asyncio.gather(asking, return_exceptions=True))[0] is not None
            return
        await client.end()
        status, answer, begin = await asyncio.wait_for(asking, PATIENCE)
        assert status in (410, 502)
        return
    status, answer, begin = await asyncio.wait_for(client.ask(stream, **told), PATIENCE)
    if failure in (None, "after"):
        assert status == 200
        text = client.text(stream, answer)
        assert text is not None
        assert text.startswith(begin)
    elif failure == "before" or not stream:
        assert status == 502
    else:  # it had begun
        assert status == 200
        assert client.text(stream, answer) is None
        assert answer.endswith(client.protocol.failure("the model gave no whole answer"))


LEFT_BEHIND = {
    "before": "ClientResponseError",
    "middle": "ClientPayloadError",
    "after": "ClientPayloadError",
    "synthesis": "SynthesisError",
}


@pytest.mark.parametrize("failure", ["before", "middle", "after", "away", "cancel", "synthesis"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("site", STORES, indirect=True)
def test_whatever_fails_the_handler_returns_once_unblocked_and_nothing_stays(
    site: Site, protocol: str, stream: bool, failure: str
) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            client = Client(session, site, "it", protocol)
            await client.begin()
            await fail(client, failure, stream)

    asyncio.run(work())
    seen = site.settled()
    assert seen["handlers"] == seen["tasks"] == 0
    assert seen["open"] == seen["bytes"] == seen["pinned"] == 0
    assert seen["unblocked"] == {"1": 1}
    kind = LEFT_BEHIND.get(failure)
    assert seen["failures"] == ({} if kind is None else {kind: 1})

    async def again() -> None:
        async with aiohttp.ClientSession() as session:
            client = Client(session, site, "another", protocol)
            await client.begin()
            await fail(client, None, stream)
            await client.end()

    asyncio.run(again())
    seen = site.settled()
    assert seen["unblocked"] == {"1": 2}
    assert seen["open"] == seen["bytes"] == seen["pinned"] == 0


@pytest.mark.parametrize("site", ["keep"], indirect=True)
def test_what_is_kept_goes_with_its_rollout(site: Site) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            client = Client(session, site, "it", "chat")
            await client.begin()
            for failure in (None, "middle", "synthesis"):
                await fail(client, failure, True)
            kept = site.figures()
            assert kept["open"] == 3
            assert kept["bytes"] > 3 * 2 * SCREENSHOT
            await client.end()

    asyncio.run(work())
    seen = site.settled()
    assert seen["open"] == seen["bytes"] == 0
    assert seen["unblocked"] == {"1": 3}


@pytest.mark.parametrize("failure", ["middle", "synthesis"])
@pytest.mark.parametrize("site", ["naive"], indirect=True)
def test_a_finally_that_only_drops_leaves_its_handler_waiting_and_that_is_seen(
    site: Site, failure: str
) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            client = Client(session, site, "it", "messages")
            await client.begin()
            asking = asyncio.ensure_future(client.ask(True, X_Fail=failure))
            while not site.figures()["hung"]:
                await asyncio.sleep(0.05)
            await client.end()  # what would unblock it is not to be found any more
            seen = site.figures()
            assert (seen["open"], seen["tasks"], seen["handlers"]) == (0, 0, 1)
            asking.cancel()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))
    assert site.settled()["handlers"] == 0


@pytest.mark.parametrize("site", [*STORES, "keep"], indirect=True)
def test_a_rollout_that_ends_while_a_body_comes_in_does_not_wait_for_the_rest(site: Site) -> None:
    async def work() -> int:
        async with aiohttp.ClientSession() as session:
            client = Client(session, site, "it", "chat")
            await client.begin()

            async def slow() -> AsyncIterator[bytes]:
                yield b'{"model": "' + b"x" * 300_000
                while not site.figures()["handlers"]:
                    await asyncio.sleep(0.01)
                await client.end()
                await asyncio.sleep(60)

            async with session.post(client.rollout + "/v1/messages", data=slow()) as response:
                return int(response.status)

    assert asyncio.run(asyncio.wait_for(work(), PATIENCE)) == 410
    seen = site.settled()
    assert seen["handlers"] == seen["open"] == seen["bytes"] == seen["pinned"] == 0
    assert seen["unblocked"] == {"1": 1}


@pytest.mark.parametrize("site", STORES, indirect=True)
def test_a_body_that_is_no_request_is_refused_and_not_kept(site: Site) -> None:
    async def work() -> list[int]:
        async with aiohttp.ClientSession() as session:
            client = Client(session, site, "it", "chat")
            await client.begin()
            statuses = []
            for path, body in (
                ("/v1/messages", b"[]"),
                ("/v1/messages", b'{"model": "m", "messages": []}'),
                ("/v1/responses", b'{"model": "m", "messages": [1]}'),
                ("/v1/chat/completions", b'{"model": "m", "messages": [1], "stream": 1}'),
                ("/v1/chat/completions", b"{"),
                ("/v1/chat/completions", b""),
            ):
                async with session.post(client.rollout + path, data=body) as response:
                    statuses.append(response.status)
            for url in (f"{site.url}/rollouts/none", f"{site.url}/rollouts/none/v1/messages"):
                method = "DELETE" if url.endswith("none") else "POST"
                async with session.request(method, url) as response:
                    statuses.append(response.status)
            async with session.post(client.rollout) as response:
                statuses.append(response.status)
            return statuses

    assert asyncio.run(work()) == [400] * 6 + [404] * 2 + [409]
    seen = site.settled()
    assert seen["open"] == seen["bytes"] == 0
    assert seen["unblocked"] == {"1": 6}


@pytest.mark.parametrize("site", ["arena"], indirect=True)
def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(site: Site) -> None:
    async def work() -> int:
        from benchmarks.churn.stores import MOST

        async with aiohttp.ClientSession() as session:
            client = Client(session, site, "it", "chat")
            await client.begin()

            async def never() -> AsyncIterator[bytes]:
                yield b"{"
                await asyncio.sleep(60)

            path, size = client.rollout + "/v1/messages", {"Content-Length": str(MOST + 1)}
            async with session.post(path, data=never(), headers=size) as response:
                return int(response.status)

    assert asyncio.run(asyncio.wait_for(work(), PATIENCE)) == 413
    seen = site.settled()
    assert seen["open"] == seen["bytes"] == seen["handlers"] == 0
    assert seen["unblocked"] == {"1": 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_agent_tells_a_stream_that_ends_early_from_a_whole_one(protocol: str) -> None:
    from benchmarks.churn.protocols import PROTOCOLS, events

    one = PROTOCOLS[protocol]
    begun = one.begin(7, "m") + one.piece(7, "m", "so ") + one.piece(7, "m", "so\n\n")
    whole = begun + one.end(7, "m", "so so\n\n", {"input": 1, "output": 2})
    assert one.streamed(whole) == "so so\n\n"
    assert one.streamed(begun) is None
    assert one.streamed(begun + one.failure("no")) is None
    assert len(list(events(begun))) >= 3
    answer = one.answer(7, "m", "so so", {"input": 1, "output": 2})
    assert one.text(orjson.loads(orjson.dumps(answer))) == "so so"

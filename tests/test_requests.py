"""Requests: ticks by key that are no thread's, and ends that unblock first and then drop."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import logging
import os
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_fork_and_exit import run

import arena
from arena import requests

WAIT = 60.0  # seconds: the end of a test that hangs
BODY = b"0123456789abcdef" * 65_536  # 1 MiB
LARGE = 64 << 10  # bytes: what is larger has a mapping of its own


@pytest.fixture
def reqs() -> Iterator[arena.Requests]:
    with arena.Requests("bodies") as registry:
        yield registry


def in_thread(work: object) -> object:
    """Return what work() returns in another thread, or raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(WAIT)  # type: ignore[arg-type]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Keys


def test_a_request_is_found_by_its_key_until_it_is_discarded(reqs: arena.Requests) -> None:
    r = reqs.open("turn-1", group="rollout-7")
    assert (r.key, r.group, r.open, r.used, r.limit) == ("turn-1", "rollout-7", True, 0, None)
    assert reqs.get("turn-1") is r
    assert "turn-1" in reqs
    assert "turn-2" not in reqs
    assert (len(reqs), list(reqs)) == (1, ["turn-1"])
    assert reqs.discard("turn-1")
    assert not r.open
    assert "turn-1" not in reqs
    assert (len(reqs), list(reqs)) == (0, [])


def test_a_key_may_be_anything_that_can_be_hashed(reqs: arena.Requests) -> None:
    for key in (1, None, ("a", 2), b"bytes", frozenset({3}), 2.5, ""):
        reqs.open(key).strdup("x")
        assert key in reqs
    with pytest.raises(TypeError, match="unhashable"):
        reqs.open([])
    assert len(reqs) == 7


def test_a_key_that_is_open_is_an_error_that_loses_nothing(reqs: arena.Requests) -> None:
    r = reqs.open("k")
    buf = r.strbuf("what is there")
    with pytest.raises(arena.TickError, match=r"request 'k' of 'bodies' is open, with 13 bytes"):
        reqs.open("k", group="other")
    assert reqs.get("k") is r
    assert str(buf) == "what is there"
    assert reqs.stats().opened == 1


@pytest.mark.ends
def test_a_key_is_free_again_after_its_discard(reqs: arena.Requests) -> None:
    old = reqs.open("k")
    text = old.strdup("old")
    assert reqs.discard("k")
    new = reqs.open("k")
    assert str(new.strdup("new")) == "new"
    with pytest.raises(arena.StaleError, match="request 'k' of 'bodies'"):
        str(text)
    assert not old.discard()
    assert reqs.get("k") is new


def test_unknown_keys_are_key_errors_with_the_key_but_for_discard(reqs: arena.Requests) -> None:
    for key in ("nobody", ("a", 1)):
        with pytest.raises(KeyError) as caught:
            reqs.get(key)
        assert caught.value.args == (key,)
        with pytest.raises(KeyError) as caught, reqs.delivering(key):
            pytest.fail("it was entered")
        assert caught.value.args == (key,)
        assert reqs.discard(key) is False


def test_iterating_is_over_the_keys_of_its_start(reqs: arena.Requests) -> None:
    for key in "abc":
        reqs.open(key)
    for key in reqs:
        assert reqs.discard(key)
    assert len(reqs) == 0


def test_a_registry_with_nothing_open_is_still_true(reqs: arena.Requests) -> None:
    assert reqs
    assert repr(reqs) == "<arena.Requests 'bodies': 0 open>"


def test_wrong_arguments_are_told_and_open_nothing(reqs: arena.Requests) -> None:
    with pytest.raises(TypeError, match="the name of a registry is a str, not int"):
        arena.Requests(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the name of a registry is text"):
        arena.Requests("\ud800")
    for call in (reqs.close_group, reqs.group):
        with pytest.raises(TypeError, match="unhashable"):
            call([])
    with pytest.raises(ValueError, match="a limit is a number of bytes such as"):
        arena.Requests("bodies", limit="lots")
    for wrong in (True, 1.5, []):
        with pytest.raises(TypeError, match="a limit"):
            reqs.open("k", limit=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="older_than is a number of seconds"):
            reqs.sweep("1")  # type: ignore[arg-type]
    for seconds in (-1, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="older_than is a number of seconds from 0"):
            reqs.sweep(seconds)
    with pytest.raises(TypeError, match="older_than"):
        reqs.sweep(True)
    assert (len(reqs), reqs.stats().opened) == (0, 0)


class Unshowable:
    def __repr__(self) -> str:
        raise ZeroDivisionError("no repr")


def test_a_key_that_cannot_be_shown_is_a_key_all_the_same(
    reqs: arena.Requests, caplog: pytest.LogCaptureFixture
) -> None:
    reqs.open(Unshowable(), group=Unshowable())
    assert reqs.sweep(0) == 1
    assert "<Unshowable that cannot be shown>" in caplog.text


class Contrary:
    """A key whose comparison fails once it is told to."""

    armed = False

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        if Contrary.armed:
            raise ZeroDivisionError("no comparison")
        return self is other


def test_a_key_whose_comparison_fails_opens_nothing(reqs: arena.Requests) -> None:
    key = Contrary()
    reqs.open(key)
    Contrary.armed = True
    try:
        with pytest.raises(ZeroDivisionError):
            reqs.open(Contrary())
    finally:
        Contrary.armed = False
    assert (len(reqs), reqs.stats().opened) == (1, 1)
    assert reqs.discard(key)


def test_a_request_ends_once_even_when_its_key_has_changed(reqs: arena.Requests) -> None:
    class Changes:
        value = 1

        def __hash__(self) -> int:
            return self.value

    key, said = Changes(), []
    r = reqs.open(key)
    r.on_discard(said.append, "told")
    r.strdup(BODY)
    key.value = 2
    assert r.discard()
    now = reqs.stats()
    assert (said, now.open, now.discarded, arena.stats().scratch) == (["told"], 0, 1, 0)

    failing = Contrary()
    reqs.open(failing)
    reqs.open(Contrary())  # of the same hash, so the two are compared
    Contrary.armed = True
    try:
        assert reqs.discard(failing)
    finally:
        Contrary.armed = False
    assert reqs.stats().open == 1


def test_the_native_parts_refuse_what_is_not_theirs(reqs: arena.Requests) -> None:
    native, ending = reqs._native, arena._native._Ending
    wrong: list[Callable[[], object]] = [
        lambda: arena._native._registry(1, None),  # type: ignore[arg-type]
        lambda: native.open([], 1, 2, "3", None),  # type: ignore[arg-type]
        lambda: native._over([], 1, 2, 3),
        lambda: native.end(3, None),  # type: ignore[arg-type]
        lambda: native.sweep((), "what", None),  # type: ignore[arg-type]
        lambda: native.close_group([], 1, "what"),  # type: ignore[arg-type]
        lambda: ending([], 1),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(AttributeError, match="tick"):
        native.sweep([object()], "what", None)
    with pytest.raises(AttributeError, match="group"):
        native.close_group({1: object()}, 1, "what")
    blank = ending.__new__(ending)
    assert blank.__enter__() is blank
    assert blank.__exit__(None, None, None) is None
    assert len(reqs) == 0
    r = reqs.open("k")
    tick, r.tick = r.tick, 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match="the tick of a request was replaced"):
        reqs.delivering("k").__enter__()
    r.tick = tick


# Memory


def test_a_request_has_no_part_in_the_current_tick(reqs: arena.Requests) -> None:
    with arena.tick("around", limit=100) as around:
        r = reqs.open("k")
        assert arena.current() is around
        r.alloc(10_000)
        assert (around.used, r.used) == (0, 10_000)
    block = r.alloc(3)
    assert bytes(block) == b"\0\0\0"
    assert arena.current() is None
    assert r.tick.name == "bodies"
    with arena.tick() as inner:
        reqs.discard("k")
        assert arena.current() is inner


@pytest.mark.ends
def test_after_its_end_everything_of_a_request_is_stale(reqs: arena.Requests) -> None:
    r = reqs.open("k")
    handles = r.strbuf("one"), r.strdup("two"), r.alloc(5)
    r.discard()
    for handle in handles:
        with pytest.raises(arena.StaleError, match=r"belonged to request 'k' of 'bodies' \(number"):
            bytes(handle)
    for call in (lambda: r.strbuf(), lambda: r.strdup(""), lambda: r.alloc(1)):
        with pytest.raises(arena.TickError, match=r"request 'k' of 'bodies' .* has ended already"):
            call()
    with pytest.raises(arena.TickError, match="has ended already"):
        r.on_discard(print)
    assert repr(r) == "<arena.Request 'k' of 'bodies', ended>"


@pytest.mark.as_ever
@pytest.mark.parametrize("size", [LARGE + 1, 1 << 20, 5 << 20])
def test_a_large_body_goes_back_to_the_system_at_its_discard(
    reqs: arena.Requests, size: int
) -> None:
    arena.trim()
    before, cached = arena.stats(), arena.stats().cached
    r = reqs.open("k")
    r.strdup(b"x" * size)
    buf = r.strbuf()
    for _ in range(size // 1024):
        buf.append(b"y" * 1024)
    block = r.alloc(size)
    assert arena.stats().chunks - before.chunks >= 3 * size - LARGE
    assert block[size - 1] == 0
    reqs.discard("k")
    after = arena.stats()
    assert after.chunks == before.chunks
    # What is cached for others is the chunk that the buffer began in.
    assert after.cached - cached <= 2 * LARGE


@pytest.mark.as_ever
def test_resident_memory_falls_at_the_discard_and_no_trim_is_needed(reqs: arena.Requests) -> None:
    trims = arena.trimming.totals().trims
    base = resident()
    for key in range(16):
        reqs.open(key).strdup(BODY * 4)
    full = resident()
    assert full - base >= 64 << 20
    for key in range(16):
        reqs.discard(key)
    assert full - resident() >= 63 << 20
    assert arena.trimming.totals().trims == trims


@pytest.mark.as_ever
def test_a_body_that_grows_moves_its_pages_and_leaves_no_copy(reqs: arena.Requests) -> None:
    piece = b"z" * LARGE
    buf = reqs.open("k").strbuf()
    base = resident()
    for _ in range(512):
        buf.append(piece)
    grown = resident() - base
    assert len(buf) == 32 << 20
    assert grown <= 1.1 * len(buf)
    assert bytes(memoryview(buf)[-LARGE:]) == piece
    reqs.discard("k")


@pytest.mark.as_ever
def test_room_that_is_reserved_is_neither_counted_nor_resident(reqs: arena.Requests) -> None:
    r = reqs.open("k", limit=100)
    buf = r.strbuf("abc")
    base, maps = resident(), arena.stats().maps
    buf._reserve(64 << 20)
    assert resident() - base < 16 << 20  # ASan has an eighth of it
    assert (len(buf), r.used, arena.stats().maps) == (3, 3, maps + 1)
    assert buf == "abc"
    with pytest.raises(arena.LimitError):
        buf.append("x" * 98)
    buf.append("d")
    assert buf == "abcd"
    with memoryview(buf), pytest.raises(BufferError):
        buf._reserve(1 << 30)
    with pytest.raises(ValueError, match="the room to reserve is from 0"):
        buf._reserve(-1)
    with pytest.raises(MemoryError):
        buf._reserve(1 << 62)
    assert buf == "abcd"


@pytest.mark.as_ever
def test_no_more_than_a_huge_page_of_a_body_is_resident_in_vain(reqs: arena.Requests) -> None:
    for size in (3 << 20, 5 << 20, 9 << 20):
        base = resident()
        buf = reqs.open("k").strbuf()
        buf._reserve(size)
        for _ in range(size >> 16):
            buf.append(b"x" * LARGE)
        assert size - LARGE <= resident() - base <= size + (2 << 20) + 2 * LARGE
        reqs.discard("k")


def test_small_requests_share_the_cache_of_ticks(reqs: arena.Requests) -> None:
    for _ in range(3):
        reqs.open("k").strdup("small")
        reqs.discard("k")
    maps = arena.stats().maps
    for _ in range(100):
        reqs.open("k").strdup("small")
        reqs.discard("k")
    assert arena.stats().maps == maps


@pytest.mark.ends
def test_a_view_keeps_just_its_body_until_it_lets_go(reqs: arena.Requests) -> None:
    r = reqs.open("k")
    kept, other = r.strdup(BODY), r.strdup(BODY)
    view = memoryview(kept)[10:20]
    assert reqs.stats().pinned == 0
    assert reqs.discard("k")
    now = reqs.stats()
    assert (now.open, now.bytes, now.pinned_count) == (0, 0, 1)
    assert len(BODY) <= now.pinned <= len(BODY) + LARGE
    assert bytes(view) == b"abcdef0123"
    with pytest.raises(arena.StaleError):
        len(kept)
    del kept, other, r
    gc.collect()
    view.release()
    assert (reqs.stats().pinned, reqs.stats().pinned_count) == (0, 0)


@pytest.mark.ends
def test_a_view_outlives_the_registry(reqs: arena.Requests) -> None:
    other = arena.Requests("other")
    view = memoryview(other.open("k").strdup(BODY))
    memory = other.open("reader").alloc(4)
    other.close()
    del other
    gc.collect()
    assert bytes(view[:4]) == b"0123"
    assert arena.stats().pinned >= len(BODY)
    assert reqs.stats().pinned == 0
    view.release()
    assert memory.stale


def test_a_buffer_with_a_view_refuses_to_grow(reqs: arena.Requests) -> None:
    buf = reqs.open("k").strbuf("abc")
    with memoryview(buf), pytest.raises(BufferError):
        buf.append("d")
    buf.append("d")
    assert buf == "abcd"


@pytest.mark.as_ever
def test_the_map_names_what_pins_a_body() -> None:
    with arena.trace(4), arena.Requests("traced") as reqs:
        view = memoryview(reqs.open("k").strdup("x" * 100))
        reqs.discard("k")
        rows = [row for row in arena.escapes() if row.tick == "traced" and row.kind == "pin"]
        assert [row.count for row in rows] == [1]
        view.release()


# Limits


def test_the_limit_of_a_request_is_exact_and_leaves_what_is_there(reqs: arena.Requests) -> None:
    r = reqs.open("k", limit=100)
    buf = r.strbuf("x" * 60)
    with pytest.raises(arena.LimitError, match=r"request 'k' .* 41 bytes requested, 60 used, 100"):
        buf.append("y" * 41)
    assert buf == "x" * 60
    buf.append("y" * 40)
    assert (r.used, r.limit) == (100, 100)
    with pytest.raises(arena.LimitError):
        r.alloc(1)
    reqs.open("other").alloc(1000)


def test_the_limit_of_a_registry_holds_for_all_its_requests_together() -> None:
    with arena.Requests("few", limit="1 KiB") as reqs:
        assert reqs.limit == reqs.stats().limit == 1024
        first, second = reqs.open(1), reqs.open(2, limit=600)
        first.alloc(500)
        buf = second.strbuf("x" * 500)
        with pytest.raises(arena.LimitError) as caught:
            buf.append("y" * 25)
        assert str(caught.value).startswith(
            "the open requests of 'few' would pass their limit: 25 bytes requested by request 2 of"
        )
        assert str(caught.value).endswith("1000 used, 1024 allowed")
        buf.append("y" * 24)
        with pytest.raises(arena.LimitError):
            first.alloc(1)
        with arena.tick() as t:  # what is no request is not under it
            t.alloc(5000)
        reqs.discard(2)
        first.alloc(524)
        with pytest.raises(arena.LimitError):
            reqs.open(2).strdup("z")
        assert reqs.stats().bytes == 1024
        in_thread(lambda: reqs.discard(1))
        reqs.get(2).alloc(1024)


def test_the_limit_of_the_process_counts_requests() -> None:
    with arena.Requests("bodies") as reqs:
        r = reqs.open("k")
        r.alloc(1000)
        held = arena.stats()
        arena.set_limit(held.scratch + held.persisted + held.strays + 500)
        try:
            with pytest.raises(arena.LimitError, match="the process would pass its limit"):
                in_thread(lambda: r.alloc(501))
            in_thread(lambda: r.alloc(500))
            reqs.discard("k")
            reqs.open("k").alloc(1500)
        finally:
            arena.set_limit(None)


# Unblock, then drop


def test_callbacks_run_before_the_memory_goes_last_in_first_out(reqs: arena.Requests) -> None:
    r = reqs.open("k")
    text = r.strdup("body")
    said: list[object] = []
    r.on_discard(lambda: said.append(("first in", str(text), "k" in reqs, r.open)))
    r.on_discard(said.append, "last in")
    r.on_discard(said.extend, ["args"])
    assert reqs.discard("k")
    assert said == ["args", "last in", ("first in", "body", True, False)]
    assert text.stale


def test_a_second_discard_does_nothing(reqs: arena.Requests) -> None:
    said: list[int] = []
    r = reqs.open("k")
    r.on_discard(said.append, 1)
    assert reqs.discard("k")
    assert not reqs.discard("k")
    assert not r.discard()
    assert said == [1]
    assert reqs.stats().discarded == 1


def test_a_callback_that_discards_its_own_request_finds_it_done(reqs: arena.Requests) -> None:
    r, said = reqs.open("k"), []
    r.on_discard(lambda: said.append((reqs.discard("k"), r.discard(), reqs.sweep(0))))
    reqs.discard("k")
    assert said == [(False, False, 0)]


def test_while_callbacks_run_the_key_is_taken_and_the_request_takes_no_more(
    reqs: arena.Requests,
) -> None:
    r, said = reqs.open("k"), []

    def callback() -> None:
        with pytest.raises(arena.TickError, match="'k' of 'bodies' is ending: its callbacks run"):
            reqs.open("k")
        with pytest.raises(arena.TickError, match="is ending"):
            r.strdup("more")
        with pytest.raises(arena.TickError, match="is ending"):
            r.on_discard(print)
        said.append(reqs.get("k") is r)

    r.on_discard(callback)
    reqs.discard("k")
    assert said == [True]
    reqs.open("k")


def test_a_callback_may_end_other_requests(reqs: arena.Requests) -> None:
    reqs.open("a").on_discard(reqs.discard, "b")
    reqs.open("b").on_discard(reqs.discard, "c")
    reqs.open("c")
    assert reqs.discard("a")
    assert len(reqs) == 0


def test_all_callbacks_run_even_when_some_fail(reqs: arena.Requests) -> None:
    r, said = reqs.open("k"), []
    r.on_discard(said.append, 1)
    r.on_discard(lambda: 1 / 0)
    r.on_discard(said.append, 2)
    r.on_discard({}.pop, "missing")
    with pytest.raises(ExceptionGroup, match="request 'k' of 'bodies'") as caught:
        reqs.discard("k")
    assert [type(e) for e in caught.value.exceptions] == [KeyError, ZeroDivisionError]
    assert said == [2, 1]
    assert (len(reqs), arena.stats().scratch) == (0, 0)


def test_on_discard_takes_only_what_will_be_run(reqs: arena.Requests) -> None:
    r = reqs.open("k")

    async def nobody_awaits() -> None: ...

    with pytest.raises(TypeError, match=r"nobody_awaits at .* is async"):
        r.on_discard(nobody_awaits)

    class Async:
        async def __call__(self) -> None: ...

    for wrong in (functools.partial(nobody_awaits), Async(), Async().__call__):
        with pytest.raises(TypeError, match="is async or a generator: nobody would await it"):
            r.on_discard(wrong)

    def generates() -> Iterator[None]:
        yield

    async def generates_async() -> AsyncIterator[None]:
        yield

    for wrong in (generates, generates_async):
        with pytest.raises(TypeError, match="is async or a generator"):
            r.on_discard(wrong)
    with pytest.raises(TypeError, match=r"on_discard\(fn, .* takes a callable first, not 3"):
        r.on_discard(3)  # type: ignore[arg-type]


def test_a_tick_that_is_ended_by_itself_leaves_the_registry_too(reqs: arena.Requests) -> None:
    r, said = reqs.open("k"), []
    r.on_discard(said.append, "told")
    r.tick.end()
    assert said == ["told"]
    assert "k" not in reqs
    assert not reqs.discard("k")
    assert reqs.stats().discarded == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_registry_that_is_forgotten_unblocks_whoever_waits() -> None:
    said: list[str] = []
    reqs = arena.Requests("forgotten")
    reqs.open("a").on_discard(said.append, "a")
    reqs.open("b").on_discard(said.append, "b")
    del reqs
    gc.collect()
    assert sorted(said) == ["a", "b"]


# Deliveries


def test_a_delivery_discards_at_its_end(reqs: arena.Requests) -> None:
    r = reqs.open("k")
    with reqs.delivering("k") as got:
        assert got is r
        assert r.open
    assert not r.open
    assert len(reqs) == 0


def test_the_exception_of_the_body_is_what_the_caller_sees(reqs: arena.Requests) -> None:
    r = reqs.open("k")
    r.on_discard(lambda: 1 / 0)
    error = ValueError("half way")
    with pytest.raises(ValueError, match="half way") as caught, reqs.delivering("k"):
        raise error
    assert caught.value is error
    assert "ZeroDivisionError" in error.__notes__[0]
    assert not r.open


def test_without_one_failures_of_callbacks_are_a_group(reqs: arena.Requests) -> None:
    reqs.open("k").on_discard(lambda: 1 / 0)
    with pytest.raises(ExceptionGroup), reqs.delivering("k"):
        pass
    assert len(reqs) == 0


def test_what_was_discarded_meanwhile_is_no_error_at_the_end_of_a_delivery(
    reqs: arena.Requests,
) -> None:
    reqs.open("k")
    with reqs.delivering("k"):
        reqs.discard("k")
        successor = reqs.open("k")
    assert reqs.get("k") is successor
    with pytest.raises(KeyError, match="the body's"), reqs.delivering("k"):
        reqs.discard("k")
        raise KeyError("the body's")


@pytest.mark.parametrize("ends", ["success", "error", "cancelled", "timeout", "group"])
def test_a_stream_that_fails_half_way_never_leaves_its_reader_waiting(
    reqs: arena.Requests, ends: str
) -> None:
    """The worker fails before the end marker, and the reader must still be woken."""

    async def main() -> list[str]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        r = reqs.open("k", group="rollout")
        r.on_discard(queue.put_nowait, "end")
        begun = asyncio.Event()

        async def worker() -> None:
            async with reqs.delivering("k"):
                queue.put_nowait("piece")
                begun.set()
                match ends:
                    case "error":
                        raise ConnectionError("the model has gone")
                    case "cancelled" | "group":
                        await asyncio.Event().wait()
                    case "timeout":
                        async with asyncio.timeout(0.001):
                            await asyncio.Event().wait()

        task = asyncio.create_task(worker())
        await begun.wait()
        if ends == "cancelled":
            task.cancel()
        if ends == "group":
            assert reqs.close_group("rollout") == 1
        got: list[str] = []
        async with asyncio.timeout(WAIT):
            while not got or got[-1] != "end":
                got.append(await queue.get())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert queue.empty()
        return got

    assert asyncio.run(main()) == ["piece", "end"]
    assert len(reqs) == 0


def test_figures_hold_together_while_callbacks_run(reqs: arena.Requests) -> None:
    seen: list[tuple[int, ...]] = []

    def look() -> None:
        now = reqs.stats()
        seen.append((now.opened, now.open, now.discarded, now.swept))

    for key in range(3):
        reqs.open(key, group="g").on_discard(look)
    reqs.discard(0)
    reqs.close_group("g")
    look()
    assert seen == [(3, 3, 0, 0), (3, 2, 1, 0), (3, 1, 1, 1), (3, 0, 1, 2)]


def test_the_ways_out_are_awaited_without_a_turn_of_the_event_loop(reqs: arena.Requests) -> None:
    reqs.open("k", group="g")
    delivery, group = reqs.delivering("k"), reqs.group("g")
    with pytest.raises(StopIteration) as caught:
        delivery.__aenter__().send(None)
    assert caught.value.value is reqs.get("k")
    reqs.open("other", group="g")
    for way_out, left in ((delivery, ["other"]), (group, [])):
        done = way_out.__aexit__(None, None, None)
        assert list(reqs) == left  # done at the call
        assert list(done.__await__()) == []
        assert way_out.__exit__(None, None, None) is None  # again: nothing to do
    with pytest.raises(TypeError, match="takes 3 arguments"):
        delivery.__exit__()  # type: ignore[call-arg]
    assert reqs.delivering("k").__exit__(None, None, None) is None  # never entered


def test_a_forgotten_registry_goes_also_when_its_callbacks_know_its_group(
    reqs: arena.Requests,
) -> None:
    other = arena.Requests("other")
    group = other.group("g")
    delivery = other.delivering("k")
    group.open("k").on_discard({"both": (group, delivery)}.get, "both")
    with delivery as r:
        held = weakref.ref(r)
        other.open(
            "again", group=delivery
        )  # a group may be anything: here what refers to all of it
    del other, group, delivery, r
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert held() is None
    assert "other" not in [registry.name for registry in requests.registries()]


# Groups


def test_closing_a_group_sweeps_what_was_never_delivered(reqs: arena.Requests) -> None:
    said: list[object] = []
    for key in range(6):
        r = reqs.open(key, group="odd" if key % 2 else "even")
        r.on_discard(said.append, key)
    reqs.discard(1)
    assert reqs.close_group("odd") == 2
    assert said == [1, 3, 5]
    assert list(reqs) == [0, 2, 4]
    assert reqs.close_group("odd") == 0
    assert reqs.close_group("unknown") == 0
    now = reqs.stats()
    assert (now.opened, now.discarded, now.swept, now.open) == (6, 1, 2, 3)


def test_closing_a_group_ends_all_of_it_even_when_some_fail(reqs: arena.Requests) -> None:
    said: list[object] = []
    for key in range(5):
        r = reqs.open(key, group="g")
        r.on_discard(said.append, key)
        if key in (1, 3):
            r.on_discard(lambda: 1 / 0)
    with pytest.raises(ExceptionGroup, match="group 'g' of 'bodies'") as caught:
        reqs.close_group("g")
    assert len(caught.value.exceptions) == 2
    assert said == [0, 1, 2, 3, 4]
    assert (len(reqs), reqs.stats().swept) == (0, 5)


def test_a_group_is_closed_at_the_end_of_its_with(reqs: arena.Requests) -> None:
    with reqs.group("rollout-7") as group:
        r = group.open("a", limit=10)
        assert (r.group, r.limit, group.name) == ("rollout-7", 10, "rollout-7")
        reqs.open("b", group="rollout-7")
        reqs.open("c")
    assert list(reqs) == ["c"]

    async def main() -> None:
        async with reqs.group(8) as group:
            group.open("d")
            assert group.close() == 1
            group.open("e")

    asyncio.run(main())
    assert list(reqs) == ["c"]
    assert repr(reqs.group("g")) == "<arena.Group 'g' of 'bodies'>"


def test_the_body_of_a_group_wins_over_its_callbacks(reqs: arena.Requests) -> None:
    with pytest.raises(ValueError, match="body") as caught, reqs.group("g") as group:
        group.open("a").on_discard(lambda: 1 / 0)
        group.open("b").on_discard(lambda: 1 / 0)
        raise ValueError("body")
    assert len(caught.value.__notes__) == 2
    assert len(reqs) == 0


def test_ctrl_c_in_a_callback_ends_the_rest_of_the_group_all_the_same(reqs: arena.Requests) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    said: list[object] = []
    for key in range(3):
        r = reqs.open(key, group="g")
        r.on_discard(said.append, key)
        r.on_discard(interrupted)
    with pytest.raises(KeyboardInterrupt):
        reqs.close_group("g")
    assert said == [0, 1, 2]
    assert len(reqs) == 0


def test_none_is_no_group(reqs: arena.Requests) -> None:
    reqs.open("k")
    for call in (reqs.close_group, reqs.group):
        with pytest.raises(TypeError, match="None is no group"):
            call(None)
    assert "k" in reqs


def test_a_group_is_told_by_equality_and_a_comparison_that_fails_stops_no_other(
    reqs: arena.Requests,
) -> None:
    reqs.open("a", group=1)
    reqs.open("c", group=Contrary())
    reqs.open("b", group=1.0)
    with pytest.raises(TypeError, match="unhashable"):
        reqs.open("d", group=[])
    Contrary.armed = True
    try:
        with pytest.raises(ExceptionGroup, match="group 1 of 'bodies'") as caught:
            reqs.close_group(1)
        with pytest.raises(ConnectionError) as body, reqs.group(1) as group:
            group.open("e")
            raise ConnectionError
    finally:
        Contrary.armed = False
    assert [type(e) for e in caught.value.exceptions] == [ZeroDivisionError]
    assert "no comparison" in body.value.__notes__[0]
    assert list(reqs) == ["c"]


def test_what_the_collector_shows_while_callbacks_run_has_no_holes(reqs: arena.Requests) -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(sum(item is False for o in gc.get_objects() if type(o) is list for item in o))

    for key in range(3):
        reqs.open(key, group="g").on_discard(look)
    reqs.close_group("g")
    assert len(seen) == 3


# Deadlines


def test_a_sweep_ends_what_is_old_and_logs_each(
    reqs: arena.Requests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(requests, "_clock", lambda: now)
    said: list[object] = []
    old = reqs.open("old", group="rollout-7")
    old.strdup("x" * 123)
    old.on_discard(said.append, "old")
    now = 1060.0
    reqs.open("young").on_discard(said.append, "young")
    assert (old.age, reqs.stats().oldest) == (60.0, 60.0)
    assert reqs.sweep(older_than=60) == 0
    now = 1061.5
    assert reqs.sweep(older_than=60) == 1
    assert said == ["old"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("arena", logging.WARNING)
    assert record.getMessage() == (
        "request 'old' of 'bodies', group 'rollout-7', was never ended: "
        "swept after 61.5 s, with 123 bytes"
    )
    assert list(reqs) == ["young"]
    assert (reqs.stats().swept, reqs.stats().oldest) == (1, 1.5)
    assert reqs.sweep(0) == 1


def test_a_sweep_logs_all_and_ends_all_even_when_callbacks_fail(
    reqs: arena.Requests, caplog: pytest.LogCaptureFixture
) -> None:
    for key in range(3):
        reqs.open(key).on_discard(lambda: 1 / 0)
    with pytest.raises(ExceptionGroup, match="requests older than 0 s of 'bodies'") as caught:
        reqs.sweep(0)
    assert len(caught.value.exceptions) == len(caplog.records) == 3
    assert len(reqs) == 0


def test_what_a_callback_ends_is_neither_counted_nor_logged_by_who_swept(
    reqs: arena.Requests, caplog: pytest.LogCaptureFixture
) -> None:
    for sweep in (lambda: reqs.sweep(0), lambda: reqs.close_group("g")):
        caplog.clear()
        reqs.open("first", group="g").on_discard(reqs.discard, "second")
        reqs.open("second", group="g")
        assert sweep() == 1
        assert not any("'second'" in record.getMessage() for record in caplog.records)
        assert len(reqs) == 0
    assert (reqs.stats().discarded, reqs.stats().swept) == (2, 2)


# The registry's own end


def test_a_closed_registry_has_ended_all_and_opens_no_more() -> None:
    reqs, said = arena.Requests("bodies"), []
    reqs.open("a").on_discard(said.append, "a")
    reqs.open("b", group="g").on_discard(said.append, "b")
    assert reqs.close() == 2
    assert said == ["a", "b"]
    with pytest.raises(arena.TickError, match="the registry 'bodies' is closed"):
        reqs.open("c")
    assert (len(reqs), reqs.stats().opened) == (0, 2)
    assert reqs.close() == 0


def test_no_request_is_opened_in_a_registry_that_is_closed_meanwhile() -> None:
    reqs = arena.Requests("bodies")

    class Closes:
        def __repr__(self) -> str:
            reqs.close()
            return "Closes"

    with pytest.raises(arena.TickError, match="is closed"):
        reqs.open(Closes())
    assert (len(reqs), reqs.stats().opened, arena.stats().ticks_open) == (0, 0, 0)


def test_the_with_of_a_registry_closes_it() -> None:
    with pytest.raises(ValueError, match="body"), arena.Requests("bodies") as reqs:
        reqs.open("a")
        raise ValueError("body")
    assert len(reqs) == 0
    with pytest.raises(arena.TickError, match="is closed"):
        reqs.open("b")


def test_a_registry_is_closed_by_async_with_too() -> None:
    async def main() -> arena.Requests:
        async with arena.Requests("bodies") as reqs:
            reqs.open("a")
        return reqs

    reqs = asyncio.run(main())
    assert (len(reqs), reqs.stats().swept) == (0, 1)


def test_the_warning_for_a_forgotten_registry_says_what_to_keep() -> None:
    other = arena.Requests("other")
    other.open("k")
    with pytest.warns(ResourceWarning, match="keep its registry, and discard it or close that"):
        del other
        gc.collect()


def test_registries_lists_those_that_are_alive(reqs: arena.Requests) -> None:
    other = arena.Requests("other")
    assert {reqs, other} <= set(requests.registries())
    del other
    gc.collect()
    assert [r.name for r in requests.registries()].count("other") == 0


def test_a_registry_that_is_going_is_listed_no_more_and_forgotten() -> None:
    listed: list[list[arena.Requests]] = []
    gc.collect()
    before = len(requests._alive)
    going = arena.Requests("going")
    watch = weakref.ref(going, lambda _: listed.append(requests.registries()))
    assert len(requests._alive) == before + 1
    del going
    gc.collect()
    assert watch() is None
    assert [r.name for r in listed[0]].count("going") == 0
    assert len(requests._alive) == before


def test_stats_are_a_record_that_does_not_change(reqs: arena.Requests) -> None:
    now = reqs.stats()
    assert now == requests.RequestStats("bodies", 0, 0, 0.0, 0, 0, 0, 0, 0, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        now.open = 3  # type: ignore[misc]


# Threads


@pytest.mark.ends
def test_any_thread_may_use_and_end_any_request(reqs: arena.Requests) -> None:
    r = reqs.open("k")
    buf = r.strbuf("one ")

    def elsewhere() -> tuple[str, int]:
        buf.append("two ")
        block = r.alloc(4)
        block[:] = b"four"
        return str(r.strdup("three ")), len(bytes(block))

    assert in_thread(elsewhere) == ("three ", 4)
    buf.append("three")
    assert buf == "one two three"
    threads: list[int] = []
    r.on_discard(lambda: threads.append(threading.get_ident()))
    ended_by = in_thread(lambda: (reqs.discard("k"), threading.get_ident()))
    assert ended_by == (True, threads[0])
    assert threads[0] != threading.get_ident()
    with pytest.raises(arena.StaleError):
        str(buf)
    assert arena.stats().scratch == 0


@pytest.mark.ends
def test_requests_live_on_when_the_thread_that_opened_them_ends(reqs: arena.Requests) -> None:
    r = in_thread(lambda: reqs.open("k"))
    assert isinstance(r, arena.Request)
    buf = in_thread(lambda: r.strbuf("x" * 100_000))
    gc.collect()
    assert r.open
    assert buf == "x" * 100_000
    assert reqs.discard("k")


def test_of_many_threads_that_discard_one_does_it(reqs: arena.Requests) -> None:
    for _ in range(50):
        said: list[int] = []
        reqs.open("k").on_discard(said.append, 1)
        barrier = threading.Barrier(4)

        def discard(barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(WAIT)
            return reqs.discard("k")

        with ThreadPoolExecutor(4) as pool:
            done = [f.result(WAIT) for f in [pool.submit(discard) for _ in range(4)]]
        assert sorted(done) == [False, False, False, True]
        assert said == [1]


def test_a_usual_tick_still_belongs_to_its_thread(reqs: arena.Requests) -> None:
    with arena.tick() as t, pytest.raises(arena.WrongThreadError):
        in_thread(lambda: t.alloc(1))


# Forks and exits


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_child_of_a_fork_has_the_requests_of_every_thread() -> None:
    code = """
import arena, os, threading
reqs = arena.Requests("bodies", limit="10 MiB")
kept = {}
def opens():
    r = reqs.open("k")
    kept["buf"] = r.strbuf("x" * 100_000)
    r.on_discard(lambda: print("told", os.getpid() == parent, flush=True))
parent = os.getpid()
thread = threading.Thread(target=opens)
thread.start(); thread.join()
reqs.open("other")
pid = os.fork()
if not pid:
    buf = kept["buf"]
    buf.append("y")
    assert len(buf) == 100_001 and arena.stats().ticks_open == 2, arena.stats()
    assert reqs.discard("k") and arena.stats().scratch == 0
    with arena.tick() as t:
        t.alloc(10)
    assert arena.stats().ticks_open == 1, arena.stats()
    raise SystemExit(0)
assert os.waitpid(pid, 0)[1] == 0
assert kept["buf"] == "x" * 100_000
assert reqs.discard("k") and arena.stats().scratch == 0 and arena.stats().ticks_open == 1
"""
    assert run(code) == "told False\ntold True\n"


def test_exit_with_open_requests_is_quiet() -> None:
    code = """
import arena
reqs = arena.Requests("bodies")
r = reqs.open("k")
r.on_discard(print, "not at the exit")
view = memoryview(r.strdup("x" * 100_000))
"""
    assert run(code) == ""


def test_nothing_of_requests_is_imported_before_it_is_asked_for() -> None:
    code = """
import sys, arena
assert "arena.requests" not in sys.modules
assert arena.Requests.__name__ == "Requests" and "arena.requests" in sys.modules
"""
    assert run(code) == ""

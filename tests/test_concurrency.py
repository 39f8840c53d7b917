"""Threads, asyncio tasks, executors and greenlets: none sees or harms another's ticks."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

import pytest

import arena
from arena._native import lib

T = TypeVar("T")
WAIT = 60.0  # seconds: the end of a test that hangs; nothing here takes that long

SIZES = (0, 1, 15, 16, 17, 100, 4000, 4096, 20_000, 65_472, 70_000, 300_000)
ABSURD = 2**60  # a counter that went below zero is larger


def threads(count: int, work: Callable[[int], object]) -> None:
    """Run work(0), work(1), ... in a thread each, started at once; raise what failed first."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def body(i: int) -> None:
        try:
            barrier.wait(WAIT)
            work(i)
        except BaseException as error:
            failures.append(error)

    started = [threading.Thread(target=body, args=(i,), name=f"worker {i}") for i in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in started), "a thread hangs"
    if failures:
        raise failures[0]


def elsewhere(work: Callable[[], T], name: str = "elsewhere") -> T:
    """Return what work() returns in another thread; raise what it raises."""
    results: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive(), "the thread hangs"
    if failures:
        raise failures[0]
    return results[0]


def run(code: str) -> str:
    """Return what a process of its own prints that runs this code and has nothing to say."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Threads take turns every 10 microseconds instead of 5 milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# Threads


def test_sixty_four_threads_each_have_their_own_ticks() -> None:
    def fill(block: arena.Block, byte: int) -> None:
        with memoryview(block) as view:
            view[:] = bytes([byte]) * len(block)

    def work(i: int) -> None:
        rng, mine = random.Random(i), i + 1  # never 0, which a fresh block holds
        escaped: list[tuple[memoryview, bytes]] = []
        for n in range(4):
            with arena.tick(f"thread {i}") as t:
                blocks = [t.alloc(rng.choice(SIZES)) for _ in range(12)]
                for block in blocks:
                    assert bytes(block) == bytes(len(block))
                    fill(block, mine)
                text = arena.strdup(f"text {i}-{n} é")
                buf = arena.strbuf()
                for k in range(20):
                    buf.append(f"{i}-{n}-{k} ")
                    with arena.tick(f"inner {i}") as inner:
                        scratch = inner.alloc(rng.choice(SIZES))
                        fill(scratch, 255 - mine)
                        buf.append(b".")  # grows in the outer tick
                        assert arena.current() is inner
                        if k % 10 == 0:
                            escaped.append((memoryview(scratch), bytes(scratch)))
                    assert scratch.stale
                assert arena.current() is t
                assert [set(bytes(b)) for b in blocks] == [
                    {mine} if len(b) else set() for b in blocks
                ]
                assert (t.name, text) == (f"thread {i}", f"text {i}-{n} é")
                assert buf == "".join(f"{i}-{n}-{k} ." for k in range(20))
            assert arena.current() is None
            assert all(handle.stale for handle in [*blocks, text, buf])
        for view, content in escaped:
            assert view == content
            view.release()

    before = arena.stats()
    threads(64, work)
    after = arena.stats()
    ticks = 64 * 4 * 21
    assert after.ticks_begun - before.ticks_begun == after.ticks_ended - before.ticks_ended == ticks
    assert (after.ticks_open, after.scratch, after.chunks) == (0, 0, 0)
    assert (after.pinned, after.pinned_count) == (before.pinned, before.pinned_count)


def test_stats_read_while_other_threads_work_are_never_absurd(many_switches: None) -> None:
    workers, rounds, done, deepest = 4, 60, threading.Event(), 2

    def work(i: int) -> None:
        if i == workers:  # the one that also gives the cache back while others take from it
            while not done.is_set():
                lib.arena_trim(0)
                look()
            return
        try:
            for _ in range(rounds):
                with arena.tick(limit="1 MiB") as t, arena.tick() as inner:
                    for size in (10, 20_000, 100_000):
                        t.alloc(size)
                        inner.strbuf("x" * size).truncate(1)
                    view = memoryview(inner.alloc(30_000))
                    t.cleanup(look)
                    kept = arena.strbuf_persist("y" * 1000)
                    kept.append("z" * 1000)
                view.release()
                kept.free()
        finally:
            ended.append(i)
            if len(ended) == workers:
                done.set()

    def look() -> None:
        now = arena.stats()
        assert now.limit is None
        for name in set(now.__slots__) - {"limit", "retention"}:
            assert 0 <= getattr(now, name) < ABSURD, name
        assert now.ticks_open - before.ticks_open <= deepest * workers
        assert now.scratch <= workers * 400_000
        assert now.chunks <= now.chunks_peak
        assert now.scratch_peak <= max(before.scratch_peak, 1 << 20)
        assert now.pinned_count - before.pinned_count <= workers
        assert now.persisted_count - before.persisted_count <= workers
        assert now.persisted - before.persisted <= workers * 4000

    ended: list[int] = []
    before = arena.stats()
    threads(workers + 1, work)
    assert arena.stats().ticks_open == before.ticks_open


def test_a_thread_that_is_started_in_a_tick_has_none_and_may_open_its_own() -> None:
    def work() -> tuple[arena.Tick | None, bool, arena.Tick | None]:
        before = arena.current()
        with pytest.raises(arena.TickError):
            arena.alloc(1)
        with arena.tick("inner") as t:
            right = arena.current() is t and arena.strdup("x") == "x"
        return before, right, arena.current()

    with arena.tick("outer") as outer:
        assert elsewhere(work) == (None, True, None)
        assert arena.current() is outer


def test_a_tick_of_a_thread_that_ends_is_ended_and_its_memory_comes_back() -> None:
    log: list[object] = []
    handles: list[arena.Block] = []

    def begin_and_leave() -> None:
        t = arena.begin("left open")
        handles.append(t.alloc(100_000))
        t.cleanup(lambda: log.append((threading.current_thread().name, bytes(handles[0][:1]))))

    with pytest.warns(ResourceWarning, match=r"tick 'left open' \(number \d+\) was never ended"):
        elsewhere(begin_and_leave, "leaver")
    assert log == [("leaver", b"\0")]
    assert handles[0].stale
    now = arena.stats()
    assert (now.ticks_open, now.scratch, now.chunks) == (0, 0, 0)


def test_a_tick_in_a_thread_local_is_ended_with_its_thread() -> None:
    local, log = threading.local(), []

    def cleanup() -> None:
        with arena.tick("of the cleanup") as own:  # the thread is half gone, and this still works
            log.append(str(own.strdup("ran")))

    def work() -> None:
        local.tick = arena.begin("local")
        local.tick.alloc(100_000)
        local.tick.cleanup(cleanup)

    with pytest.warns(ResourceWarning, match="tick 'local'"):
        elsewhere(work)
        gc.collect()
    assert log == ["ran"]
    assert (arena.stats().ticks_open, arena.stats().scratch) == (0, 0)


def test_a_thread_that_dies_of_an_exception_ends_its_ticks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[type[BaseException]] = []
    ticks: list[arena.Tick] = []
    log: list[int] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    def work() -> None:
        with arena.tick("outer") as outer, arena.tick("inner") as inner:
            for i, t in enumerate((outer, inner)):
                ticks.append(t)
                t.alloc(100_000)
                t.cleanup(log.append, i)
            raise LookupError

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT)
    assert (seen, log) == ([LookupError], [1, 0])
    assert not any(t.open for t in ticks)


def test_a_tick_that_outlives_its_thread_gives_its_memory_back_and_cleans_up_when_let_go_of() -> (
    None
):
    kept: list[arena.Tick] = []
    text: list[arena.Str] = []
    views: list[memoryview] = []
    log: list[str] = []

    def leave() -> None:
        kept.append(arena.begin("left behind"))
        text.append(kept[0].strdup("text"))
        views.append(memoryview(text[0]))
        kept[0].alloc(5_000_000)
        kept[0].cleanup(log.append, "cleanup")

    elsewhere(leave)
    deadline = time.monotonic() + WAIT
    while kept[0].open and time.monotonic() < deadline:
        time.sleep(0.001)  # Python has joined the thread; the system is about to end it
    now = arena.stats()
    assert (kept[0].open, now.ticks_open, now.scratch, now.chunks) == (False, 0, 0, 0)
    assert (text[0].stale, bytes(views[0]), now.pinned_count, log) == (True, b"text", 1, [])
    with pytest.raises(arena.TickError, match=r"left behind.*has ended"):
        kept[0].end()
    with pytest.raises(arena.TickError, match=r"left behind.*has ended"):
        kept[0].alloc(1)
    with pytest.raises(arena.StaleError, match="left behind"):
        bytes(text[0])
    with pytest.warns(ResourceWarning, match="left behind"):
        kept.clear()
    assert log == ["cleanup"]
    views[0].release()
    assert arena.stats().pinned_count == 0


def test_a_tick_without_memory_that_outlives_its_thread_is_nobody_elses() -> None:
    kept: list[arena.Tick] = []
    idents: list[int] = []

    def leave() -> None:
        kept.append(arena.begin("left behind"))
        idents.append(threading.get_ident())

    def intrude() -> bool:
        """The same ident as the dead thread's makes nobody the owner."""
        with pytest.raises(arena.WrongThreadError, match="left behind"):
            kept[0].alloc(1)
        assert arena.current() is None
        return threading.get_ident() == idents[0]

    elsewhere(leave)
    assert any(elsewhere(intrude) for _ in range(1000)), "no ident was used again"
    assert (kept[0].open, arena.stats().ticks_open) == (True, 1)
    with pytest.warns(ResourceWarning, match="left behind"):
        kept.clear()
    assert arena.stats().ticks_open == 0


# Asking for the second name with the exception of the first one set would leave the lock of
# threading.enumerate() locked for ever.
def test_ctrl_c_while_a_wrong_thread_error_names_the_threads_is_raised_as_such() -> None:
    code = """
import signal, threading, arena
signal.alarm(5)  # with that lock taken no thread starts or ends
def interrupted():
    threading.enumerate = enumerate_
    raise KeyboardInterrupt
def use():
    try:
        bytes(text)
    except BaseException as error:
        told.append(type(error).__name__)
told, enumerate_, t = [], threading.enumerate, arena.begin("mine")
text = t.strdup("text")
for function in (interrupted, enumerate_):
    threading.enumerate = function
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(3)
t.end()
print(*told)
"""
    assert run(code) == "KeyboardInterrupt WrongThreadError\n"


@pytest.mark.parametrize("how", ["close", "next", "collect"])
def test_a_generator_that_holds_a_tick_and_is_finished_by_another_thread_loses_no_memory(
    how: str,
) -> None:
    log: list[str] = []

    def produce() -> Iterator[arena.Str]:
        with arena.tick("held") as t:
            t.cleanup(lambda: log.append(threading.current_thread().name))
            t.alloc(100_000)
            yield t.strdup("text")

    generators = [produce()]
    text = next(generators[0])

    def finish() -> None:
        if how == "close":
            generators.pop().close()  # its own GeneratorExit wins over the WrongThreadError
        elif how == "next":
            with pytest.raises(arena.WrongThreadError, match="tick 'held'"):
                next(generators.pop())
        else:
            generators.clear()

    # The tick's `with` cannot end it there. Nobody holds it any more, and so it is collected.
    with pytest.warns(ResourceWarning, match="tick 'held'"):
        elsewhere(finish, "finisher")
        gc.collect()
    assert log == ["finisher"]
    assert text.stale
    now = arena.stats()
    assert (now.ticks_open, now.scratch, now.chunks) == (0, 0, 0)


# Persisted memory that threads share


def test_many_threads_read_one_persisted_handle(many_switches: None) -> None:
    content = "".join(f"line {i} é\n" for i in range(500))
    data = content.encode()
    text, buf = arena.strdup_persist(content), arena.strbuf_persist(content)

    def work(i: int) -> None:
        handle = (text, buf)[i % 2]
        for n in range(100):
            assert handle == content
            assert (str(handle), bytes(handle), len(handle)) == (content, data, len(data))
            assert handle[n : n + 9] == data[n : n + 9]
            with memoryview(handle) as view, view[n:] as part:
                assert part == data[n:]
            with arena.tick() as t:
                assert t.strdup(handle) == data
                assert arena.persist(handle) == data

    threads(12, work)
    text.free()
    buf.free()


def test_a_shared_buffer_takes_no_appends_while_a_thread_has_a_view() -> None:
    buf = arena.strbuf_persist("start")
    view = memoryview(buf)
    with pytest.raises(BufferError, match="1 live view"):
        elsewhere(lambda: buf.append(" more"))
    with pytest.raises(BufferError, match="1 live view"):
        elsewhere(buf.free)
    assert view == b"start"
    view.release()
    elsewhere(lambda: buf.append(" more"))
    assert buf == "start more"
    elsewhere(buf.free)
    with pytest.raises(arena.StaleError):
        buf.append("x")


def test_a_thread_appends_to_a_buffer_that_others_read(many_switches: None) -> None:
    buf = arena.strbuf_persist()
    pieces = [f"[{i}]" for i in range(4000)]
    whole = "".join(pieces)
    refused = 0
    grew = threading.Event()

    def work(i: int) -> None:
        nonlocal refused
        if i:
            grew.wait(WAIT)
            for _ in range(1000):
                assert whole.startswith(str(buf))
                with memoryview(buf) as view:
                    seen = bytes(view)
                    assert len(view) == len(buf)  # it cannot change size under the view
                    assert view == seen
                assert whole.startswith(seen.decode())
            return
        for piece in pieces:
            while True:
                try:
                    buf.append(piece)
                except BufferError:
                    refused += 1
                    time.sleep(0)
                else:
                    break
            grew.set()

    threads(5, work)
    assert buf == whole
    buf.free()


def test_freeing_races_with_readers_and_gives_documented_errors_only(many_switches: None) -> None:
    content = b"0123456789" * 300
    rounds = 40
    handles: list[arena.Block | arena.Str | arena.StrBuf] = []
    for n in range(rounds):
        made = (arena.strdup_persist(content), arena.strbuf_persist(content), None)[n % 3]
        if made is None:
            made = arena.alloc_persist(len(content))
            made[:] = content
        handles.append(made)
    count = arena.stats().persisted_count

    def work(i: int) -> None:
        for handle in handles:
            pauses = 3 * (i == 1)  # not for ever: who frees must come to it
            while not handle.stale:
                if i == 0:
                    with contextlib.suppress(BufferError):
                        handle.free()
                    continue
                try:
                    assert bytes(handle) == content
                    with memoryview(handle) as view:
                        if pauses:
                            pauses -= 1
                            time.sleep(0)  # the others go on while this view lives
                        assert view[5:] == content[5:]
                    assert b"90" in handle
                    assert arena.persist(handle) == content
                except arena.StaleError as error:
                    assert "was freed" in str(error)  # noqa: PT017

    threads(5, work)
    assert all(handle.stale for handle in handles)
    assert arena.stats().persisted_count == count - rounds


def test_persisted_memory_that_several_threads_free_is_freed_once(many_switches: None) -> None:
    handles = [arena.strdup_persist("x" * 100) for _ in range(300)]
    before, freed = arena.stats().persisted_count, []

    def work(i: int) -> None:
        for handle in handles:
            try:
                handle.free()
            except arena.StaleError:
                continue
            freed.append(handle)

    threads(4, work)
    assert len(freed) == len({id(handle) for handle in freed}) == len(handles)
    assert arena.stats().persisted_count == before - len(handles)


def test_threads_share_a_store(many_switches: None) -> None:
    before = arena.stats().persisted_count
    store = arena.Store()
    keys = [f"key {i}" for i in range(6)]

    def value_of(i: int) -> str:
        return f"value {i} " * (i % 7 + 1)

    def check(handle: arena.Block | arena.Str | arena.StrBuf) -> None:
        text = str(handle)
        assert text == value_of(int(text.split()[1]))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for n in range(1500):
            key = rng.choice(keys)
            # KeyError: another thread took it. StaleError: it has replaced the value. RuntimeError:
            # of the dict, which changed size while it was walked.
            with contextlib.suppress(KeyError, arena.StaleError, RuntimeError):
                match rng.randrange(8):
                    case 0 | 1:
                        store[key] = value_of(n)
                    case 2:
                        check(store[key])
                    case 3:
                        del store[key]
                    case 4:
                        taken = store.pop(key)
                        check(taken)  # nobody else's any more
                        taken.free()
                    case 5:
                        check(store.setdefault(key, value_of(n)))
                    case 6:
                        for value in store.values():
                            check(value)
                    case 7:
                        with arena.tick() as t:
                            store.update({key: t.strbuf(value_of(n))})
                            store.nbytes  # noqa: B018
            if n % 97 == 0:
                store.clear()

    threads(6, work)
    for value in store.values():
        check(value)
    assert arena.stats().persisted_count == before + len(store)
    store.clear()
    assert arena.stats().persisted_count == before


# Contexts


def test_a_context_copied_in_a_tick_has_none_once_that_is_over() -> None:
    with arena.tick("outer") as outer:
        with arena.tick("inner") as inner:
            context = contextvars.copy_context()
            assert context.run(arena.current) is inner
        assert context.run(arena.current) is outer
        assert context.run(arena.strdup, "in the outer one") == "in the outer one"
    assert context.run(arena.current) is None
    with pytest.raises(arena.TickError, match="no tick is open here"):
        context.run(arena.alloc, 1)

    def open_one() -> bool:
        with arena.tick("fresh") as t:
            return arena.current() is t

    assert context.run(open_one)
    assert context.run(arena.current) is None


def test_a_tick_begun_in_another_context_is_current_there_only() -> None:
    context = contextvars.copy_context()
    t = context.run(arena.begin, "there")
    assert arena.current() is None
    assert context.run(arena.current) is t
    assert t.strdup("usable by whoever holds it") == "usable by whoever holds it"
    t.end()
    assert context.run(arena.current) is None


# A tick that begins where another thread's is the context's innermost must not hide that one.
def test_a_tick_opened_in_a_thread_does_not_hide_the_one_that_the_context_came_from() -> None:
    def work() -> None:
        with arena.tick("of the thread") as t:
            t.alloc(10)

    with arena.tick("outer") as outer:
        context = contextvars.copy_context()
        assert context.run(arena.current) is outer
        elsewhere(partial(context.run, work))
        assert context.run(arena.current) is outer


def test_a_context_that_a_thread_hands_back_keeps_the_current_tick() -> None:
    """As asgiref.sync_to_async (Django) does: what the thread set is set in the task too."""

    def work() -> None:
        with arena.tick("of the thread") as t:
            t.alloc(10)

    with arena.tick("outer") as outer:
        context = contextvars.copy_context()
        elsewhere(partial(context.run, work))
        for variable in context:
            if variable.get(None) is not context[variable]:
                variable.set(context[variable])
        assert arena.current() is outer


# asyncio


def test_tasks_that_interleave_ticks_and_end_in_any_order_never_meet() -> None:
    rng = random.Random(7)
    log: list[int] = []

    async def work(i: int, pauses: Iterator[int], raises: bool) -> None:
        async def pause() -> None:
            for _ in range(next(pauses)):
                await asyncio.sleep(0)

        try:
            with arena.tick(f"task {i}") as t:
                t.cleanup(log.append, i)
                text, buf = arena.strdup(f"text {i}"), arena.strbuf()
                for n in range(5):
                    await pause()
                    assert arena.current() is t
                    buf.append(f"{i}.{n} ")
                    with arena.tick(f"inner {i}") as inner:
                        scratch = arena.alloc(1000 * (i + 1))
                        scratch[:] = bytes([i]) * len(scratch)
                        await pause()
                        assert arena.current() is inner
                        assert set(bytes(scratch)) == {i}
                    assert scratch.stale
                    assert buf == "".join(f"{i}.{k} " for k in range(n + 1))
                assert text == f"text {i}"
                if raises:
                    raise LookupError
        finally:
            assert arena.current() is None
            if "text" in locals():  # a cancelled task may have ended earlier
                assert text.stale

    async def main() -> list[object]:
        tasks = [
            asyncio.create_task(work(i, iter(rng.choices(range(6), k=10)), i % 3 == 0))
            for i in range(60)
        ]
        victims = tasks[1::3]
        for n in range(40):
            await asyncio.sleep(0)
            if n % 2:
                victims[n // 2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    kinds = [type(result) for result in results]
    assert kinds[::3] == [LookupError] * 20
    assert kinds[2::3] == [type(None)] * 20
    assert asyncio.CancelledError in kinds[1::3]
    assert sorted(log) == list(range(60))  # each cleanup once
    assert log != sorted(log)  # the order of the ends was another one than that of the begins
    now = arena.stats()
    assert (now.ticks_open, now.scratch, now.chunks) == (0, 0, 0)


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize("leave", ["return", "raise", "cancel"])
def test_cleanups_of_ticks_around_awaits_run_last_in_first_out(leave: str, decorated: bool) -> None:
    log: list[str] = []

    async def inner(gate: asyncio.Event, entered: asyncio.Event) -> str:
        text = arena.strdup("still here")
        arena.cleanup(log.append, "inner first")
        await asyncio.sleep(0)
        arena.cleanup(lambda: log.append(f"inner last: {text}"))
        with arena.tick("passing"):
            arena.cleanup(log.append, "passing")
            await asyncio.sleep(0)
        entered.set()
        await gate.wait()
        if leave == "raise":
            raise LookupError
        return "done"

    async def outer(gate: asyncio.Event, entered: asyncio.Event) -> str:
        arena.cleanup(log.append, "outer")
        if decorated:
            return await arena.tick("inner")(inner)(gate, entered)
        with arena.tick("inner"):
            return await inner(gate, entered)

    async def main() -> None:
        gate, entered = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(arena.tick("outer")(outer)(gate, entered))
        await entered.wait()
        assert log == ["passing"]
        if leave == "cancel":
            task.cancel()
        else:
            gate.set()
        expected = {"raise": LookupError, "cancel": asyncio.CancelledError}.get(leave)
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            assert await task == "done"

    asyncio.run(main())
    assert log == ["passing", "inner last: still here", "inner first", "outer"]


def test_a_decorated_async_function_has_a_tick_for_each_of_its_calls_that_run_at_once() -> None:
    seen: list[arena.Tick] = []

    @arena.tick
    async def work(i: int) -> str:
        t = arena.current()
        assert t is not None
        seen.append(t)
        buf = arena.strbuf(f"{i}:")
        for n in range(i % 5 + 1):
            await asyncio.sleep(0)
            assert arena.current() is t
            buf.append(str(n))
        return str(buf)

    async def main() -> list[str]:
        with arena.tick("of the parent") as parent:
            results = await asyncio.gather(*(work(i) for i in range(50)))
            assert arena.current() is parent
            return results

    assert asyncio.run(main()) == [f"{i}:{'01234'[: i % 5 + 1]}" for i in range(50)]
    assert len({t.number for t in seen}) == 50
    assert not any(t.open for t in seen)


def test_an_async_generator_ends_its_tick_when_it_is_closed_wherever_it_stands() -> None:
    ticks: list[arena.Tick] = []
    log: list[str] = []

    async def produce() -> object:
        with arena.tick("agen") as t:
            ticks.append(t)
            t.cleanup(log.append, "cleaned")
            for n in range(3):
                await asyncio.sleep(0)
                yield t.strdup(f"item {n}")

    async def main() -> None:
        async with contextlib.aclosing(produce()) as items:  # type: ignore[type-var]
            async for item in items:
                assert item == "item 0"
                break
            assert ticks[0].open
        assert (ticks[0].open, item.stale, log) == (False, True, ["cleaned"])
        abandoned = produce()
        await anext(abandoned)  # type: ignore[call-overload]
        # asyncio.run closes what is left when the loop ends

    asyncio.run(main())
    assert (ticks[1].open, log) == (False, ["cleaned"] * 2)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_an_eager_task_sees_its_creators_tick_and_hides_none() -> None:
    async def child() -> tuple[str | None, str | None]:
        outer = arena.current()
        with arena.tick("child") as t:
            await asyncio.sleep(0)
            assert arena.current() is t
        after = arena.current()
        return outer and outer.name, after and after.name

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        with arena.tick("parent") as parent:
            tasks = [asyncio.create_task(child()) for _ in range(5)]
            assert arena.current() is parent
            assert await asyncio.gather(*tasks) == [("parent", "parent")] * 5

    asyncio.run(main())


Way = Callable[[asyncio.AbstractEventLoop, ThreadPoolExecutor, Callable[[], T]], asyncio.Future[T]]
WAYS: dict[str, Way] = {  # type: ignore[type-arg]
    "to_thread": lambda loop, pool, fn: loop.create_task(asyncio.to_thread(fn)),
    "run_in_executor": lambda loop, pool, fn: loop.run_in_executor(pool, fn),
    "copy_context": lambda loop, pool, fn: asyncio.wrap_future(
        pool.submit(contextvars.copy_context().run, fn)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_work_sent_to_a_thread_has_no_tick_there_but_persisted_memory_and_its_own(way: str) -> None:
    def errors(scratch: arena.Str, t: arena.Tick, named: str = "") -> None:
        assert arena.current() is None
        with pytest.raises(arena.TickError, match="no tick is open" + named):
            arena.strdup("x")
        with pytest.raises(arena.TickError, match="no tick is open"):
            arena.end()
        for use in (lambda: str(scratch), lambda: memoryview(scratch), lambda: t.alloc(1), t.end):
            with pytest.raises(arena.WrongThreadError, match=r"tick 'request' .*'MainThread'"):
                use()

    def work(scratch: arena.Str, t: arena.Tick, kept: arena.StrBuf, view: memoryview) -> str:
        # The context was copied and tells why there is none; run_in_executor copies no context.
        carried = r".*\(tick 'request' \(number \d+\) belongs to the thread that began it"
        errors(scratch, t, "" if way == "run_in_executor" else carried)
        with arena.tick("of the thread") as own:
            assert arena.current() is own
            mine = own.strdup("own")
            kept.append(mine)
        assert mine.stale
        errors(scratch, t)  # as before: the tick that is over has changed nothing
        return bytes(view).decode()  # a view may cross: it pins

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(2) as pool, arena.tick("request") as t:
            scratch, kept = t.strdup("scratch"), arena.strbuf_persist("kept, ")
            for _ in range(4):  # threads are used again, with whatever their contexts hold
                with memoryview(scratch) as view:
                    call = partial(work, scratch, t, kept, view)
                    assert await WAYS[way](loop, pool, call) == "scratch"
                assert arena.current() is t
                assert arena.strdup("here it goes on") == "here it goes on"
            assert kept == "kept, " + "own" * 4

    asyncio.run(main())


@pytest.mark.ends
def test_work_in_threads_may_outlive_the_tick_of_the_task_that_sent_it() -> None:
    started, over = threading.Event(), threading.Event()

    def work(scratch: arena.Str) -> str:
        started.set()
        over.wait(WAIT)
        with pytest.raises(arena.StaleError):
            bytes(scratch)
        with pytest.raises(arena.TickError, match="no tick is open here"):
            arena.alloc(1)
        with arena.tick() as own:
            return str(own.strdup("went on"))

    async def main() -> str:
        with arena.tick("short") as t:
            task = asyncio.create_task(asyncio.to_thread(work, t.strdup("scratch")))
            while not started.is_set():
                await asyncio.sleep(0)
        over.set()
        return await task

    assert asyncio.run(main()) == "went on"


def test_event_loops_in_several_threads_keep_their_ticks_apart() -> None:
    async def work(i: int, n: int) -> None:
        with arena.tick(f"{i}.{n}") as t:
            buf = t.strbuf()
            for k in range(10):
                await asyncio.sleep(0)
                assert arena.current() is t
                buf.append(f"{i}.{n}.{k} ")
            assert buf == "".join(f"{i}.{n}.{k} " for k in range(10))

    async def main(i: int) -> None:
        with arena.tick("main") as t:
            await asyncio.gather(*(work(i, n) for n in range(20)))
            assert arena.current() is t

    threads(8, lambda i: asyncio.run(main(i)))


def test_a_cancelled_task_whose_cleanup_fails_stays_cancelled() -> None:
    log: list[str] = []

    async def work(entered: asyncio.Event) -> None:
        with arena.tick() as t:
            t.cleanup(log.append, "ran")
            t.cleanup(lambda: [][0])
            entered.set()
            await asyncio.Event().wait()

    async def main() -> asyncio.Task[None]:
        entered = asyncio.Event()
        task = asyncio.create_task(work(entered))
        await entered.wait()
        task.cancel()
        await asyncio.wait([task])
        return task

    assert asyncio.run(main()).cancelled()
    assert log == ["ran"]


# Greenlets: in a process of their own, for gevent changes the one that it is in
needs_gevent = pytest.mark.skipif(find_spec("gevent") is None, reason="gevent is not here")


@needs_gevent
def test_greenlets_of_gevent_interleave_ticks_on_one_thread() -> None:
    code = """
import random, arena, gevent
log = []
def work(i):
    rng = random.Random(i)
    def pause():
        for _ in range(rng.randrange(4)):
            gevent.sleep(0)
    with arena.tick(f"greenlet {i}") as t:
        t.cleanup(log.append, i)
        text, buf = arena.strdup(f"text {i}"), arena.strbuf()
        for n in range(6):
            pause()
            assert arena.current() is t
            buf.append(f"{i}.{n} ")
            with arena.tick("inner") as inner:
                scratch = arena.alloc(100 * (i + 1))
                scratch[:] = bytes([i]) * len(scratch)
                pause()
                assert arena.current() is inner
                assert set(bytes(scratch)) == {i}
            assert scratch.stale
        assert (text, buf) == (f"text {i}", "".join(f"{i}.{n} " for n in range(6)))
    assert text.stale and arena.current() is None

with arena.tick("hub") as t:
    text = t.strdup("of the main greenlet")
    gevent.joinall([gevent.spawn(work, i) for i in range(60)], raise_error=True)
    assert arena.current() is t and text == "of the main greenlet"
assert sorted(log) == list(range(60)) != log, log
now = arena.stats()
print(now.ticks_open, now.scratch, now.chunks)
"""
    assert run(code) == "0 0 0\n"


@needs_gevent
def test_a_greenlet_that_is_killed_ends_its_ticks_and_runs_their_cleanups() -> None:
    code = """
import arena, gevent
log, ticks = [], []
def work(i):
    with arena.tick("outer") as outer, arena.tick("inner") as inner:
        ticks.extend([outer, inner])
        text = inner.strdup(f"text {i}")
        outer.cleanup(log.append, "outer")
        inner.cleanup(lambda: log.append(str(text)))
        gevent.sleep(60)
greenlets = [gevent.spawn(work, i) for i in range(5)]
gevent.sleep(0)
assert [t.open for t in ticks] == [True] * 10
for i in (3, 0, 4):
    gevent.kill(greenlets[i])  # asynchronous, unlike its kill()
    gevent.sleep(0)
assert log == ["text 3", "outer", "text 0", "outer", "text 4", "outer"], log
gevent.killall(greenlets)
assert not any(t.open for t in ticks)
try:
    with gevent.Timeout(0.001), arena.tick("timed out") as t:
        gevent.sleep(60)
except gevent.Timeout:
    print(t.open, arena.stats().ticks_open)
left = gevent.spawn(work, 9)  # sleeps in its ticks when the interpreter exits
gevent.sleep(0)
"""
    assert run(code) == "False 0\n"


@needs_gevent
def test_a_program_that_gevent_has_patched_uses_ticks_in_its_threads_and_sockets() -> None:
    code = """
from gevent import monkey
monkey.patch_all()
import queue, socket, threading, time
import arena, gevent
from concurrent.futures import ThreadPoolExecutor

def work(i):  # "threads" are greenlets now
    with arena.tick(f"thread {i}") as t:
        buf = t.strbuf()
        for n in range(5):
            time.sleep(0)
            assert arena.current() is t
            buf.append(f"{i}.{n} ")
        done.put(str(buf))

done = queue.Queue()
with arena.tick("main") as t:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    got = {done.get() for _ in threads}
    assert got == {"".join(f"{i}.{n} " for n in range(5)) for i in range(20)}
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(6)))
    ours, theirs = socket.socketpair()
    sender = gevent.spawn(lambda: ours.sendall(t.strdup("x" * 500_000)))
    size = 0
    while size < 500_000:
        size += len(theirs.recv(65536))
    sender.get()
    ours.close(), theirs.close()
    text = t.strdup("scratch")
    def native():  # but these are threads
        assert arena.current() is None
        try:
            bytes(text)
        except arena.WrongThreadError:
            with arena.tick() as own:
                return str(own.strdup("apart"))
    assert gevent.get_hub().threadpool.apply(native) == "apart"
    assert arena.current() is t
print(arena.stats().ticks_open, arena.stats().scratch)
"""
    assert run(code) == "0 0\n"


@pytest.mark.skipif(find_spec("greenlet") is None, reason="greenlet is not here")
def test_plain_greenlets_switch_in_ticks_and_end_them_when_they_are_collected() -> None:
    code = """
import contextvars, gc, random
import arena
from greenlet import GreenletExit, getcurrent, greenlet
rng, log, main = random.Random(3), [], getcurrent()

def work(i):
    with arena.tick(f"greenlet {i}") as t:
        t.cleanup(log.append, i)
        buf = t.strbuf()
        for n in range(10):
            buf.append(f"{i}.{n} ")
            assert arena.current() is t
            main.switch()
            assert arena.current() is t
        assert buf == "".join(f"{i}.{n} " for n in range(10))

with arena.tick("main") as t:
    alive = [greenlet(work) for _ in range(30)]
    order = dict(zip(alive, range(30)))
    while alive:
        one = rng.choice(alive)
        one.switch(*[] if one else [order[one]])
        assert arena.current() is t
        alive = [g for g in alive if not g.dead]
    assert sorted(log) == list(range(30)) != log

    shares = greenlet(lambda: arena.current())  # with the context of whoever made it
    shares.gr_context = contextvars.copy_context()
    assert shares.switch() is t

    dropped = greenlet(work)
    dropped.switch(77)
    assert arena.stats().ticks_open == 2
    del dropped, one, order  # suspended in its tick, and nobody can switch to it any more
    gc.collect()
    assert (log[-1], arena.stats().ticks_open) == (77, 1)

    thrown = greenlet(work)
    thrown.switch(78)
    try:
        thrown.throw(LookupError)
    except LookupError:
        assert (log[-1], arena.stats().ticks_open) == (78, 1)
print(arena.stats().ticks_open, arena.stats().scratch)
"""
    assert run(code) == "0 0\n"


def test_nothing_here_warns_where_all_ticks_are_ended() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads(4, lambda i: asyncio.run(_tick_and_sleep()))
        gc.collect()
    assert [w.message for w in caught if "tick" in str(w.message)] == []


@arena.tick
async def _tick_and_sleep() -> None:
    arena.alloc(1000)
    await asyncio.sleep(0)

"""Ticks: every way in and out of one, the order of ends, cleanups, and who the current one is."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import arena


def test_a_tick_ends_on_return_and_on_an_exception() -> None:
    def leave_by_return() -> arena.Str:
        with arena.tick() as t:
            return t.strdup("x")

    assert leave_by_return().stale
    kept = []
    with pytest.raises(ZeroDivisionError), arena.tick() as t:
        kept.append(t.strdup("x"))
        1 / 0  # noqa: B018
    assert kept[0].stale
    assert not t.open


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, Exception])
def test_a_tick_ends_whatever_is_raised(error: type[BaseException]) -> None:
    with pytest.raises(error), arena.tick() as t:
        raise error
    assert not t.open


def test_a_tick_ends_when_its_task_is_cancelled() -> None:
    seen: list[arena.Tick] = []

    async def work() -> None:
        with arena.tick("work") as t:
            seen.append(t)
            t.alloc(1000)
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        assert seen[0].open
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not seen[0].open


def test_a_tick_ends_when_its_generator_is_closed_or_collected() -> None:
    def produce() -> Iterator[arena.Tick]:
        with arena.tick() as t:
            yield t
            yield t

    generator = produce()
    first = next(generator)
    generator.close()
    assert not first.open
    second = next(produce())
    gc.collect()
    assert not second.open


def test_sys_exit_in_a_tick_leaves_with_its_own_status_and_says_nothing() -> None:
    code = "import arena, sys\nwith arena.tick() as t:\n    t.alloc(10)\n    sys.exit(7)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (7, b"")


def test_an_exit_with_open_ticks_is_quiet() -> None:
    code = (
        "import arena\nt = arena.begin('left open'); t.alloc(100000)\n"
        "v = memoryview(t.strdup('x')); t.cleanup(print, 'cleanup')"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_decorator_opens_a_fresh_tick_for_each_call() -> None:
    numbers = []

    @arena.tick("named", limit="1 KiB")
    def work(depth: int) -> str:
        """Docs stay."""
        t = arena.current()
        assert t is not None
        numbers.append(t.number)
        assert (t.name, t.limit) == ("named", 1024)
        if depth:
            work(depth - 1)
            assert arena.current() is t
        return "done"

    assert work(2) == "done"
    assert len(set(numbers)) == 3
    assert work.__doc__ == "Docs stay."
    assert arena.current() is None


def test_the_decorator_without_parentheses_names_the_tick_after_the_function() -> None:
    @arena.tick
    def work() -> str | None:
        t = arena.current()
        return t.name if t else None

    assert work().endswith("work")


def test_the_decorator_spans_the_whole_of_an_async_def() -> None:
    seen = []

    @arena.tick("async")
    async def work() -> None:
        t = arena.current()
        await asyncio.sleep(0)
        assert arena.current() is t
        seen.append(t)
        raise ValueError("out")

    async def main() -> list[object]:
        return await asyncio.gather(work(), work(), return_exceptions=True)

    assert [type(result) for result in asyncio.run(main())] == [ValueError, ValueError]
    assert seen[0] is not seen[1]
    assert not any(t.open for t in seen)


def test_the_decorator_spans_the_whole_iteration_of_a_generator_function() -> None:
    @arena.tick("gen")
    def produce() -> Iterator[arena.Str]:
        yield arena.strdup("one")
        yield arena.strdup("two")

    handles = []
    for handle in produce():
        assert not handle.stale
        handles.append(handle)
    assert all(handle.stale for handle in handles)


def test_the_decorator_refuses_an_async_generator_function_and_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="async generator"):

        @arena.tick("agen")
        async def produce():  # type: ignore[no-untyped-def]
            yield 1

    with pytest.raises(TypeError, match="decorates functions"):
        arena.tick("x")(3)  # type: ignore[type-var]
    for wrong in (classmethod, staticmethod):
        with pytest.raises(TypeError, match=f"below @{wrong.__name__}"):
            arena.tick("x")(wrong(print))
        with pytest.raises(TypeError, match=f"below @{wrong.__name__}"):
            arena.tick(wrong(print))
    with pytest.raises(TypeError, match="the class Wrong"):
        arena.tick(type("Wrong", (), {}))
    with pytest.raises(TypeError, match="decorates"):
        arena.tick("x")()  # type: ignore[call-arg]


def test_an_inner_ticks_memory_dies_at_the_inner_end_and_the_outers_stays() -> None:
    with arena.tick("outer") as outer:
        kept = outer.strdup("outer")
        with arena.tick("inner") as inner:
            gone = inner.strdup("inner")
            assert arena.current() is inner
        assert gone.stale
        assert kept == "outer"
        assert arena.current() is outer


def test_a_buffer_grows_in_the_tick_that_made_it_and_not_in_the_current_one() -> None:
    with arena.tick("outer") as outer:
        buf = outer.strbuf("start ")
        with arena.tick("inner") as inner:
            for i in range(10_000):
                buf.append(f"{i} ")
            assert inner.used == 0
        assert str(buf).startswith("start 0 1 2 ")
        assert len(buf) == outer.used


def test_ticks_may_end_in_any_order() -> None:
    a, b, c = arena.begin("a"), arena.begin("b"), arena.begin("c")
    kept = [t.strdup(t.name or "") for t in (a, b, c)]
    b.end()
    assert arena.current() is c
    assert [h.stale for h in kept] == [False, True, False]
    c.end()
    assert arena.current() is a
    a.end()
    assert arena.current() is None


def test_two_tasks_that_interleave_ticks_and_end_them_in_the_wrong_order_never_meet() -> None:
    log: list[str] = []

    async def work(name: str, first: float, second: float) -> None:
        with arena.tick(name) as t:
            mine = arena.strdup(name)
            await asyncio.sleep(first)
            assert arena.current() is t
            buf = arena.strbuf()
            await asyncio.sleep(second)
            buf.append(mine)
            assert buf == name
            log.append(name)
        assert mine.stale

    async def main() -> None:
        await asyncio.gather(work("early", 0.0, 0.03), work("late", 0.01, 0.0))

    asyncio.run(main())
    assert log == ["late", "early"]


def test_a_task_sees_the_tick_it_was_created_in_and_none_once_that_has_ended() -> None:
    async def child(gate: asyncio.Event) -> list[str | None]:
        before = arena.current()
        await gate.wait()
        after = arena.current()
        return [t.name if t else None for t in (before, after)]

    async def main() -> list[str | None]:
        gate = asyncio.Event()
        with arena.tick("parent"):
            task = asyncio.create_task(child(gate))
            await asyncio.sleep(0)
        gate.set()
        return await task

    assert asyncio.run(main()) == ["parent", None]


def test_a_context_that_is_copied_into_a_thread_shows_no_tick_there() -> None:
    results: list[object] = []

    def work() -> None:
        results.append(arena.current())
        with pytest.raises(arena.TickError, match="no tick is open in this thread"):
            arena.strdup("x")
        with arena.tick("mine") as t:
            results.append(arena.current() is t)

    with arena.tick("main"):
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(work,))
        thread.start()
        thread.join()
    assert results == [None, True]


def test_a_foreign_value_in_the_context_variable_is_ignored() -> None:
    with arena.tick():
        context = contextvars.copy_context()
        variable = next(var for var in context if var.name == "arena.tick")
    token = variable.set("junk")
    assert arena.current() is None
    with arena.tick() as t:
        assert arena.current() is t
    variable.reset(token)


def test_a_second_end_is_an_error() -> None:
    t = arena.begin("twice")
    t.end()
    with pytest.raises(arena.TickError, match=r"tick 'twice' \(number \d+\) has ended already"):
        t.end()
    with pytest.raises(arena.TickError, match="has ended already"), arena.tick() as t:
        t.end()


def test_a_second_end_does_not_hide_the_bodys_exception() -> None:
    with pytest.raises(ZeroDivisionError) as caught, arena.tick() as t:
        t.end()
        1 / 0  # noqa: B018
    assert any("has ended already" in note for note in caught.value.__notes__)


def test_a_tick_opens_once() -> None:
    t = arena.tick("once")
    with pytest.raises(arena.TickError, match="has not begun"):
        t.end()
    with t, pytest.raises(arena.TickError, match="has begun before"):
        t.__enter__()
    with pytest.raises(arena.TickError, match="has begun before"), t:
        pass


def test_another_thread_can_neither_end_a_tick_nor_use_it() -> None:
    t = arena.begin("mine")
    s, b, buf = t.strdup("text"), t.alloc(8), t.strbuf("buf")
    uses = [
        t.end,
        lambda: t.alloc(1),
        lambda: t.strdup("x"),
        t.strbuf,
        lambda: t.cleanup(print),
        lambda: bytes(s),
        lambda: len(b),
        lambda: memoryview(buf),
        lambda: buf.append("x"),
        lambda: buf.extend([]),
        lambda: buf.join("", []),
        lambda: s == "text",
        lambda: hash(s),
    ]
    errors: list[BaseException] = []

    def work() -> None:
        for use in uses:
            try:
                use()
            except arena.WrongThreadError as error:
                errors.append(error)

    thread = threading.Thread(target=work, name="intruder")
    thread.start()
    thread.join()
    assert len(errors) == len(uses)
    assert all("'MainThread'" in str(e) and "'intruder'" in str(e) for e in errors)
    assert t.open
    assert (s, buf) == ("text", "buf")
    t.end()


def test_a_tick_of_a_thread_that_has_ended_says_so() -> None:
    made: list[arena.Tick] = []
    thread = threading.Thread(target=lambda: made.append(arena.begin("orphan")))
    thread.start()
    thread.join()
    with pytest.raises(arena.WrongThreadError, match="a thread that has ended"):
        made[0].end()
    with pytest.warns(ResourceWarning, match="orphan"):
        made.clear()


def test_a_tick_that_is_never_ended_and_is_collected_gives_its_memory_back_and_warns() -> None:
    t = arena.begin("lost")
    handle = t.alloc(100_000)
    with pytest.warns(ResourceWarning, match=r"tick 'lost' \(number \d+\) was never ended"):
        del t
    assert handle.stale
    assert arena.stats().scratch == 0


def test_a_lost_tick_in_a_cycle_with_its_own_cleanup_is_collected_too() -> None:
    ran = []
    t = arena.begin("cycle")
    t.cleanup(lambda tick: ran.append(tick.open), t)
    with pytest.warns(ResourceWarning, match="cycle"):
        del t
        gc.collect()
    assert ran == [False]


def test_a_lost_tick_whose_warning_is_an_error_is_reported_and_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append(u.exc_value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena.begin("lost")
    assert isinstance(seen[0], ResourceWarning)


def test_cleanups_run_last_in_first_out_each_once_while_the_memory_can_be_read() -> None:
    log: list[object] = []
    with arena.tick() as t:
        s = t.strdup("still here")
        t.cleanup(log.append, "first")
        t.cleanup(lambda *args, **kwargs: log.append((args, kwargs)), 1, key=2)
        t.cleanup(lambda: log.append(str(s)))
    assert log == ["still here", ((1,), {"key": 2}), "first"]


def test_the_memory_of_a_tick_is_all_there_while_its_cleanups_run() -> None:
    seen: list[object] = []
    with arena.tick() as t:
        block = t.alloc(5_000_000)  # of its own mapping, which goes at once
        block[-1] = 7
        t.cleanup(lambda: seen.append((block[-1], arena.stats().scratch, t.used)))
        t.cleanup(lambda: seen.append(arena.stats().chunks > 5_000_000))
    assert seen == [True, (7, 5_000_000, 5_000_000)]


def test_what_a_cleanup_was_given_is_let_go_of_before_the_next_one_runs() -> None:
    class Given:
        """Can be told when it is gone."""

    given, seen = Given(), []
    gone = weakref.ref(given)
    with arena.tick() as t:
        t.cleanup(lambda: seen.append(gone() is None))
        t.cleanup(id, given)
        del given
    assert seen == [True]


def test_all_cleanups_run_when_some_fail_and_the_failures_come_as_one_group() -> None:
    log: list[int] = []

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(ExceptionGroup) as caught, arena.tick("group") as t:
        t.cleanup(log.append, 1)
        t.cleanup(fail, ValueError("v"))
        t.cleanup(log.append, 2)
        t.cleanup(fail, LookupError("l"))
    assert log == [2, 1]
    assert [type(e) for e in caught.value.exceptions] == [LookupError, ValueError]
    assert "tick 'group'" in str(caught.value)
    assert arena.stats().scratch == 0


@pytest.mark.parametrize("leave", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_sys_exit_in_a_cleanup_are_raised_as_such_once_all_cleanups_have_run(
    leave: type[BaseException],
) -> None:
    log: list[int] = []

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(leave) as caught, arena.tick() as t:
        t.cleanup(log.append, 1)
        t.cleanup(fail, ValueError("told in the note"))
        t.cleanup(fail, leave())
    assert log == [1]
    assert "told in the note" in "".join(caught.value.__notes__)


def test_a_body_exception_that_takes_no_notes_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SealedError(Exception):
        __notes__ = 5  # type: ignore[assignment]

    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: told.append(u.exc_value))
    with pytest.raises(SealedError), arena.tick() as t:
        t.cleanup(lambda: [][0])
        raise SealedError
    assert len(told) == 1


def test_finalizers_may_begin_and_end_ticks_inside_of_any_call() -> None:
    # CPython 3.11 collects inside of allocations, and so in the middle of a begin.
    code = """
import arena, gc, random, sys, warnings
warnings.simplefilter("ignore")
random.seed(int(sys.argv[1]))
live, ran, accepted, depth = [], [], 0, 0
def end_any():
    try:
        t = live.pop(random.randrange(len(live) or 1))
    except IndexError:
        return  # finalizers were here meanwhile
    t.end()
class InCycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        global depth
        if depth > 3:
            return
        depth += 1
        if random.random() < 0.5:
            live.append(arena.begin("by a finalizer"))
        if random.random() < 0.5:
            end_any()
        depth -= 1
gc.set_threshold(1, 1, 1)
for i in range(6000):
    InCycle()
    if random.random() < 0.5:
        live.append(arena.begin("by the loop"))
    else:
        end_any()
    t = arena.begin("with a cleanup")
    live.append(t)
    try:
        t.cleanup(ran.append, i)
        accepted += 1
    except arena.TickError:
        pass  # a finalizer has ended it
    del t
gc.set_threshold(700, 10, 10)
while live:
    end_any()
gc.collect()
while live:
    end_any()
assert len(ran) == accepted, (len(ran), accepted)
assert arena.stats().ticks_open == 0
print("done")
"""
    for seed in range(4):
        done = subprocess.run(
            [sys.executable, "-c", code, str(seed)], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_name_that_is_a_str_subclass_runs_no_code_inside_of_arena() -> None:
    class Name(str):
        def __del__(self) -> None:
            arena.current()

        def __repr__(self) -> str:
            raise AssertionError("asked for its repr")

    for _ in range(50):
        with arena.tick(Name("x")) as t:
            assert type(t.name) is str
            repr(t.strdup("y"))


def test_a_text_whose_methods_end_the_tick_runs_none_of_them() -> None:
    class Evil(str):
        def isascii(self) -> bool:
            raise AssertionError("asked whether it is ASCII")

    with arena.tick() as t:
        assert len(arena.strdup(Evil("x" * 5000))) == 5000
        assert t.used == 5000


def test_a_cleanup_whose_keywords_end_the_tick_is_refused_and_not_lost() -> None:
    class Key(str):
        def __hash__(self) -> int:
            if armed:
                armed.clear()
                t.end()
            return super().__hash__()

    armed: list[int] = []
    keywords = {Key("a"): 1}
    t = arena.begin("ends")
    armed.append(1)
    with pytest.raises(arena.TickError, match="has ended already"):
        t.cleanup(print, **keywords)


def test_failing_cleanups_never_hide_the_bodys_exception() -> None:
    with pytest.raises(ZeroDivisionError) as caught, arena.tick() as t:
        t.cleanup(lambda: [][0])
        1 / 0  # noqa: B018
    assert "IndexError" in "".join(caught.value.__notes__)
    assert "IndexError" in "".join(traceback.format_exception(caught.value))


def test_a_cleanup_can_neither_end_its_tick_nor_allocate_in_it_nor_add_cleanups() -> None:
    errors = []
    with arena.tick("ending") as t:
        buf = t.strbuf("content")

        def misuse() -> None:
            calls = [
                t.end,
                lambda: t.alloc(1),
                lambda: t.strdup("x"),
                lambda: t.cleanup(print),
                lambda: buf.append("x"),
                buf.clear,
                lambda: arena.strdup("x"),
            ]
            for call in calls:
                with pytest.raises(arena.TickError, match="ending") as caught:
                    call()
                errors.append(caught.value)
            assert buf == "content"

        t.cleanup(misuse)
    assert len(errors) == 7


def test_a_cleanup_may_open_a_tick_of_its_own() -> None:
    seen = []

    def work() -> None:
        with arena.tick("own") as own:
            seen.append(str(own.strdup("fine")))

    with arena.tick("outer") as t:
        t.cleanup(work)
    assert seen == ["fine"]


def test_a_limit_is_exact_to_the_byte_and_leaves_the_tick_usable() -> None:
    with arena.tick("small", limit=100) as t:
        t.alloc(60)
        buf = t.strbuf("x" * 40)
        assert (t.used, t.limit) == (100, 100)
        message = r"tick 'small' .*1 bytes requested, 100 used, 100 allowed"
        with pytest.raises(arena.LimitError, match=message):
            buf.append("y")
        with pytest.raises(arena.LimitError):
            t.alloc(1)
        assert buf == "x" * 40
        t.alloc(0)
        buf.truncate(39)
        buf.append("z")
        assert buf == "x" * 39 + "z"
        with pytest.raises(MemoryError):  # which a LimitError also is
            t.strdup("!")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("64 MiB", 64 << 20),
        ("1kB", 1000),
        ("7", 7),
        ("0 B", 0),
        (5, 5),
        ("2 KB", 2000),
        ("3 MB", 3 * 10**6),
        ("4 GB", 4 * 10**9),
        ("5 TB", 5 * 10**12),
        ("2 KiB", 2 << 10),
        ("3 GiB", 3 << 30),
        ("4 TiB", 4 << 40),
    ],
)
def test_a_limit_is_a_number_or_a_text_with_a_unit(limit: int | str, expected: int) -> None:
    with arena.tick(limit=limit) as t:
        assert t.limit == expected


@pytest.mark.parametrize(
    "limit",
    [
        "",
        "\ud800",
        "1\0",
        "MiB",
        "1.5 MiB",
        "-1",
        "1 mib",
        "1  MiB",
        "9" * 30,
        "16777216 TiB",
        -1,
        2**63,
    ],
)
def test_a_limit_that_makes_no_sense_is_a_value_error(limit: int | str) -> None:
    with pytest.raises(ValueError, match=r"a limit is"):
        arena.tick(limit=limit)


@pytest.mark.parametrize(
    "call",
    [
        lambda: arena.tick(3),
        lambda: arena.tick(b"bytes"),
        lambda: arena.tick("a", "b"),
        lambda: arena.tick("a", name="b"),
        lambda: arena.tick(unknown=1),
        lambda: arena.tick(limit=1.5),
        lambda: arena.begin(print),
        lambda: arena.tick().__exit__(),
    ],
)
def test_wrong_arguments_of_a_tick_are_type_errors(call: object) -> None:
    with pytest.raises(TypeError):
        call()  # type: ignore[operator]


def test_escapes_is_allow_or_raise() -> None:
    with pytest.raises(ValueError, match='"allow" or "raise"'):
        arena.tick(escapes="ignore")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match='"allow" or "raise"'):
        arena.tick(escapes=True)  # type: ignore[call-overload]


def test_escapes_raise_tells_of_views_after_the_tick_has_ended() -> None:
    with pytest.raises(arena.EscapeError, match="pin 1 chunk"), arena.tick(escapes="raise") as t:
        view = memoryview(t.strdup("escaped"))
    assert not t.open
    assert bytes(view) == b"escaped"


def test_an_escape_never_hides_the_bodys_exception() -> None:
    with pytest.raises(ZeroDivisionError) as caught, arena.tick(escapes="raise") as t:
        view = memoryview(t.strdup("escaped"))
        1 / 0  # noqa: B018
    assert any("EscapeError" in note for note in caught.value.__notes__)
    assert bytes(view) == b"escaped"


def test_allocating_with_no_tick_open_says_what_to_do() -> None:
    for call in (lambda: arena.alloc(1), lambda: arena.strdup("x"), arena.strbuf, arena.end):
        with pytest.raises(arena.TickError, match=r"with arena\.tick\(\):"):
            call()
    with pytest.raises(arena.TickError):
        arena.cleanup(print)


def test_module_calls_work_on_the_current_tick() -> None:
    log: list[str] = []
    t = arena.begin("current")
    handles = [arena.alloc(3), arena.strdup("abc"), arena.strbuf("def")]
    arena.cleanup(log.append, "cleaned")
    assert t.used == 9
    arena.end()
    assert not t.open
    assert log == ["cleaned"]
    assert all(handle.stale for handle in handles)


@pytest.mark.as_ever
def test_a_hundred_thousand_ticks_may_be_open_at_once() -> None:
    ticks = [arena.begin() for _ in range(100_000)]
    last = arena.strdup("x")
    for t in ticks:
        t.end()
    assert last.stale
    assert arena.current() is None


@pytest.mark.parametrize("limit", [None, 1000])
def test_ticks_that_overlap_without_nesting_do_not_chain_their_past_together(
    limit: int | None,
) -> None:
    code = f"""
import arena, psutil
me = psutil.Process()
around = arena.begin(limit={limit})
t = arena.begin()
def overlap(n):
    global t
    for _ in range(n):
        following = arena.begin()
        t.end()
        t = following
overlap(1000)
before = me.memory_info().rss
overlap(100_000)
print(me.memory_info().rss - before)
t.end()
around.end()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout) < 2_000_000  # 100,000 chained scopes would be some 30 MB


@pytest.mark.ends
def test_handles_kept_in_a_closure_a_generator_and_a_traceback_are_stale_and_harmless() -> None:
    def closure_over(t: arena.Tick):  # type: ignore[no-untyped-def]
        handle = t.strdup("closure")
        return lambda: bytes(handle)

    def generate(t: arena.Tick) -> Iterator[bytes]:
        handle = t.strbuf("generator")
        yield bytes(handle)
        yield bytes(handle)

    try:
        with arena.tick("t") as t:
            closure, generator = closure_over(t), generate(t)
            assert (closure(), next(generator)) == (b"closure", b"generator")
            local = t.alloc(10)  # noqa: F841
            raise LookupError
    except LookupError as error:
        frame = error.__traceback__.tb_frame  # type: ignore[union-attr]
        kept = frame.f_locals["local"]
    for use in (closure, lambda: next(generator), lambda: bytes(kept)):
        with pytest.raises(arena.StaleError, match="has ended"):
            use()


def test_a_tick_that_has_not_begun_says_so_and_has_no_number() -> None:
    t = arena.tick(name="later")
    assert (t.name, t.number, t.used, t.open, t.limit) == ("later", 0, 0, False, None)
    assert repr(t) == "<arena.Tick 'later', not begun>"
    assert repr(arena.tick()) == "<arena.Tick, not begun>"
    with pytest.raises(arena.TickError, match="has not begun"):
        t.end()
    with pytest.raises(arena.TickError, match="has not begun"):
        t.strbuf()
    with pytest.raises(arena.TickError, match="has not begun"):
        t.cleanup(print)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t(),
        lambda t: t(print, print),
        lambda t: t(fn=print),
        lambda t: t.cleanup(),
        lambda t: t.cleanup(3),
        lambda t: t.__exit__(None, None),
        lambda t: t.strbuf("a", "b"),
        lambda t: t.strbuf(text="a"),
        lambda t: arena.strbuf("a", "b"),
        lambda t: arena.strbuf_persist(text="a"),
        lambda t: arena.cleanup(),
        lambda t: arena.tick("a", "b"),
        lambda t: arena.tick("a", name="b"),
        lambda t: arena.begin(print),
    ],
)
def test_a_wrong_number_of_arguments_is_a_type_error(call: Any) -> None:
    with arena.tick() as t, pytest.raises(TypeError):
        call(t)


def test_nothing_given_as_the_initial_text_is_no_text() -> None:
    with arena.tick() as t:
        assert t.strbuf(None) == arena.strbuf(initial=None) == arena.strbuf_persist() == ""


def test_what_a_context_holds_of_a_tick_says_what_it_is() -> None:
    with arena.tick("shown") as t:
        held = [value for value in contextvars.copy_context().values() if "shown" in repr(value)]
    assert [repr(value) for value in held] == [f"<arena scope of tick 'shown' (number {t.number})>"]


def test_a_lost_tick_whose_cleanup_fails_is_reported(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(args.exc_value))
    t = arena.begin("lost")
    t.cleanup(lambda: 1 / 0)
    del t
    assert [type(error) for error in told] == [ExceptionGroup]
    assert [type(error) for error in told[0].exceptions] == [ZeroDivisionError]
    assert [str(w.message) for w in recwarn if "was never ended" in str(w.message)]


def test_a_warning_about_a_lost_tick_may_keep_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def showwarning(message: Any, *rest: Any, **more: Any) -> None:
        kept.extend(found for found in gc.get_objects() if isinstance(found, arena.Tick))

    t = arena.begin("kept after all")
    t.alloc(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", showwarning)
        del t
    ours = [t for t in kept if t.name == "kept after all"]
    assert (len(ours), ours[0].open, arena.stats().scratch) == (1, False, 0)


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_a_note_does_not_tell_the_notes_before_it_again() -> None:
    def walk(depth: int) -> None:
        with arena.tick() as t:
            t.cleanup(lambda: 1 / 0)
            if depth:
                walk(depth - 1)
            raise LookupError("the body's own")

    with pytest.raises(LookupError) as caught:
        walk(60)
    notes = notes_of(caught.value)
    assert len(notes) == 61
    assert all("ZeroDivisionError" in note and "LookupError" not in note for note in notes)
    assert max(map(len, notes)) < 1000


def test_a_cause_of_a_failure_is_told_unless_it_is_the_bodys_exception() -> None:
    def fail() -> None:
        try:
            {}["its own"]
        except KeyError as error:
            raise RuntimeError("failed") from error

    with pytest.raises(LookupError) as caught, arena.tick() as t:
        t.cleanup(fail)
        raise LookupError("the body's own")
    (note,) = notes_of(caught.value)
    assert "RuntimeError: failed" in note
    assert "KeyError: 'its own'" in note
    assert "the body's own" not in note


def test_an_exception_that_goes_through_tick_after_tick_gets_a_bounded_number_of_notes() -> None:
    error = LookupError("one for all")
    for _ in range(300):
        with pytest.raises(LookupError), arena.tick() as t:
            t.cleanup(lambda: 1 / 0)
            raise error
    notes = notes_of(error)
    assert len(notes) == 100
    assert notes[-1].startswith("arena adds no more notes")
    assert sum(map(len, notes)) < 100_000


def test_a_note_of_many_failures_is_shortened() -> None:
    def fail() -> None:
        raise ValueError("x" * 100_000)

    with pytest.raises(LookupError) as caught, arena.tick() as t:
        t.cleanup(fail)
        raise LookupError
    (note,) = notes_of(caught.value)
    assert "characters are left out" in note
    assert len(note) < 21_000


def test_a_tick_cannot_be_pickled_or_copied() -> None:
    import copy
    import pickle

    t = arena.tick("t")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            pickle.dumps(t, protocol)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.copy(t)


@pytest.mark.parametrize("limit", [True, False])
def test_a_bool_is_no_limit(limit: bool) -> None:
    with pytest.raises(TypeError, match="a limit is a number of bytes, or None"):
        arena.tick(limit=limit)
    with pytest.raises(TypeError, match="a limit is a number of bytes, or None"):
        arena.set_limit(limit)

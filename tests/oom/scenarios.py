"""What runs short of memory: one small scenario for each thing that a user can do.

A scenario is a generator. It prepares, yields the one call during which memory runs out, and is
sent what came of it: an Outcome, or None after a MemoryError. Then it asserts that all or nothing
was done, and that its tick still works. The driver, sweep.py, runs it again and again, the n-th
allocation failing for n = 0, 1, 2, ..., and compares the counters before, between and after.

Texts are made anew each time: a str keeps its UTF-8, and would need no memory the second time.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import itertools
import json
import operator
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import arena
from arena._native import ffi, lib


@dataclass
class Outcome:
    value: Any


Scenario = Generator[Callable[[], object], "Outcome | None", None]


@dataclass
class Entry:
    make: Callable[[], Scenario]
    atomic: bool
    """After a MemoryError the counters are at once what they were before the call."""


SCENARIOS: dict[str, Entry] = {}

unraisable: list[str] = []
"""The names of the errors that sys.unraisablehook was told since the scenario began."""

lasting = False
"""Memory does not come back before the call is over."""


def add(name: str, make: Callable[[], Scenario], atomic: bool = True) -> None:
    assert name not in SCENARIOS
    SCENARIOS[name] = Entry(make, atomic)


def scenario(make: Callable[[], Scenario]) -> Callable[[], Scenario]:
    add(make.__name__.replace("_", " "), make)
    return make


def in_steps(make: Callable[[], Scenario]) -> Callable[[], Scenario]:
    """Of several calls, the first of which may have been done when a later one fails."""
    add(make.__name__.replace("_", " "), make, False)
    return make


def expect(error: type[BaseException], call: Callable[..., object], *args: object) -> BaseException:
    """Return the error that the call is meant to raise; a MemoryError instead of it goes on."""
    try:
        call(*args)
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__}")


def spell(count: int, letters: str = "éß") -> str:
    """A text without its UTF-8."""
    return "".join(itertools.islice(itertools.cycle(letters), count))


def still_works(t: arena.Tick) -> None:
    """The tick takes all that a tick takes."""
    assert t.open
    used = t.used
    assert t.strdup("text") == "text"
    assert bytes(t.alloc(40)) == bytes(40)
    buf = t.strbuf("a")
    buf.extend(["b", b"c"])
    assert buf == "abc"
    assert t.used == used + 4 + 40 + 3


# -- ticks -----------------------------------------------------------------------------------------


@scenario
def begin_and_end_a_tick() -> Scenario:
    yield lambda: arena.begin().end()


@scenario
def begin_a_tick_where_no_ended_one_gives_its_record() -> Scenario:
    ticks = [arena.begin() for _ in range(20)]  # more than are kept as spares
    done = yield arena.begin
    if done:
        assert arena.current() is done.value
        still_works(done.value)
        done.value.end()
    assert arena.current() is ticks[-1]
    still_works(ticks[-1])
    while ticks:
        ticks.pop().end()


@scenario
def begin_a_tick_with_name_limit_and_escapes() -> Scenario:
    done = yield lambda: arena.begin("".join(["na", "me"]), limit="1 MiB", escapes="raise")
    if done:
        assert (done.value.name, done.value.limit) == ("name", 1 << 20)
        done.value.end()


@scenario
def begin_a_tick_in_a_crowded_context() -> Scenario:
    context = contextvars.Context()
    for i in range(60):  # so that setting one more copies a tree of several nodes
        context.run(contextvars.ContextVar(f"v{i}").set, i)
    done = yield lambda: context.run(arena.begin)
    assert context.run(arena.current) is (done.value if done else None)
    if done:
        context.run(still_works, done.value)
        done.value.end()


@scenario
def a_with_block_and_its_body() -> Scenario:
    def body() -> str:
        with arena.tick() as t:
            buf = t.strbuf("x")
            buf.append(spell(10))
            return str(buf)

    done = yield body
    assert done is None or done.value == "x" + spell(10)
    assert arena.current() is None


@scenario
def nested_with_blocks_with_names() -> Scenario:
    with arena.tick("outer") as outer:
        kept = outer.strdup("kept")

        def body() -> None:
            with arena.tick("one", limit=1000) as one:
                one.alloc(100)
                with arena.tick("two", escapes="raise") as two:
                    two.strdup(spell(5))
                    one.strdup("x")

        yield body
        assert arena.current() is outer
        assert kept == "kept"
        still_works(outer)


@scenario
def a_body_that_raises() -> Scenario:
    def body() -> None:
        with arena.tick("raises") as t:
            t.strdup(spell(5))
            raise LookupError

    yield lambda: expect(LookupError, body)
    assert arena.current() is None


@scenario
def ticks_that_end_out_of_order() -> Scenario:
    def body() -> None:
        one = arena.begin("one")
        two = arena.begin("two")
        one.end()
        two.strdup("x")
        two.end()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # those of a failed body are forgotten
        yield body
        assert arena.current() is None


@scenario
def end_the_current_tick() -> Scenario:
    t = arena.begin("t")
    text = t.strdup("text")
    # By a lambda: CPython's cache of methods keeps some of the names that this looks up.
    done = yield lambda: arena.end()
    if not done and t.open:
        still_works(t)
        t.end()
    assert text.stale


@scenario
def enter_and_leave_a_tick_by_hand() -> Scenario:
    t = arena.tick("by hand")
    done = yield t.__enter__
    assert (done is not None) == t.open
    if done:
        t.__exit__(None, None, None)


@scenario
def ask_a_tick_about_itself() -> Scenario:
    with arena.tick("t", limit=10**6) as t:
        t.alloc(1000)
        done = yield lambda: (t.used, t.limit, t.name, t.number, t.open, arena.current(), repr(t))
        if done:
            used, limit, name, number, is_open, current, text = done.value
            assert (used, limit, name, is_open, current) == (1000, 10**6, "t", True, t)
            assert text == f"<arena.Tick: tick 't' (number {number}), open, 1000 bytes used>"
        still_works(t)


@scenario
def the_wrong_arguments_for_a_tick() -> Scenario:
    # Made before memory fails: CPython 3.12.1 crashes when there is none for a function.
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (TypeError, partial(arena.tick, 3)),
        (TypeError, partial(arena.tick, "a", "b")),
        (TypeError, lambda: arena.tick(limit=1.5)),  # type: ignore[arg-type]
        (TypeError, lambda: arena.tick(what=1)),  # type: ignore[call-overload]
        (ValueError, lambda: arena.tick(limit="much")),
        (ValueError, lambda: arena.begin(escapes="x")),  # type: ignore[arg-type]
        (TypeError, partial(arena.begin, len)),
    ]

    def wrong() -> None:
        for error, call in calls:
            expect(error, call)

    yield wrong


# -- allocations -----------------------------------------------------------------------------------

PIECES: dict[str, tuple[Callable[[], Any], bytes]] = {
    "ASCII": (lambda: spell(300, "ab"), b"ab" * 150),
    "text": (lambda: spell(300), spell(300).encode()),
    "long text": (lambda: spell(5000), spell(5000).encode()),
    "bytes": (lambda: bytes(range(256)) * 2, bytes(range(256)) * 2),
    "bytearray": (lambda: bytearray(b"xy" * 150), b"xy" * 150),
    "a view": (lambda: memoryview(b"abcdef" * 100)[::-2], (b"abcdef" * 100)[::-2]),
    "a Str": (lambda: arena.strdup(b"handle" * 60), b"handle" * 60),
}


def allocate(make: Callable[[], Any], content: bytes, call: str, owner: str) -> Scenario:
    with arena.tick() as t:
        other = t.strdup("other")
        piece = make()
        used = t.used
        does = getattr(t if owner == "tick" else arena, call)
        done = yield partial(does, piece)
        if done:
            assert bytes(done.value) == content
        added = len(content) if done and not done.value.persisted else 0
        assert t.used == used + added
        assert other == "other"
        still_works(t)


def allocations() -> None:
    for kind, (make, content) in PIECES.items():
        for owner, call in (
            ("tick", "strdup"),
            ("tick", "strbuf"),
            ("arena", "strdup"),
            ("arena", "strbuf"),
            ("arena", "strdup_persist"),
            ("arena", "strbuf_persist"),
            ("arena", "persist"),
        ):

            def run(
                make: Callable[[], Any] = make,
                content: bytes = content,
                call: str = call,
                owner: str = owner,
            ) -> Scenario:
                return allocate(make, content, call, owner)

            add(f"{owner}.{call} of {kind}", run)
    for size in (0, 100, 20_000, 100_000, 3_000_000):
        for owner, call in (("tick", "alloc"), ("arena", "alloc"), ("arena", "alloc_persist")):

            def block(size: int = size, call: str = call, owner: str = owner) -> Scenario:
                return allocate(lambda: size, bytes(size), call, owner)

            add(f"{owner}.{call} of {size} bytes", block)


allocations()


@scenario
def persist_each_kind_of_handle() -> Scenario:
    with arena.tick() as t:
        handles = [t.alloc(10), t.strdup("text"), t.strbuf(b"buf" * 100)]
        done = yield lambda: [handle.persist() for handle in handles]
        if done:
            assert [bytes(h) for h in done.value] == [bytes(h) for h in handles]
            assert all(h.persisted for h in done.value)
        still_works(t)


@scenario
def free_persisted_memory() -> Scenario:
    kept = arena.strdup_persist("kept")
    done = yield kept.free
    assert kept.stale == (done is not None)


# -- growing strings -------------------------------------------------------------------------------


def grow(
    act: Callable[[arena.StrBuf], Callable[[], object]],
    content: bytes,
    persisted: bool,
    start: bytes,
) -> Scenario:
    with arena.tick() as t:
        buf = arena.strbuf_persist(start) if persisted else t.strbuf(start)
        other = t.strdup("other")  # so that the buffer cannot grow where it lies
        used = t.used
        done = yield act(buf)
        assert bytes(buf) == (start + content if done else start)
        assert t.used == used + (len(content) if done and not persisted else 0)
        before = bytes(buf)
        buf.append(" goes on")
        assert bytes(buf) == before + b" goes on"
        assert other == "other"
        still_works(t)


def generate(*pieces: object) -> Iterator[Any]:
    yield from pieces


def mixed() -> list[Any]:
    return [
        "plain ",
        spell(20),
        b"raw",
        bytearray(b"array"),
        arena.strdup_persist("handle"),
        spell(3000),
    ]


MIXED = b"plain " + spell(20).encode() + b"raw" + b"array" + b"handle" + spell(3000).encode()


def growths() -> None:
    acts: dict[str, tuple[Callable[[arena.StrBuf], Callable[[], object]], bytes]] = {
        "extend by a list of short str": (
            lambda b: partial(b.extend, [f"piece {i} " for i in range(600)]),
            "".join(f"piece {i} " for i in range(600)).encode(),
        ),
        "extend by a tuple of text": (
            lambda b: partial(b.extend, (spell(5), spell(6), spell(7))),
            (spell(5) + spell(6) + spell(7)).encode(),
        ),
        "extend by a mixed list": (lambda b: partial(b.extend, mixed()), MIXED),
        "extend by an iterator": (lambda b: partial(b.extend, iter(mixed())), MIXED),
        "extend by a generator": (lambda b: lambda: b.extend(generate(*mixed())), MIXED),
        "writelines": (lambda b: partial(b.writelines, iter(["a\n", "b\n"])), b"a\nb\n"),
        "join by str": (
            lambda b: partial(b.join, ", ", [str(i) for i in range(300)]),
            ", ".join(map(str, range(300))).encode(),
        ),
        "join by text": (
            lambda b: partial(b.join, spell(3), ["a", spell(4), b"c"]),
            b"a" + spell(3).encode() + spell(4).encode() + spell(3).encode() + b"c",
        ),
        "join by bytes": (lambda b: partial(b.join, b"--", iter(["a", b"b", "c"])), b"a--b--c"),
        "join by a handle": (
            lambda b: partial(b.join, arena.strdup_persist("=="), ["a" * 300, "b"]),
            b"a" * 300 + b"==b",
        ),
        "+=": (lambda b: partial(operator.iadd, b, spell(200)), spell(200).encode()),
    }
    for kind, (make, content) in PIECES.items():
        if kind != "a Str":  # it would be charged to the tick
            acts[f"append {kind}"] = (lambda b, make=make: partial(b.append, make()), content)
            acts[f"write {kind}"] = (lambda b, make=make: partial(b.write, make()), content)
            acts[f"extend by {kind}"] = (lambda b, make=make: partial(b.extend, make()), content)
    for name, (act, content) in acts.items():
        for persisted in (False, True):

            def run(
                act: Callable[[arena.StrBuf], Callable[[], object]] = act,
                content: bytes = content,
                persisted: bool = persisted,
            ) -> Scenario:
                return grow(act, content, persisted, b"start")

            where = "a persisted StrBuf" if persisted else "a StrBuf"
            add(f"{name}: {where}", run)
    for size in (300, 70_000, 1_200_000, 5_000_000):  # each in another way: see csrc/strbuf.c
        for persisted in (False, True):

            def large(size: int = size, persisted: bool = persisted) -> Scenario:
                start = b"s" * size
                more = b"m" * size
                return grow(lambda b: partial(b.append, more), more, persisted, start)

            where = "a persisted StrBuf" if persisted else "a StrBuf"
            add(f"append {size} bytes to as many: {where}", large)


growths()


@scenario
def a_generator_that_fails_takes_its_pieces_back() -> Scenario:
    def pieces() -> Iterator[str]:
        yield spell(10)
        yield spell(300)
        raise LookupError

    with arena.tick() as t:
        buf = t.strbuf("start")
        yield lambda: expect(LookupError, lambda: buf.extend(pieces()))
        assert buf == "start"
        assert t.used == 5
        still_works(t)


@scenario
def truncate_and_clear() -> Scenario:
    with arena.tick() as t:
        buf = t.strbuf("x" * 1000)
        done = yield partial(buf.truncate, 500)
        assert len(buf) == (500 if done else 1000)
        assert t.used == len(buf)
        buf.clear()
        still_works(t)


@in_steps
def print_and_json_into_a_buffer() -> Scenario:
    with arena.tick() as t:
        buf = t.strbuf()

        def fill() -> None:
            print("id", spell(4), sep=",", file=buf)
            json.dump({"key": [1, 2.5, spell(4)]}, buf, ensure_ascii=False)

        done = yield fill
        whole = f'id,{spell(4)}\n{{"key": [1, 2.5, "{spell(4)}"]}}'
        assert str(buf) == whole if done else whole.startswith(str(buf))
        still_works(t)


# -- reading and setting ---------------------------------------------------------------------------


@scenario
def read_handles_in_every_way() -> Scenario:
    with arena.tick() as t:
        block, text, buf = t.alloc(300), t.strdup(spell(300)), t.strbuf(spell(400))
        whole, part = spell(300), spell(300)[100:110]
        raw = bytes(text)

        def read() -> None:
            for handle, content in ((text, raw), (buf, spell(400).encode()), (block, bytes(300))):
                assert bytes(handle) == content
                assert str(handle) == content.decode()
                assert (handle[3], handle[-1]) == (content[3], content[-1])
                assert handle[2:290] == content[2:290]
                assert handle[290:2:-3] == content[290:2:-3]
                assert len(handle) == len(content)
                assert handle == content
                assert handle != b"x"
                assert content[5:9] in handle
                assert content[7] in handle
                assert f"{handle}" == content.decode()
                assert repr(handle).startswith("<arena.")
                assert (handle.nbytes, handle.stale) == (len(content), False)
            assert text == whole
            assert part in text
            assert hash(text) == hash(whole)
            assert buf.getvalue() == spell(400)
            assert buf.tell() == 800
            assert (buf.writable(), buf.readable(), buf.closed) == (True, False, False)

        yield read
        still_works(t)


@scenario
def compare_with_text_that_has_no_utf8_yet() -> Scenario:
    with arena.tick() as t:
        text = t.strdup(spell(300))
        same, long, surrogate = spell(300), spell(3000), "\ud800" * 2
        done = yield lambda: (text == same, text == long, text == surrogate, text != same)
        assert done is None or done.value == (True, False, False, False)
        still_works(t)


@scenario
def look_a_str_up_in_a_dict() -> Scenario:
    with arena.tick() as t:
        text, raw = t.strdup(spell(300)), t.strdup(b"\xff")
        known = {spell(300): 1, b"\xff": 2}
        done = yield lambda: (known[text], known[raw])  # type: ignore[index]
        assert done is None or done.value == (1, 2)
        still_works(t)


def set_bytes(key: Any, value: Callable[[], Any], kind: str) -> Scenario:
    with arena.tick() as t:
        handle: Any = t.alloc(2000) if kind == "Block" else t.strbuf(bytes(2000))
        wanted = bytearray(2000)
        wanted[key] = value()
        done = yield partial(handle.__setitem__, key, value())
        assert bytes(handle) == (wanted if done else bytes(2000))
        still_works(t)


def settings() -> None:
    cases: dict[str, tuple[Any, Callable[[], Any]]] = {
        "one byte": (1000, lambda: 7),
        "a slice": (slice(10, 610), lambda: bytes([1]) * 600),
        "a slice with a step": (slice(1800, 0, -3), lambda: bytes([2]) * 600),
        "a slice from a view": (slice(0, 600), lambda: memoryview(b"ab" * 600)[::2]),
    }
    for kind in ("Block", "StrBuf"):
        for name, (key, value) in cases.items():

            def run(key: Any = key, value: Any = value, kind: str = kind) -> Scenario:
                return set_bytes(key, value, kind)

            add(f"set {name} of a {kind}", run)


settings()


@scenario
def set_a_slice_from_the_handle_itself() -> Scenario:
    with arena.tick() as t:
        block = t.alloc(600)
        block[:] = bytes(range(100)) * 6
        before = bytes(block)
        done = yield partial(block.__setitem__, slice(None, None, -1), block)
        assert bytes(block) == (before[::-1] if done else before)
        still_works(t)


# -- views -----------------------------------------------------------------------------------------


@scenario
def take_views_and_release_them() -> Scenario:
    with arena.tick() as t:
        handles = [t.alloc(100), t.strdup("x" * 100), t.strbuf("y" * 100)]
        kept = arena.strbuf_persist("kept")
        every = (*handles, kept)  # not in there: CPython 3.11 leaks the items when this fails

        def views() -> None:
            for handle in every:
                view = memoryview(handle)
                part = view[3:]
                assert part.tobytes() == bytes(handle)[3:]
                view.release()
                part.release()
            with handles[2].getbuffer() as buffer:  # type: ignore[union-attr]
                buffer[0] = 122

        yield views
        gc.collect()
        handles[2].append("no view lives")  # type: ignore[union-attr]
        kept.free()
        still_works(t)


@scenario
def a_view_that_outlives_its_tick() -> Scenario:
    t = arena.begin()
    view = memoryview(t.strdup("x" * 100))
    done = yield t.end
    if not done and t.open:
        t.end()
    assert arena.stats().pinned_count == 1
    assert bytes(view) == b"x" * 100
    view.release()


@in_steps
def a_view_that_escapes_where_that_is_an_error() -> Scenario:
    t = arena.begin("strict", escapes="raise")
    view = memoryview(t.strdup("x" * 100))
    done = yield ends(t)
    assert done  # it says why, and why not
    assert type(done.value) in (arena.EscapeError, MemoryError)
    assert not t.open  # whatever its end could say of it
    assert arena.stats().pinned_count == 1
    assert bytes(view) == b"x" * 100
    view.release()


# -- cleanups --------------------------------------------------------------------------------------


def marks(count: int) -> tuple[bytearray, list[Callable[[], object]]]:
    """Calls that need no memory, and where each leaves the order in which it ran."""
    order = itertools.count(1)
    seen = bytearray(count)

    def mark(i: int) -> Callable[[], object]:
        return lambda: seen.__setitem__(i, next(order))

    return seen, [mark(i) for i in range(count)]


@scenario
def register_a_cleanup() -> Scenario:
    calls: list[object] = []
    t = arena.begin()
    t.cleanup(calls.append, "first")
    name = "".join(["ke", "y"])
    done = yield lambda: t.cleanup(lambda *a, **k: calls.append((a, k)), 1, 2, **{name: 3})
    still_works(t)
    t.end()
    assert calls == [*([((1, 2), {"key": 3})] if done else []), "first"]


@scenario
def register_a_first_cleanup_by_module() -> Scenario:
    calls: list[object] = []
    t = arena.begin()
    done = yield lambda: arena.cleanup(calls.append, 1)
    still_works(t)
    t.end()
    assert calls == ([1] if done else [])


@in_steps
def run_many_cleanups() -> Scenario:
    seen, calls = marks(40)
    t = arena.begin()
    for call in calls:
        t.cleanup(call)
    text = t.strdup("text")
    done = yield ends(t)
    assert done
    assert not t.open
    assert text.stale
    ran = [x for x in seen if x]
    assert ran == list(range(len(ran), 0, -1))  # each once, last in first out
    errors = parts(done.value)
    assert len(ran) + len(errors) >= 40  # one that could not be called is told of
    assert all(type(error) is MemoryError for error in errors)


@in_steps
def run_cleanups_that_need_no_memory() -> Scenario:
    seen = bytearray(40)
    t = arena.begin()
    for i in range(40):
        t.cleanup(seen.__setitem__, i, 1)
    done = yield ends(t)
    assert done
    assert done.value is None  # nor do they need any to be taken off the list
    assert seen == b"\1" * 40
    assert not t.open


def ends(t: arena.Tick) -> Callable[[], BaseException | None]:
    """A call that ends the tick and returns what it raised, and needs no memory of its own."""
    return attempt(t.end)


def attempt(leave: Callable[..., object], *args: object) -> Callable[[], BaseException | None]:
    """A call that returns what it raised."""

    def end() -> BaseException | None:
        try:
            leave(*args)
        except ENDINGS as error:
            return error
        return None

    return end


ENDINGS = (BaseExceptionGroup, SystemExit, MemoryError, arena.EscapeError)


def parts(error: BaseException | None) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return list(error.exceptions)
    return [error] if error else []


class WrongError(Exception):
    """What a cleanup raises."""


def fail() -> None:
    raise WrongError


@in_steps
def cleanups_that_fail() -> Scenario:
    seen = bytearray(3)
    wrong = WrongError()

    t = arena.begin("t")
    t.cleanup(seen.__setitem__, 0, 1)
    t.cleanup(raises, wrong)
    t.cleanup(seen.__setitem__, 1, 1)
    t.cleanup(raises, wrong)
    t.cleanup(seen.__setitem__, 2, 1)
    done = yield ends(t)
    assert done
    assert not t.open
    assert seen == b"\1\1\1"
    # A group of two; or of one, the other told to sys.unraisablehook; or no memory for a group.
    errors = parts(done.value)
    assert all(type(e) in (WrongError, MemoryError) or "without" in str(e) for e in errors)
    told = len(errors) + unraisable.count("WrongError")
    assert told == 2 or type(done.value) is MemoryError, (errors, unraisable)


def raises(error: BaseException) -> None:
    raise error


@scenario
def cleanups_that_fail_after_a_body_that_raised() -> Scenario:
    def body() -> None:
        with arena.tick("t") as t:
            t.cleanup(fail)
            t.cleanup(fail)
            raise LookupError

    yield lambda: expect(LookupError, body)  # never hidden by what the end has to say


@in_steps
def a_cleanup_that_exits() -> Scenario:
    seen = bytearray(1)
    t = arena.begin("t")
    t.cleanup(seen.__setitem__, 0, 1)
    t.cleanup(raises, SystemExit(3))
    t.cleanup(fail)
    done = yield ends(t)
    assert done
    assert done.value  # something is raised
    assert seen == b"\1"
    assert not t.open


@scenario
def a_forgotten_tick_runs_its_cleanups() -> Scenario:
    seen = bytearray(3)
    ticks = [arena.begin("forgotten")]
    for i in range(3):
        ticks[0].cleanup(seen.__setitem__, i, 1)
    ticks[0].strdup("text")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        yield ticks.clear
    # Never without a word; one that no memory is left for goes to stderr.
    assert warned or unraisable or lasting
    assert not ticks
    assert seen == b"\1\1\1"
    assert arena.current() is None


@scenario
def a_forgotten_tick_in_a_cycle_is_collected() -> Scenario:
    seen = bytearray(1)

    def forget() -> None:
        t = arena.begin("cycle")
        t.cleanup(lambda: t)
        t.cleanup(seen.__setitem__, 0, 1)

    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield gc.collect
        gc.collect()
    assert seen == b"\1"
    assert arena.current() is None


# -- requests --------------------------------------------------------------------------------------


@scenario
def open_a_request() -> Scenario:
    with arena.Requests("bodies", limit="10 MiB") as reqs:
        reqs.open("other").strdup("other")
        done = yield lambda: reqs.open(("key", 1), group="g", limit=100_000)
        assert (("key", 1) in reqs) == (done is not None)
        assert reqs.stats().opened == len(reqs) == (2 if done else 1)
        if done:
            still_works(done.value.tick)
        still_works(reqs.open(("key", 2)).tick)


@in_steps
def discard_a_request_whose_callbacks_need_no_memory() -> Scenario:
    with arena.Requests("bodies") as reqs:
        seen = bytearray(20)
        r = reqs.open("key")
        text = r.strdup(b"x" * 100_000)
        for i in range(20):
            r.on_discard(seen.__setitem__, i, 1)
        done = yield lambda: reqs.discard("key")
        assert (seen == b"\1" * 20) == text.stale == ("key" not in reqs)
        assert done is None or done.value is text.stale is True
        r.discard()
        assert seen == b"\1" * 20


@in_steps
def deliver_a_request_that_fails() -> Scenario:
    with arena.Requests("bodies") as reqs:
        seen, wrong = bytearray(2), WrongError()
        r = reqs.open("key")
        r.on_discard(seen.__setitem__, 0, 1)
        r.on_discard(raises, wrong)
        r.on_discard(seen.__setitem__, 1, 1)

        def deliver() -> None:
            with reqs.delivering("key"):
                r.strbuf("x" * 70_000).append("y")
                raise LookupError

        yield lambda: expect(LookupError, deliver)
        assert seen == (b"\0\0" if r.open else b"\1\1")
        assert r.open == ("key" in reqs)
        if r.open:
            expect(ExceptionGroup, r.discard)


@in_steps
def close_a_group_whose_callbacks_fail() -> Scenario:
    with arena.Requests("bodies") as reqs:
        seen, wrong = bytearray(3), WrongError()
        for key in range(3):
            r = reqs.open(key, group="g")
            r.on_discard(seen.__setitem__, key, 1)
            r.on_discard(raises, wrong)
        done = yield attempt(reqs.close_group, "g")
        if len(reqs):  # before any of them
            assert (len(reqs), seen) == (3, b"\0\0\0")
            assert done is None or type(done.value) is MemoryError
            expect(ExceptionGroup, reqs.close_group, "g")
        assert seen == b"\1\1\1"
        assert len(reqs) == 0


@scenario
def ask_a_registry_about_itself() -> Scenario:
    with arena.Requests("bodies", limit=1000) as reqs:
        reqs.open("key").alloc(10)
        done = yield lambda: (reqs.stats(), repr(reqs), list(reqs), reqs.limit)
        if done:
            stats, text, keys, limit = done.value
            assert (stats.open, stats.bytes, keys, limit) == (1, 10, ["key"], 1000)
            assert text == "<arena.Requests 'bodies': 1 open>"


# -- decorators ------------------------------------------------------------------------------------


@scenario
def decorate_functions() -> Scenario:
    def plain(x: int) -> int:
        return x

    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    def decorate() -> None:
        assert arena.tick(plain)(3) == 3
        arena.tick("name", limit=1000)(coroutine)
        arena.tick()(generator)
        expect(TypeError, arena.tick, list)

    yield decorate


@scenario
def call_decorated_functions() -> Scenario:
    @arena.tick("plain")
    def plain() -> str:
        return str(arena.strdup(spell(5)))

    @arena.tick
    async def coroutine() -> str:
        await asyncio.sleep(0)
        return str(arena.strdup(spell(5)))

    @arena.tick
    def generator() -> Iterator[str]:
        yield str(arena.strdup(spell(5)))

    def call() -> None:
        assert plain() == spell(5)
        assert drive(coroutine()) == spell(5)
        assert list(generator()) == [spell(5)]

    yield call
    assert arena.current() is None


def drive(awaitable: Any) -> Any:
    """Await without an event loop; each pause ends at once."""
    try:
        while True:
            awaitable.send(None)
    except StopIteration as done:
        return done.value
    finally:
        awaitable.close()


# -- Store -----------------------------------------------------------------------------------------


def change(act: Callable[[arena.Store], object], content: dict[str, bytes]) -> Scenario:
    store = arena.Store({"a": "old a", "b": b"old b"})
    count, size = arena.stats().persisted_count, arena.stats().persisted
    before = {key: bytes(value) for key, value in store.items()}
    done = yield lambda: act(store)
    if done:
        done.value = None  # a handle that pop() gave
    assert {key: bytes(value) for key, value in store.items()} == (content if done else before)
    now = arena.stats()
    grown = (
        {k: len(v) for k, v in content.items()} if done else {k: len(v) for k, v in before.items()}
    )
    assert now.persisted_count == count - 2 + len(grown)
    assert now.persisted == size - 10 + sum(grown.values())
    store["later"] = "works"
    assert store["later"] == "works"
    store.clear()
    assert arena.stats().persisted_count == count - 2


def changes() -> None:
    old = {"a": b"old a", "b": b"old b"}
    acts: dict[str, tuple[Callable[[arena.Store], object], dict[str, bytes]]] = {
        "a new text": (
            lambda s: s.__setitem__("".join(["ne", "w"]), spell(50)),
            {**old, "new": spell(50).encode()},
        ),
        "a value for another": (lambda s: s.__setitem__("a", b"new"), {**old, "a": b"new"}),
        "del": (lambda s: s.__delitem__("a"), {"b": b"old b"}),
        "pop": (lambda s: s.pop("a"), {"b": b"old b"}),
        "pop with a default": (lambda s: s.pop("x", None), old),
        "popitem": (lambda s: s.popitem(), {"a": b"old a"}),
        "setdefault": (
            lambda s: s.setdefault("c", spell(9)) and None,
            {**old, "c": spell(9).encode()},
        ),
        "setdefault of what is there": (lambda s: s.setdefault("a", spell(9)) and None, old),
        "update": (lambda s: s.update({"a": "new"}), {**old, "a": b"new"}),
        "clear": (lambda s: s.clear(), {}),
        "reading": (
            lambda s: (list(s), len(s), "a" in s, s.get("x"), s.nbytes, repr(s), s == {}),
            old,
        ),
        "what it cannot hold": (lambda s: expect(TypeError, s.__setitem__, "a", 3) and None, old),
        "a key that is none": (lambda s: expect(TypeError, s.__setitem__, 3, "a") and None, old),
        "a missing key": (lambda s: expect(KeyError, s.__getitem__, "x") and None, old),
    }
    for name, (act, content) in acts.items():

        def run(act: Any = act, content: dict[str, bytes] = content) -> Scenario:
            return change(act, content)

        if name == "clear":  # frees one value after the other
            continue
        add(f"Store: {name}", run)


changes()


@in_steps
def store_many_and_clear_them() -> Scenario:
    count = arena.stats().persisted_count
    stores: list[arena.Store] = []

    def fill() -> None:
        stores.append(arena.Store(a=spell(3), b=b"b"))
        stores[0].update(c="c", d=spell(400))
        stores[0].clear()

    done = yield fill
    for store in stores:
        assert set(store) <= set("abcd")
        assert all(bytes(value) for value in store.values())
        assert not done or not store
        assert arena.stats().persisted_count == count + len(store)
    stores.clear()


@scenario
def a_handle_goes_into_a_store() -> Scenario:
    store = arena.Store()
    with arena.tick() as t:
        buf = t.strbuf(spell(100))
        done = yield lambda: store.__setitem__("buf", buf)
        assert len(store) == (done is not None)
        still_works(t)
    if done:
        assert store["buf"] == spell(100)
        store["buf"] += "more"  # type: ignore[operator]
        assert store["buf"] == spell(100) + "more"
        store.clear()


# -- the loop --------------------------------------------------------------------------------------


@scenario
def a_loop_of_ticks() -> Scenario:
    def loop() -> int:
        turns = arena.ticks(0, "loop", count=3, limit=1000)
        for t in turns:
            t.strdup(spell(5))
        return turns.begun

    done = yield loop
    assert done is None or done.value == 3
    assert arena.current() is None


@scenario
def a_loop_of_ticks_in_async_code() -> Scenario:
    async def loop() -> int:
        turns = arena.ticks(0, "loop", count=3)
        async for t in turns:
            t.strdup(spell(5))
        return turns.begun

    done = yield lambda: drive(loop())
    assert done is None or done.value == 3
    assert arena.current() is None


@scenario
def a_loop_that_is_late() -> Scenario:
    def late() -> None:
        turns = arena.ticks(1e-9, "late", count=400, on_overrun=lambda turns: None)
        turns.begun, turns.skipped = 397, 10**6  # numbers that need memory
        for t in turns:
            t.alloc(10)
        repr(turns)
        turns.stop()

    yield late
    assert arena.current() is None


@scenario
def the_wrong_arguments_for_a_loop() -> Scenario:
    def wrong() -> None:
        expect(TypeError, arena.ticks, "x")
        expect(ValueError, arena.ticks, -1)
        expect(ValueError, lambda: arena.ticks(1, limit="x"))

    yield wrong


@scenario
def statistics() -> Scenario:
    with arena.tick() as t:
        t.alloc(1000)
        done = yield arena.stats
        assert done is None or (done.value.scratch, done.value.ticks_open) == (1000, 1)
        still_works(t)


# -- errors ----------------------------------------------------------------------------------------


@scenario
def errors_of_stale_handles() -> Scenario:
    with arena.tick("over") as over:
        handles = [over.alloc(3), over.strdup("x"), over.strbuf("x")]
    freed = arena.strdup_persist("x")
    freed.free()
    with arena.tick() as t:

        def use() -> None:
            for handle in handles:
                expect(arena.StaleError, bytes, handle)
                expect(arena.StaleError, len, handle)
                expect(arena.StaleError, handle.persist)
                expect(arena.StaleError, copy.copy, handle)
                assert "has ended" in repr(handle)
            expect(arena.StaleError, handles[2].append, "x")  # type: ignore[union-attr]
            expect(ValueError, handles[2].flush)  # type: ignore[union-attr]
            expect(arena.StaleError, t.strdup, handles[1])
            expect(arena.StaleError, freed.free)
            assert "freed" in repr(freed)

        yield use
        still_works(t)


@scenario
def errors_of_ticks() -> Scenario:
    ended = arena.begin("ended")
    ended.end()

    def use() -> None:
        expect(arena.TickError, ended.end)
        expect(arena.TickError, ended.__enter__)
        expect(arena.TickError, ended.alloc, 3)
        expect(arena.TickError, ended.cleanup, print)
        expect(arena.TickError, arena.strdup, "x")
        expect(arena.TickError, arena.end)
        expect(arena.TickError, arena.tick("not begun").strdup, "x")
        repr(ended)

    yield use
    with arena.tick() as t:
        still_works(t)


@in_steps
def errors_in_a_cleanup() -> Scenario:
    t = arena.begin("ending")
    text, buf = t.strdup("text"), t.strbuf("buf")
    seen: list[str] = []

    def work() -> None:
        expect(arena.TickError, t.alloc, 3)
        expect(arena.TickError, arena.strdup, "x")
        expect(arena.TickError, buf.append, "x")
        expect(arena.TickError, t.end)
        expect(arena.TickError, t.cleanup, print)
        seen.append(str(text))

    t.cleanup(work)
    done = yield ends(t)
    assert done
    assert not t.open
    assert seen or done.value


@scenario
def errors_of_limits() -> Scenario:
    with arena.tick("small", limit=100) as t:
        buf = t.strbuf("x" * 50)
        more = "y" * 51

        def pass_it() -> None:
            expect(arena.LimitError, t.alloc, 51)
            expect(arena.LimitError, buf.append, more)
            expect(arena.LimitError, buf.extend, ["y" * 20, "y" * 31])
            expect(arena.LimitError, t.strdup, more)
            expect(arena.LimitError, t.strbuf, more)

        yield pass_it
        assert buf == "x" * 50
        assert t.used == 50
        buf.append("y" * 50)
        assert t.used == 100


@scenario
def errors_of_arguments() -> Scenario:
    with arena.tick() as t:
        buf, block, text = t.strbuf("buf"), t.alloc(10), t.strdup("text")
        kept = arena.strdup_persist("kept")
        view = memoryview(kept)
        own = memoryview(buf)

        def use() -> None:
            expect(TypeError, t.alloc, "x")
            expect(ValueError, t.alloc, -1)
            expect(ValueError, t.alloc, 2**200)
            expect(MemoryError, t.alloc, 2**62)
            expect(TypeError, t.strdup, 3)
            expect(UnicodeEncodeError, t.strdup, "\ud800")
            expect(TypeError, buf.append, 3)
            expect(BufferError, buf.append, "x")
            expect(BufferError, buf.clear)
            expect(IndexError, block.__getitem__, 300)
            expect(ValueError, block.__setitem__, 0, 300)
            expect(ValueError, block.__setitem__, slice(0, 3), b"x" * 300)
            expect(arena.TickError, text.free)
            expect(BufferError, kept.free)
            expect(TypeError, copy.copy, text)
            expect(TypeError, t.cleanup, 3)
            expect(ValueError, block.__contains__, 300)
            expect(TypeError, buf.join, ",", "x")

        yield use
        own.release()
        view.release()
        assert (buf == "buf", text == "text", kept == "kept") == (True, True, True)
        still_works(t)


# One thread for all runs, which does one thing at a time: it holds a tick while we use it.
OTHER = ThreadPoolExecutor(1, "other thread")


@scenario
def errors_of_threads() -> Scenario:
    made: list[Any] = []

    def begin() -> None:
        made.append(arena.begin("theirs"))
        made.append(made[0].strdup("text"))
        made.append(made[0].strbuf("text"))

    OTHER.submit(begin).result()
    t, text, buf = made

    def use() -> None:
        expect(arena.WrongThreadError, t.alloc, 3)
        expect(arena.WrongThreadError, t.end)
        expect(arena.WrongThreadError, bytes, text)
        expect(arena.WrongThreadError, buf.append, "x")
        repr(text)
        repr(t)

    yield use
    assert t.open
    assert OTHER.submit(bytes, text).result() == b"text"
    OTHER.submit(t.end).result()


@scenario
def errors_of_a_tick_that_came_with_the_context() -> Scenario:
    context: list[contextvars.Context] = []

    def begin() -> arena.Tick:
        t = arena.begin("theirs")
        context.append(contextvars.copy_context())
        return t

    t = OTHER.submit(begin).result()
    yield lambda: context[0].run(expect, arena.TickError, arena.strdup, "x")
    OTHER.submit(t.end).result()


# -- one operation each, straight through C --------------------------------------------------------


def directly() -> None:
    """No function of Python lies between: whatever is not a MemoryError is arena's own doing."""
    reads: dict[str, Callable[[Any], Any]] = {
        "str": str,
        "bytes": bytes,
        "repr": repr,
        "len": len,
        "memoryview": memoryview,
    }
    for kind in ("Block", "Str", "StrBuf"):
        for name, act in reads.items():

            def read(act: Callable[[Any], Any] = act, kind: str = kind) -> Scenario:
                return direct(kind, lambda handle: partial(act, handle))

            add(f"{name} of a {kind}", read)
        for name, what in {
            "an item": (operator.getitem, 599),
            "a slice": (operator.getitem, slice(1, 590)),
            "a slice with a step": (operator.getitem, slice(1, 590, 2)),
            "bytes in": (operator.contains, bytearray(b"xyz")),
            "equal": (operator.eq, bytearray(b"xyz")),
            "less": (operator.eq, 3),
        }.items():

            def ask(what: Any = what, kind: str = kind) -> Scenario:
                return direct(kind, lambda handle: partial(what[0], handle, what[1]))

            add(f"{name}, {kind}", ask)
        for name in ("persist", "__bytes__", "__repr__"):

            def method(name: str = name, kind: str = kind) -> Scenario:
                return direct(kind, lambda handle: getattr(handle, name))

            add(f"{name}() of a {kind}", method)

    def hashing() -> Scenario:
        return direct("Str", lambda handle: partial(hash, handle))

    add("hash of a Str", hashing)

    def adding() -> Scenario:
        return direct("StrBuf", lambda handle: partial(operator.iadd, handle, ""))

    add("iadd of a StrBuf", adding)


def direct(kind: str, make: Callable[[Any], Callable[[], object]]) -> Scenario:
    with arena.tick("t") as t:
        content = spell(300)
        handle: Any
        if kind == "Block":
            handle = t.alloc(600)
        else:
            handle = t.strdup(content) if kind == "Str" else t.strbuf(content)
        before = bytes(handle)
        done = yield make(handle)
        if done and isinstance(done.value, memoryview):
            done.value.release()
        assert bytes(handle) == before
        still_works(t)


directly()


# -- the C functions, by lib -----------------------------------------------------------------------


def given(pointer: Any) -> Any:
    """A result of C; NULL is a MemoryError when that is the code that goes with it."""
    if pointer == ffi.NULL:
        assert lib.arena_error() == lib.ARENA_E_NOMEM
        raise MemoryError
    return pointer


def checked(code: int) -> int:
    if code == lib.ARENA_E_NOMEM:
        assert lib.arena_error() == code
        raise MemoryError
    assert code == lib.ARENA_OK
    return code


C_CALLS: dict[str, Callable[[Any], Any]] = {
    "arena_alloc": lambda t: given(lib.arena_alloc(t, 100)),
    "arena_alloc, a chunk of its own": lambda t: given(lib.arena_alloc(t, 100_000)),
    "arena_zalloc": lambda t: given(lib.arena_zalloc(t, 2 << 20)),
    "arena_memdup": lambda t: given(lib.arena_memdup(t, b"text", 4)),
    "arena_strdup": lambda t: given(lib.arena_strdup(t, b"text")),
    "arena_strndup": lambda t: given(lib.arena_strndup(t, b"text", 3)),
    "arena_printf": lambda t: given(lib.arena_printf(t, b"%d", ffi.cast("int", 3))),
    "arena_strbuf_new": lambda t: given(lib.arena_strbuf_new(t, 0)),
    "arena_strbuf_new with room": lambda t: given(lib.arena_strbuf_new(t, 200_000)),
    "arena_cleanup": lambda t: checked(
        lib.arena_cleanup(t, ffi.addressof(lib, "arena_free_persist"), ffi.NULL)
    ),
}


def in_c(act: Callable[[Any], Any]) -> Scenario:
    t = lib.arena_begin(b"c")
    assert t != ffi.NULL
    yield lambda: act(t)
    text = lib.arena_strdup(t, b"works")
    assert ffi.string(text) == b"works"
    checked(lib.arena_end(t))


def in_c_persisted(act: Callable[[], Any]) -> Scenario:
    before = arena.stats()
    done = yield act
    now = arena.stats()
    if done:
        lib.arena_free_persist(done.value)
    else:
        assert (now.persisted, now.persisted_count) == (before.persisted, before.persisted_count)
        assert (now.strays, now.strays_count) == (before.strays, before.strays_count)


def c_functions() -> None:
    for name, act in C_CALLS.items():

        def run(act: Callable[[Any], Any] = act) -> Scenario:
            return in_c(act)

        add(f"c {name}", run)
    persisted: dict[str, Callable[[], Any]] = {
        "arena_alloc_persist": lambda: given(lib.arena_alloc_persist(100)),
        "arena_zalloc_persist": lambda: given(lib.arena_zalloc_persist(100)),
        "arena_memdup_persist": lambda: given(lib.arena_memdup_persist(b"text", 4)),
        "arena_strdup_persist": lambda: given(lib.arena_strdup_persist(b"text")),
        "arena_strndup_persist": lambda: given(lib.arena_strndup_persist(b"text", 3)),
        "arena_printf_persist": lambda: given(lib.arena_printf_persist(b"x")),
        "arena_strbuf_new_persist": lambda: given(lib.arena_strbuf_new_persist(0)),
        "arena_strbuf_new_persist with room": lambda: given(lib.arena_strbuf_new_persist(300)),
        "a stray": lambda: given(lib.arena_alloc(ffi.NULL, 100)),
        "a stray string": lambda: given(lib.arena_strdup(ffi.NULL, b"stray")),
        "a stray growing string": lambda: given(lib.arena_strbuf_new(ffi.NULL, 50)),
    }
    for name, call in persisted.items():

        def persist(call: Callable[[], Any] = call) -> Scenario:
            return in_c_persisted(call)

        # What arena has given is lost when cffi cannot wrap the pointer: nobody could free it.
        add(f"c {name}", persist, False)


c_functions()


@scenario
def c_grow_a_block() -> Scenario:
    t = lib.arena_begin(ffi.NULL)
    old = lib.arena_strdup(t, b"text")
    lib.arena_alloc(t, 16)
    done = yield lambda: given(lib.arena_realloc(t, old, 5, 100_000))
    assert ffi.string(ffi.cast("char *", done.value if done else old)) == b"text"
    assert lib.arena_used(t) - 16 in (5, 100_000)
    checked(lib.arena_end(t))


@scenario
def c_grow_persisted_memory() -> Scenario:
    old = lib.arena_strdup_persist(b"text")
    kept = [ffi.cast("void *", old)]
    done = yield lambda: given(lib.arena_realloc_persist(kept[0], 100))
    now = done.value if done else old
    assert ffi.string(ffi.cast("char *", now)) == b"text"
    assert lib.arena_size_persist(now) == (100 if done else 5)
    lib.arena_free_persist(now)


@scenario
def c_grow_a_string() -> Scenario:
    t = lib.arena_begin(ffi.NULL)
    buf = lib.arena_strbuf_new(t, 0)
    lib.arena_strbuf_puts(buf, b"start")
    lib.arena_alloc(t, 16)
    more = b"m" * 300_000
    done = yield lambda: checked(lib.arena_strbuf_append(buf, more, len(more)))
    wanted = b"start" + (more if done else b"")
    assert ffi.string(lib.arena_strbuf_data(buf)) == wanted
    assert lib.arena_used(t) == len(wanted) + 16
    done = None
    checked(lib.arena_strbuf_puts(buf, b" goes on"))
    checked(lib.arena_end(t))


# Records of ticks come by the slab and stay: each run goes deeper than all before it.
depth = 0
SLAB = 64 << 10


@scenario
def c_begin_more_ticks_than_ever() -> Scenario:
    global depth
    depth += 400
    outer = lib.arena_begin(b"outer")
    for _ in range(depth):
        assert lib.arena_begin(ffi.NULL) != ffi.NULL

    def begin() -> None:
        for _ in range(400):
            given(lib.arena_begin(ffi.NULL))

    top = lib.arena_current()
    done = yield lambda: expect_ticks(begin, top)
    if done:
        checked(lib.arena_end(top))
    checked(lib.arena_end(outer))


def expect_ticks(begin: Callable[[], None], top: Any) -> None:
    """Begin them all, or end those that could be begun."""
    try:
        begin()
    except MemoryError:
        while lib.arena_current() != top:
            checked(lib.arena_end(ffi.NULL))
        raise


def close() -> None:
    """End the thread that the scenarios share."""
    OTHER.shutdown()


assert threading.active_count() == 1  # its thread starts with the first use

"""The model of ticks, handles and views against plain bytearrays, through the public Python API."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import (
    CHUNK,
    HEAD,
    LARGEST,
    MIB,
    ascii_of,
    data_of,
    piece_sizes,
    seeds,
    sizes,
    small_sizes,
    wide_of,
)

import arena

GUARDED = ("ticks_open", "scratch", "chunks", "pinned", "pinned_count", "persisted_count")

# Sizes that the model treats as too large for yet another copy.
ENOUGH = 2 * MIB


def encoded(piece: Any) -> bytes:
    """What a piece is in a StrBuf or a Str."""
    return piece.encode() if isinstance(piece, str) else bytes(piece)


@dataclass(eq=False)
class Model:
    """A tick and what it must hold."""

    tick: arena.Tick
    parent: Model | None
    limit: int | None
    strict: bool
    number: int
    things: list[Thing] = field(default_factory=list)
    cleanups: list[tuple[str, int]] = field(default_factory=list)
    inside: list[Model] = field(default_factory=list)
    open: bool = True
    ending: bool = False

    @property
    def used(self) -> int:
        return sum(len(thing.content) for thing in self.things)

    @property
    def held(self) -> int:
        """What counts against the limit: its own bytes, and those of the ticks begun in it."""
        return (self.used if self.open else 0) + sum(inner.held for inner in self.inside)

    def fits(self, size: int) -> bool:
        around: Model | None = self
        while around is not None:
            counts = around.open and not around.ending and around.limit is not None
            if counts and around.held + size > (around.limit or 0):
                return False
            around = around.parent
        return True


@dataclass(eq=False)
class Thing:
    """A handle, the tick it lives in (None: persisted), and what it must hold."""

    handle: Any
    owner: Model | None
    content: bytearray
    views: list[View] = field(default_factory=list)
    freed: bool = False

    @property
    def stale(self) -> bool:
        return self.freed if self.owner is None else not self.owner.open

    @property
    def grows(self) -> bool:
        return isinstance(self.handle, arena.StrBuf)

    def fits(self, size: int) -> bool:
        return self.owner is None or self.owner.fits(size)


@dataclass(eq=False)
class View:
    """A live view: the bytes from ``start`` to ``stop`` of a thing."""

    view: Any
    thing: Thing
    start: int
    stop: int

    def read(self) -> bytes:
        return self.view.tobytes() if isinstance(self.view, np.ndarray) else bytes(self.view)

    def write(self, data: bytes) -> None:
        flat = self.view if isinstance(self.view, np.ndarray) else self.view.cast("B")
        if isinstance(flat, np.ndarray):
            flat[:] = np.frombuffer(data, dtype=flat.dtype)
        else:
            flat[:] = data
            flat.release()


CLEANUPS = [
    "read", "fail", "allocate", "end", "resize", "persist", "view", "write", "nested", "elsewhere",
]  # fmt: skip


class CleanupError(Exception):
    """What a failing cleanup of the model raises: it carries its number."""


class TickMachine(RuleBasedStateMachine):
    """Any order of begins, ends, allocations, growth, persists, frees, views, cleanups."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        now = arena.stats()
        self.baseline = {name: getattr(now, name) for name in GUARDED}
        self.open: list[Model] = []
        self.last: Model | None = None  # the tick that was begun last
        self.things: list[Thing] = []  # live ones, scratch and persisted
        self.stale: list[Thing] = []
        self.views: list[View] = []
        self.store = arena.Store()
        self.stored: dict[str, Thing] = {}
        self.labels = itertools.count()
        self.ran: list[int] = []
        self.wrong: list[BaseException] = []  # a cleanup's own findings

    # The model's own answers.

    @property
    def current(self) -> Model | None:
        found = self.last
        while found is not None and (not found.open or found.ending):
            found = found.parent
        return found

    def choose(self, pick: int) -> tuple[Any, Model]:
        """An open tick, or the module's functions on the current one."""
        current = self.current
        if pick < 0 and current is not None:
            return arena, current
        chosen = self.open[pick % len(self.open)]
        return chosen.tick, chosen

    def thing(self, which: int, *, grows: bool = False, writable: bool = False) -> Thing | None:
        found = [
            thing
            for thing in self.things
            if (thing.grows or not grows) and not (writable and isinstance(thing.handle, arena.Str))
        ]
        return found[which % len(found)] if found else None

    def keep(self, handle: Any, owner: Model | None, content: bytes | bytearray) -> Thing:
        thing = Thing(handle, owner, bytearray(content))
        self.things.append(thing)
        if owner is not None:
            owner.things.append(thing)
        assert handle.persisted == (owner is None)
        return thing

    def allocate(self, owner: Model | None, content: bytes, call: Callable[[], Any]) -> None:
        """Make a handle, or see the limit refuse it; then nothing has changed."""
        if owner is not None and not owner.fits(len(content)):
            with pytest.raises(arena.LimitError):
                call()
        else:
            self.keep(call(), owner, content)

    def grow(self, thing: Thing, added: bytes, call: Callable[[], object]) -> bool:
        """Grow a StrBuf, or see a view or the limit refuse it; then nothing has changed."""
        if thing.views:
            with pytest.raises(BufferError):
                call()
        elif not thing.fits(len(added)):
            with pytest.raises(arena.LimitError):
                call()
        else:
            call()
            thing.content += added
            return True
        assert bytes(thing.handle) == thing.content
        return False

    # Mostly the newest: what several steps in a row meet is where things go wrong.
    picks = st.sampled_from([-3, -2, -1, 0, 1, 2, 5])
    which = st.sampled_from([-1, -1, -1, -1, -2, -2, -3, 0, 1, 4, 11])
    text_or_bytes = st.sampled_from("bstay")

    def piece(self, kind: str, size: int, seed: int) -> Any:
        """Bytes, text of one or of several bytes a character, or another bytes-like object."""
        if kind == "s":
            return ascii_of(seed, size)
        if kind == "t":
            return wide_of(seed, min(size, 100_000))
        if kind == "a":
            return bytearray(data_of(seed, size))
        if kind == "y":
            return memoryview(data_of(seed, 2 * size))[::2]
        return data_of(seed, size)

    # Ticks.

    @precondition(lambda self: len(self.open) < 6)
    @rule(
        drawn=st.lists(
            st.tuples(
                st.none() | st.sampled_from([0, 1, 300, 20_000, "64 KiB", "5 MiB"]),
                st.sampled_from(["allow", "raise"]),
                st.booleans(),
                st.booleans(),
            ),
            min_size=1,
            max_size=3,
        )
    )
    def begin(self, drawn: list[tuple[Any, Any, bool, bool]]) -> None:
        for limit, escapes, wipe, entered in drawn:
            parent = self.current
            if entered:
                tick = arena.tick(limit=limit, escapes=escapes, wipe=wipe)
                assert not tick.open
                tick.__enter__()
            else:
                tick = arena.begin("model", limit=limit, escapes=escapes, wipe=wipe)
            exact = {"64 KiB": 64 << 10, "5 MiB": 5 << 20}.get(limit, limit)
            assert tick.limit == exact
            assert all(tick.number > other.number for other in self.open)
            self.last = Model(tick, parent, exact, escapes == "raise", tick.number)
            self.open.append(self.last)
            if parent is not None:
                parent.inside.append(self.last)
            self.the_current_tick_is_the_nearest_one_that_is_open()

    @precondition(lambda self: self.open)
    @rule(
        drawn=st.lists(
            st.tuples(picks, st.sampled_from(["end", "exit", "body"]), st.booleans()),
            min_size=1,
            max_size=3,
        )
    )
    def end_some(self, drawn: list[tuple[int, str, bool]]) -> None:
        """In any order, with or without a view alive."""
        for pick, how, watched in drawn:
            if self.open:
                _, model = self.choose(pick)
                if watched and model.things:
                    thing = model.things[-1]
                    self.look_at(thing, 0, len(thing.content), "memoryview")
                self.end(pick, how)
                self.the_current_tick_is_the_nearest_one_that_is_open()

    def end(self, pick: int, how: str) -> None:
        """End any open tick: its cleanups run, last in first out, and only its own memory goes."""
        called, model = self.choose(pick)
        tick = model.tick
        model.ending = True
        self.ran.clear()
        self.wrong.clear()
        expected = [label for _, label in reversed(model.cleanups)]
        failing = [label for does, label in reversed(model.cleanups) if does == "fail"]
        body = RuntimeError("the body's own")
        raised: BaseException | None = None
        try:
            if how == "end":
                called.end()
            elif how == "exit":
                assert tick.__exit__(None, None, None) is None
            else:
                assert not tick.__exit__(RuntimeError, body, None)
        except BaseException as error:
            raised = error
        self.close(model)
        assert not self.wrong, self.wrong
        assert self.ran == expected
        escaped = [thing for thing in model.things if thing.views]
        # An empty StrBuf has no memory that a view could pin; an empty Block may have.
        sure = any(thing.content for thing in escaped)
        told = model.strict and bool(escaped)
        notes = "".join(getattr(body if how == "body" else raised, "__notes__", []))
        if how == "body":
            assert raised is None
            for label in failing:
                assert f"cleanup {label} of the model" in notes
        elif failing:
            assert type(raised) is ExceptionGroup
            assert [str(error) for error in raised.exceptions] == [
                f"cleanup {label} of the model" for label in failing
            ]
            assert all(type(error) is CleanupError for error in raised.exceptions)
        elif raised is not None:
            assert told
            assert type(raised) is arena.EscapeError
        if sure and told:
            assert "EscapeError" in notes or type(raised) is arena.EscapeError
        elif not told:
            assert "EscapeError" not in notes
        for again in (tick.end, lambda: tick.__exit__(None, None, None)):
            with pytest.raises(arena.TickError):
                again()

    def close(self, model: Model) -> None:
        self.open.remove(model)
        model.open = False
        for thing in model.things:
            self.things.remove(thing)
            self.stale.append(thing)
        del self.stale[:-40]

    @precondition(lambda self: self.stale)
    @rule(which=which)
    def use_what_is_stale(self, which: int) -> None:
        self.check_stale(self.stale[which % len(self.stale)])

    @precondition(lambda self: self.open)
    @rule(
        pick=picks,
        drawn=st.lists(st.sampled_from([*CLEANUPS, "fail"]), min_size=1, max_size=4),
    )
    def cleanup(self, pick: int, drawn: list[str]) -> None:
        called, model = self.choose(pick)
        for does in drawn:
            label = next(self.labels)
            called.cleanup(self.run_cleanup, model, does, label=label)
            model.cleanups.append((does, label))

    def run_cleanup(self, model: Model, does: str, *, label: int) -> None:
        self.ran.append(label)
        try:
            self.check_in_cleanup(model, does)
        except BaseException as error:
            self.wrong.append(error)
        if does == "fail":
            raise CleanupError(f"cleanup {label} of the model")

    def check_in_cleanup(self, model: Model, does: str) -> None:
        tick = model.tick
        assert not tick.open
        assert tick.used == model.used
        for thing in model.things:
            self.check_live(thing)
        if does == "allocate":
            for call in (
                lambda: tick.alloc(1),
                lambda: tick.strdup(""),
                lambda: tick.strbuf(),
                lambda: tick.cleanup(print),
            ):
                with pytest.raises(arena.TickError):
                    call()
        elif does == "end":
            with pytest.raises(arena.TickError):
                tick.end()
        elif does == "resize":
            for thing in model.things:
                if thing.grows:
                    with pytest.raises(arena.TickError):
                        thing.handle.append("x")
                    if thing.content:
                        with pytest.raises(arena.TickError):
                            thing.handle.clear()
        elif does == "write":
            for thing in model.things:
                if thing.content and not isinstance(thing.handle, arena.Str):
                    thing.handle[0] = thing.content[0] = 88
        elif does == "persist":
            for thing in model.things[:1]:
                self.keep(thing.handle.persist(), None, thing.content)
        elif does == "view":
            for thing in model.things[:1]:
                self.look_at(thing, 0, len(thing.content), "memoryview")
        elif does == "nested":
            around = self.current
            with arena.tick("in a cleanup") as inner:
                assert arena.current() is inner
                if around is None or around.fits(5):
                    assert bytes(inner.strdup("inner")) == b"inner"
                else:
                    with pytest.raises(arena.LimitError):
                        inner.strdup("inner")
        elif does == "elsewhere":
            current = arena.current()
            assert current is not tick
            for other in self.open:
                if other is not model and other.open and other.fits(3):
                    self.keep(other.tick.strdup("abc"), other, b"abc")

    # Allocations.

    @precondition(lambda self: self.open)
    @rule(pick=picks, size=sizes, seed=seeds)
    def alloc(self, pick: int, size: int, seed: int) -> None:
        called, model = self.choose(pick)
        count = len(self.things)
        self.allocate(model, bytes(size), lambda: called.alloc(size))
        if len(self.things) > count:
            thing = self.things[-1]
            assert thing.handle == bytes(size)  # zeroed
            thing.handle[:] = data_of(seed, size)
            thing.content[:] = data_of(seed, size)

    @precondition(lambda self: self.open)
    @rule(pick=picks, kind=text_or_bytes, size=sizes, seed=seeds)
    def strdup(self, pick: int, kind: str, size: int, seed: int) -> None:
        called, model = self.choose(pick)
        piece = self.piece(kind, size, seed)
        self.allocate(model, encoded(piece), lambda: called.strdup(piece))
        if isinstance(piece, str) and self.things and self.things[-1].content == piece.encode():
            assert str(self.things[-1].handle) == piece

    @precondition(lambda self: self.open)
    @rule(pick=picks, kind=st.none() | text_or_bytes, size=piece_sizes, seed=seeds)
    def strbuf(self, pick: int, kind: str | None, size: int, seed: int) -> None:
        called, model = self.choose(pick)
        piece = b"" if kind is None else self.piece(kind, size, seed)
        call = called.strbuf if kind is None else lambda: called.strbuf(piece)
        self.allocate(model, encoded(piece), call)

    @precondition(lambda self: self.open and self.things)
    @rule(pick=picks, which=which, what=st.sampled_from(["strdup", "strbuf"]))
    def copy_a_handle_into_a_tick(self, pick: int, which: int, what: str) -> None:
        called, model = self.choose(pick)
        source = self.thing(which)
        assert source is not None
        if len(source.content) <= ENOUGH:
            call = getattr(called, what)
            self.allocate(model, bytes(source.content), lambda: call(source.handle))

    # Growing and shrinking.

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(
        which=which,
        kind=text_or_bytes,
        size=piece_sizes,
        seed=seeds,
        how=st.sampled_from(["append", "append", "write", "extend", "+="]),
    )
    def append(self, which: int, kind: str, size: int, seed: int, how: str) -> None:
        """Also to a string of an outer tick: it grows there and not in the current one."""
        thing = self.thing(which, grows=True)
        assert thing is not None
        piece = self.piece(kind, size, seed)
        result: list[Any] = []

        def call() -> None:
            if how == "+=":
                handle = thing.handle
                handle += piece
                assert handle is thing.handle
            else:
                result.append(getattr(thing.handle, how)(piece))

        if self.grow(thing, encoded(piece), call) and how == "write":
            assert result == [len(piece)]

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(which=which, source=which, how=st.sampled_from(["append", "write", "extend", "+="]))
    def append_a_handle(self, which: int, source: int, how: str) -> None:
        """A handle is a piece too: scratch of any tick, persisted, or the string itself."""
        thing, piece = self.thing(which, grows=True), self.thing(source)
        assert thing is not None
        assert piece is not None
        self.append_from(thing, piece, how)

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(which=which, how=st.sampled_from(["append", "write", "extend", "+="]))
    def append_the_string_to_itself(self, which: int, how: str) -> None:
        thing = self.thing(which, grows=True)
        assert thing is not None
        self.append_from(thing, thing, how)

    def append_from(self, thing: Thing, piece: Thing, how: str) -> None:
        if len(piece.content) > ENOUGH:
            return
        added = bytes(piece.content)

        def call() -> None:
            if how == "+=":
                handle = thing.handle
                handle += piece.handle
            else:
                count = getattr(thing.handle, how)(piece.handle)
                assert count == (len(added) if how == "write" else None)

        self.grow(thing, added, call)

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(
        which=which,
        drawn=st.lists(st.tuples(text_or_bytes, small_sizes, seeds), max_size=6),
        how=st.sampled_from(["extend", "writelines", "join", "join with itself"]),
        lazy=st.booleans(),
        itself=st.sampled_from([False, False, True]),
    )
    def add_many(
        self,
        which: int,
        drawn: list[tuple[str, int, int]],
        how: str,
        lazy: bool,
        itself: bool,
    ) -> None:
        """All pieces or none."""
        thing = self.thing(which, grows=True)
        assert thing is not None
        if len(thing.content) > ENOUGH:
            return
        pieces = [self.piece(*one) for one in drawn]
        separator: Any = thing.handle if how == "join with itself" else ", "
        glue = encoded(separator) if how.startswith("join") else b""
        added = bytearray()
        if itself:  # each time as long as it is by then
            pieces.append(thing.handle)
        for index, piece in enumerate(pieces):
            added += glue if index else b""
            added += thing.content + added if piece is thing.handle else encoded(piece)
        given: Any = iter(pieces) if lazy else pieces
        if not pieces:
            if how.startswith("join"):
                thing.handle.join(separator, given)
            else:
                getattr(thing.handle, how)(given)
        elif how.startswith("join"):
            self.grow(thing, bytes(added), lambda: thing.handle.join(separator, given))
        else:
            self.grow(thing, bytes(added), lambda: getattr(thing.handle, how)(given))

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(
        which=which,
        drawn=st.lists(st.tuples(text_or_bytes, small_sizes, seeds), max_size=4),
        bad=st.sampled_from([1, None, ["x"], "\ud800", StopAsyncIteration]),
        how=st.sampled_from(["extend", "writelines", "join"]),
    )
    def add_many_of_which_one_is_wrong(
        self, which: int, drawn: list[tuple[str, int, int]], bad: Any, how: str
    ) -> None:
        thing = self.thing(which, grows=True)
        assert thing is not None

        def pieces() -> Iterator[Any]:
            for one in drawn:
                yield self.piece(*one)
            if bad is StopAsyncIteration:
                raise bad
            yield bad

        call = getattr(thing.handle, how)
        with pytest.raises(
            (TypeError, UnicodeEncodeError, StopAsyncIteration, BufferError, arena.LimitError)
        ):
            call(*([", "] if how == "join" else []), pieces())
        assert thing.handle == thing.content

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(
        which=which,
        bad=st.sampled_from([1, None, 1.5, object(), "a\ud800"]),
        how=st.sampled_from(["append", "write", "extend", "__iadd__"]),
    )
    def append_what_is_no_piece(self, which: int, bad: Any, how: str) -> None:
        thing = self.thing(which, grows=True)
        assert thing is not None
        error = UnicodeEncodeError if isinstance(bad, str) else TypeError
        with pytest.raises(error):
            getattr(thing.handle, how)(bad)

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(which=which, to=st.just(0.0) | st.floats(0, 1), how=st.sampled_from(["cut", "clear"]))
    def truncate(self, which: int, to: float, how: str) -> None:
        thing = self.thing(which, grows=True)
        assert thing is not None
        size = 0 if how == "clear" else round(to * len(thing.content))
        call = thing.handle.clear if how == "clear" else lambda: thing.handle.truncate(size)
        if thing.views and size < len(thing.content):
            with pytest.raises(BufferError):
                call()
        else:
            assert call() == (None if how == "clear" else size)
            del thing.content[size:]
        assert thing.handle.truncate() == thing.handle.tell() == len(thing.content)
        thing.handle.truncate(len(thing.content) + 1)  # as the io classes: no change
        with pytest.raises(ValueError, match="-1"):
            thing.handle.truncate(-1)

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(which=which, kind=text_or_bytes, size=small_sizes, seed=seeds)
    def change_the_size_under_a_view(self, which: int, kind: str, size: int, seed: int) -> None:
        thing = self.thing(which, grows=True)
        assert thing is not None
        piece = self.piece(kind, size, seed)
        handle = thing.handle
        with memoryview(handle) as view:
            calls: list[Callable[[], object]] = [
                lambda: handle.append(piece),
                lambda: handle.write("x"),
                lambda: handle.extend(["x"]),
                lambda: handle.join("x", ["x"]),
                lambda: handle.append(handle),
                lambda: handle.__iadd__(piece),
            ]
            if thing.content:
                calls += [handle.clear, lambda: handle.truncate(len(thing.content) - 1)]
            for call in calls:
                with pytest.raises(BufferError):
                    call()
            assert view == handle == thing.content
        if not thing.views:
            self.grow(thing, encoded(piece), lambda: handle.append(piece))

    # Writing in place.

    @precondition(lambda self: self.thing(0, writable=True))
    @rule(which=which, at=st.floats(0, 1), seed=seeds, size=small_sizes, how=st.sampled_from("isv"))
    def write_in_place(self, which: int, at: float, seed: int, size: int, how: str) -> None:
        thing = self.thing(which, writable=True)
        assert thing is not None
        length = len(thing.content)
        start = round(at * length)
        data = data_of(seed, min(size, length - start))
        if how == "i":
            if start < length:
                thing.handle[start - length] = 200
                thing.content[start] = 200
        elif how == "s":
            thing.handle[start : start + len(data)] = data
            thing.content[start : start + len(data)] = data
        else:
            with memoryview(thing.handle) as view:
                assert not view.readonly
                view[start : start + len(data)] = data
            thing.content[start : start + len(data)] = data

    @precondition(lambda self: self.thing(0, writable=True))
    @rule(which=which, step=st.sampled_from([-1, 2, -3, 16]), itself=st.booleans(), seed=seeds)
    def write_with_a_step(self, which: int, step: int, itself: bool, seed: int) -> None:
        thing = self.thing(which, writable=True)
        assert thing is not None
        count = len(thing.content[::step])
        if itself and step == -1:
            thing.handle[::step] = thing.handle
            thing.content.reverse()
        else:
            thing.handle[::step] = data_of(seed, count)
            thing.content[::step] = data_of(seed, count)

    @precondition(lambda self: self.things)
    @rule(which=which)
    def write_what_does_not_fit(self, which: int) -> None:
        thing = self.thing(which)
        assert thing is not None
        size = len(thing.content)
        wrong: list[tuple[Any, Any, type[Exception]]] = [
            (size, 1, IndexError),
            (-size - 1, 1, IndexError),
            (slice(None), bytes(size + 1), ValueError),
            (slice(0, 0), b"x", ValueError),
            ("x", 1, TypeError),
        ]
        if size:
            wrong += [(0, 256, ValueError), (0, -1, ValueError), (0, b"x", TypeError)]
            wrong += [(slice(0, 1), b"", ValueError), (slice(0, 1), 7, TypeError)]
        for key, value, error in wrong:
            if isinstance(thing.handle, arena.Str):
                error = TypeError
            with pytest.raises(error):
                thing.handle[key] = value

    # What outlives its tick.

    @precondition(lambda self: self.things)
    @rule(which=which, how=st.sampled_from(["method", "function"]))
    def persist(self, which: int, how: str) -> None:
        thing = self.thing(which)
        assert thing is not None
        if len(thing.content) > ENOUGH:
            return
        handle = thing.handle.persist() if how == "method" else arena.persist(thing.handle)
        assert type(handle) is type(thing.handle)
        self.keep(handle, None, thing.content)

    @rule(
        kind=text_or_bytes,
        size=piece_sizes,
        seed=seeds,
        what=st.sampled_from(["block", "str", "strbuf", "empty", "persist"]),
    )
    def persist_variant(self, kind: str, size: int, seed: int, what: str) -> None:
        piece = self.piece(kind, size, seed)
        if what == "block":
            self.keep(arena.alloc_persist(size), None, bytes(size))
        elif what == "str":
            self.keep(arena.strdup_persist(piece), None, encoded(piece))
        elif what == "strbuf":
            self.keep(arena.strbuf_persist(piece), None, encoded(piece))
        elif what == "empty":
            self.keep(arena.strbuf_persist(), None, b"")
        else:
            self.keep(arena.persist(piece), None, encoded(piece))

    @precondition(lambda self: any(thing.owner is None for thing in self.things))
    @rule(which=which, by=st.sampled_from(["free", "forget"]))
    def free(self, which: int, by: str) -> None:
        """By hand, which a view refuses; or by letting go of the handle, which a view delays."""
        kept = [
            thing
            for thing in self.things
            if thing.owner is None and thing not in self.stored.values()
        ]
        if not kept:
            return
        thing = kept[which % len(kept)]
        if by == "free" and thing.views:
            with pytest.raises(BufferError):
                thing.handle.free()
            return
        self.things.remove(thing)
        if by == "free":
            thing.handle.free()
            thing.freed = True
            self.stale.append(thing)
        else:
            thing.handle = None
            thing.freed = True

    @precondition(lambda self: any(thing.owner is not None for thing in self.things))
    @rule(which=which)
    def free_scratch_by_hand(self, which: int) -> None:
        scratch = [thing for thing in self.things if thing.owner is not None]
        with pytest.raises(arena.TickError):
            scratch[which % len(scratch)].handle.free()

    keys = st.sampled_from("abc")

    @rule(key=keys, which=which, kind=text_or_bytes, size=small_sizes, seed=seeds)
    def put_into_the_store(self, key: str, which: int, kind: str, size: int, seed: int) -> None:
        """A handle or a plain value; what was there before is freed at once."""
        source = self.thing(which) if which % 2 else None
        if source is not None and len(source.content) > ENOUGH:
            return
        value = self.piece(kind, size, seed) if source is None else source.handle
        content = encoded(value)
        stays = source is not None and value is self.store.get(key)
        self.store[key] = value
        if stays:  # changed in place, as by store[key] += "more"
            assert self.store[key] is value
            return
        self.replaced(key)
        self.stored[key] = self.keep(self.store[key], None, content)

    def replaced(self, key: str) -> None:
        old = self.stored.pop(key, None)
        if old is not None:
            old.freed = True
            self.things.remove(old)
            self.stale.append(old)

    @precondition(lambda self: self.stored)
    @rule(which=which, how=st.sampled_from(["del", "pop", "clear"]))
    def take_out_of_the_store(self, which: int, how: str) -> None:
        key = sorted(self.stored)[which % len(self.stored)]
        if how == "del":
            del self.store[key]
            self.replaced(key)
        elif how == "pop":
            assert self.store.pop(key) is self.stored.pop(key).handle  # it lives on
        else:
            self.store.clear()
            for each in list(self.stored):
                self.replaced(each)

    # Views.

    @precondition(lambda self: self.things)
    @rule(
        which=which,
        low=st.floats(0, 1),
        high=st.floats(0, 1),
        how=st.sampled_from(["memoryview", "slice", "cast", "numpy", "getbuffer"]),
    )
    def take_a_view(self, which: int, low: float, high: float, how: str) -> None:
        thing = self.thing(which)
        assert thing is not None
        size = len(thing.content)
        start, stop = sorted((round(low * size), round(high * size)))
        self.look_at(thing, start, stop, how)

    def look_at(self, thing: Thing, start: int, stop: int, how: str) -> None:
        size = len(thing.content)
        view: Any = memoryview(thing.handle)
        if how == "slice":
            view = view[start:stop]
        elif how == "cast" and size and size % 2 == 0:
            view = view.cast("H")
            start, stop = 0, size
        elif how == "numpy" and size:
            start, stop = 0, size
            view = np.frombuffer(thing.handle, dtype=np.uint8)
        elif how == "getbuffer" and thing.grows:
            view = thing.handle.getbuffer()
            start, stop = 0, size
        else:
            start, stop = 0, size
        taken = View(view, thing, start, stop)
        thing.views.append(taken)
        self.views.append(taken)

    @precondition(lambda self: self.views)
    @rule(which=which, seed=seeds)
    def write_through_a_view(self, which: int, seed: int) -> None:
        """Also after the tick's end: what the view shows is its own until it dies."""
        view = self.views[which % len(self.views)]
        size = view.stop - view.start
        view_object = view.view
        if isinstance(view_object, np.ndarray):
            writable = view_object.flags.writeable
        else:
            writable = not view_object.readonly
        if writable and size:
            view.write(data_of(seed, size))
            view.thing.content[view.start : view.stop] = data_of(seed, size)

    @precondition(lambda self: self.views)
    @rule(which=which, release=st.booleans())
    def drop_a_view(self, which: int, release: bool) -> None:
        view = self.views.pop(which % len(self.views))
        view.thing.views.remove(view)
        if release and isinstance(view.view, memoryview):
            view.view.release()
        view.view = None

    # What must hold after each step.

    def check_live(self, thing: Thing) -> None:
        handle, content = thing.handle, thing.content
        size = len(content)
        assert not handle.stale
        assert handle.nbytes == len(handle) == size
        assert handle == content
        if size <= CHUNK:
            assert bytes(handle) == content
            assert handle[:] == content
            assert handle[size // 3 : -1] == content[size // 3 : -1]
            assert handle[::-7] == content[::-7]
        if size:
            assert handle[0] == content[0]
            assert handle[-1] == content[-1]
            assert handle != content[:-1]
            assert handle[size // 2 : size // 2 + 9] in handle

    def check_stale(self, thing: Thing) -> None:
        """Whatever is asked of a stale handle raises StaleError; telling what it was does not."""
        handle = thing.handle
        assert handle.stale
        assert handle.nbytes == len(thing.content)
        assert "stale" in repr(handle) or "freed" in repr(handle)
        calls: list[Callable[[], object]] = [
            lambda: bytes(handle),
            lambda: str(handle),
            lambda: len(handle),
            lambda: handle == b"",
            lambda: handle != handle,
            lambda: handle[0],
            lambda: handle[:],
            lambda: b"" in handle,
            lambda: memoryview(handle),
            lambda: np.frombuffer(handle, dtype=np.uint8),
            lambda: handle.persist(),
            lambda: arena.persist(handle),
            lambda: handle.free(),
            lambda: self.store.update(stale=handle),
            lambda: arena.strdup_persist(handle),
            lambda: arena.strbuf_persist(handle),
        ]
        if isinstance(handle, arena.Str):
            calls.append(lambda: hash(handle))
        else:
            calls.append(lambda: handle.__setitem__(0, 1))
            calls.append(lambda: handle.__setitem__(slice(None), b""))
        if thing.grows:
            calls += [
                lambda: handle.append("x"),
                lambda: handle.write(b""),
                lambda: handle.extend(["x"]),
                lambda: handle.join(",", ["x", "y"]),
                lambda: handle.__iadd__("x"),
                handle.clear,
                handle.truncate,
                handle.tell,
                handle.getvalue,
                handle.getbuffer,
            ]
        for call in calls:
            with pytest.raises(arena.StaleError):
                call()

    @invariant()
    def every_live_handle_reads_back_what_was_written(self) -> None:
        for thing in self.things:
            self.check_live(thing)

    @invariant()
    def every_handle_of_an_ended_tick_is_stale(self) -> None:
        for thing in self.stale:
            assert thing.handle.stale
            with pytest.raises(arena.StaleError):
                bytes(thing.handle)
            with pytest.raises(arena.StaleError):
                len(thing.handle)

    @invariant()
    def every_view_shows_what_was_written_or_what_it_was_at_the_end(self) -> None:
        for view in self.views:
            assert view.read() == view.thing.content[view.start : view.stop]

    @invariant()
    def the_counters_are_exact(self) -> None:
        now = arena.stats()
        base = self.baseline
        assert now.scratch == base["scratch"] + sum(model.used for model in self.open)
        assert now.ticks_open == base["ticks_open"] + len(self.open)
        for model in self.open:
            assert model.tick.open
            assert model.tick.used == model.used
            assert model.limit is None or model.held <= model.limit
        escaped = {
            view.thing
            for view in self.views
            if view.thing.owner is not None and not view.thing.owner.open
        }
        pinned = now.pinned_count - base["pinned_count"]
        assert pinned <= len(escaped)
        assert (now.pinned > base["pinned"]) == (pinned > 0)
        if any(thing.content for thing in escaped):
            assert pinned > 0
        # A persisted StrBuf takes memory when something is written to it; what was freed or
        # forgotten goes when its last view dies.
        alive = {thing for thing in self.things if thing.owner is None}
        held = {view.thing for view in self.views if view.thing.owner is None} - alive
        count = now.persisted_count - base["persisted_count"]
        sure = sum(bool(thing.content) or not thing.grows for thing in alive)
        assert sure <= count <= len(alive) + len(held)

    @invariant()
    def the_current_tick_is_the_nearest_one_that_is_open(self) -> None:
        current = self.current
        assert arena.current() is (current.tick if current else None)
        if current is None:
            for call in (lambda: arena.alloc(1), arena.strbuf, arena.end):
                with pytest.raises(arena.TickError):
                    call()

    @invariant()
    def the_store_is_the_model(self) -> None:
        assert list(self.store) == [key for key in self.store if key in self.stored]
        assert len(self.store) == len(self.stored)
        assert self.store.nbytes == sum(len(thing.content) for thing in self.stored.values())

    def teardown(self) -> None:
        try:
            while self.open:
                self.end(0, "end")
        finally:
            for model in self.open:
                with suppress(Exception):
                    model.tick.end()
            self.store.clear()
            for name in ("things", "stale", "views", "open", "stored"):
                getattr(self, name).clear()
            self.last = None
        gc.collect()
        now = arena.stats()
        assert {name: getattr(now, name) for name in GUARDED} == self.baseline


@pytest.mark.ends
@pytest.mark.timeout(7200)  # the long profile
def test_only_persisted_memory_survives_a_tick_and_all_that_lives_reads_true() -> None:
    run_state_machine_as_test(TickMachine, settings=settings())


# Single rules, each on its own.

BOUNDARIES = [
    1,
    15,
    16,
    17,
    239,
    240,
    241,
    CHUNK // 4,
    CHUNK // 4 + 1,
    CHUNK - HEAD,
    CHUNK - HEAD + 1,
    2 * CHUNK,
    LARGEST - HEAD,
    LARGEST - HEAD + 1,
    LARGEST + 1,
]


@pytest.mark.parametrize("size", BOUNDARIES)
@pytest.mark.parametrize(
    "allocate",
    [
        lambda tick, size: tick.alloc(size),
        lambda tick, size: tick.strdup("x" * size),
        lambda tick, size: tick.strbuf(b"x" * size),
        lambda tick, size: tick.strbuf().append(b"x" * size),
        lambda tick, size: tick.strbuf().extend(["x"] * size if size < 300 else ["x" * size]),
    ],
    ids=["alloc", "strdup", "strbuf", "append", "extend"],
)
def test_a_limit_is_exact_to_the_byte(allocate: Callable[[Any, int], Any], size: int) -> None:
    with arena.tick(limit=size - 1) as tick:
        with pytest.raises(arena.LimitError):
            allocate(tick, size)
        assert tick.used == 0
        assert tick.strdup("x" * min(size - 1, 100)) == "x" * min(size - 1, 100)
    with arena.tick(limit=size) as tick:
        allocate(tick, size)
        assert tick.used == size
        with pytest.raises(arena.LimitError):
            tick.alloc(1)
        assert len(tick.alloc(0)) == 0


def test_a_limit_error_leaves_the_tick_usable_and_its_contents_as_they_were() -> None:
    with arena.tick("limited", limit=1000) as tick:
        text = tick.strbuf("kept")
        block = tick.alloc(500)
        for call in (
            lambda: tick.alloc(497),
            lambda: text.append("x" * 497),
            lambda: text.extend(["x" * 400, "y" * 400]),
            lambda: text.join("-", ["x" * 248, "y" * 248]),
            lambda: tick.strbuf("x" * 497),
        ):
            with pytest.raises(arena.LimitError):
                call()
            assert tick.used == 504
            assert text == "kept"
            assert block == bytes(500)
        text.append("x" * 496)
        assert tick.used == 1000
        text.truncate(999 - 500)
        assert len(tick.alloc(1)) == 1


def test_what_is_cut_off_a_string_may_be_asked_for_again() -> None:
    with arena.tick(limit=100) as tick:
        text = tick.strbuf()
        for _ in range(1000):
            text.append("x" * 100)
            text.clear()
        assert tick.used == 0
        text.append("y" * 100)
        text.truncate(40)
        assert tick.strdup("z" * 60) == "z" * 60
        with pytest.raises(arena.LimitError):
            text.append("y")


@pytest.mark.parametrize("size", [1 << 50, 1 << 60, sys.maxsize])
def test_memory_that_nobody_has_is_a_memory_error_and_nothing_has_changed(size: int) -> None:
    with arena.tick() as tick:
        kept = tick.strdup("kept")
        before = arena.stats()
        for call in (tick.alloc, arena.alloc, arena.alloc_persist):
            with pytest.raises(MemoryError) as caught:
                call(size)
            assert caught.type is MemoryError
        assert tick.used == 4
        assert kept == "kept"
        after = arena.stats()
        assert (after.chunks, after.scratch) == (before.chunks, before.scratch)
        assert after.persisted_count == before.persisted_count
        assert after.persisted == before.persisted


OUT_OF_MEMORY = """
import contextlib
import resource
import arena

FREE = 200 << 20  # no power of two, so that doubling does not end there

with open("/proc/self/statm") as statm:
    LIMIT = int(statm.read().split()[0]) * resource.getpagesize() + FREE

@contextlib.contextmanager
def tight():  # only where arena allocates: what is checked may need memory of its own
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)

def used():
    now = arena.stats()
    return now.chunks, now.scratch, now.persisted_count, now.ticks_open

def refused(call, *args):
    try:
        with tight():
            while True:
                call(*args)
    except MemoryError as error:
        assert type(error) is MemoryError, error

def check(text):
    size = len(text)
    assert size % len(piece) == 0 and size > FREE * 3 // 4, size
    for start in range(0, size, len(piece)):
        assert text[start : start + len(piece)] == piece

piece = bytes(range(256)) * 256
before = used()
for turn in range(2):
    with arena.tick() as tick:
        other = tick.strdup("other")
        text = tick.strbuf()
        refused(text.append, piece)
        check(text)
        assert tick.used == len(text) + 5 and other == "other"
        text.clear()
        text.append("still usable")
        assert text == "still usable" and other == "other" and tick.used == 17
    kept = arena.strbuf_persist()
    refused(kept.append, piece)
    check(kept)
    del kept
    blocks = []
    with arena.tick() as tick:
        refused(lambda: blocks.append(tick.alloc(1 << 20)))
        assert tick.used == len(blocks) << 20 and tick.used > FREE // 4
        assert all(block[0] == block[-1] == 0 for block in blocks)
    assert all(block.stale for block in blocks)
    del blocks
    assert used() == before, (used(), before)
print("fine")
"""


@pytest.mark.as_ever
@pytest.mark.ends
def test_out_of_memory_anywhere_is_a_memory_error_and_leaks_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


@pytest.mark.ends
def test_a_tick_opened_on_an_empty_cache_maps_what_it_needs_and_no_more() -> None:
    arena._native.lib.arena_trim(0)
    before = arena.stats()
    assert before.cached == 0
    with arena.tick() as tick:
        assert arena.stats().maps == before.maps  # an empty tick holds no memory
        tick.strdup("first")
        now = arena.stats()
        assert (now.maps - before.maps, now.chunks - before.chunks) == (1, CHUNK)
    assert arena.stats().cached == CHUNK


@pytest.mark.ends
def test_an_oversize_block_in_a_nested_tick_goes_back_to_the_system_at_its_end() -> None:
    with arena.tick("outer") as outer:
        text = outer.strbuf("outer")
        before = arena.stats()
        with arena.tick("inner") as inner:
            block = inner.alloc(LARGEST + 1)
            block[-1] = 7
            assert arena.stats().chunks - before.chunks >= LARGEST + 1
            text.append(block[-3:])
        after = arena.stats()
        assert after.chunks == before.chunks
        assert after.cached <= before.cached
        assert after.unmaps == before.unmaps + 1
        assert bytes(text) == b"outer\0\0\7"
        with pytest.raises(arena.StaleError):
            bytes(block)


def test_a_string_of_an_outer_tick_that_grows_inside_an_inner_one_outlives_it() -> None:
    with arena.tick("outer") as outer:
        text = outer.strbuf()
        expected = b""
        for turn in range(40):
            with arena.tick("inner") as inner:
                piece = inner.strdup(data_of(turn, 5000))
                text.append(piece)
                expected += data_of(turn, 5000)
                assert inner.used == 5000
            assert text == expected
        assert outer.used == len(expected)


@pytest.mark.parametrize("size", [1, 100, 239, 240, 20_000, 70_000, LARGEST])
def test_a_string_takes_itself_as_a_piece_at_any_size(size: int) -> None:
    with arena.tick() as tick:
        for make in (tick.strbuf, arena.strbuf_persist):
            text = make(data_of(1, size))
            text.append(text)
            assert text == data_of(1, size) * 2
            text += text
            assert text == data_of(1, size) * 4
            text.clear()
            text.append(data_of(2, size))
            assert text.write(text) == size
            text.join(text, [b"a", b"b"])
            doubled = data_of(2, size) * 2
            assert text == doubled + b"a" + doubled + b"b"


@pytest.mark.parametrize(
    ("view", "size"),
    [
        (memoryview(bytes(8)).cast("I"), 8),
        (memoryview(bytes(24)).cast("B", (2, 3, 4)), 24),
        (np.zeros((2, 3), dtype=np.float64), 48),
        (np.array(5, dtype=np.int32), 4),
    ],
    ids=["ints", "cube", "array", "scalar"],
)
def test_write_tells_the_bytes_that_it_took_whatever_shape_they_had(view: Any, size: int) -> None:
    with arena.tick() as tick:
        text = tick.strbuf("abc")
        assert text.write(view) == size
        assert text == b"abc" + memoryview(view).tobytes()


def test_every_cleanup_runs_once_last_in_first_out_even_when_others_fail() -> None:
    ran: list[int] = []

    def note(number: int) -> None:
        ran.append(number)
        if number % 2:
            raise CleanupError(number)

    tick = arena.begin("cleanups")
    for number in range(6):
        tick.cleanup(note, number)
    with pytest.raises(ExceptionGroup) as caught:
        tick.end()
    assert ran == [5, 4, 3, 2, 1, 0]
    assert [error.args for error in caught.value.exceptions] == [(5,), (3,), (1,)]


@pytest.mark.ends
def test_a_stale_handle_says_what_it_was_and_which_tick_it_belonged_to() -> None:
    with arena.tick("awareness") as tick:
        handles = [tick.alloc(12), tick.strdup("text"), tick.strbuf("growing")]
    for handle, kind, size in zip(handles, ("Block", "Str", "StrBuf"), (12, 4, 7), strict=True):
        with pytest.raises(arena.StaleError) as caught:
            bytes(handle)
        message = str(caught.value)
        for part in (kind, f"{size} bytes", "'awareness'", f"number {tick.number}"):
            assert part in message


@pytest.mark.ends
def test_a_pinned_chunk_keeps_its_bytes_while_other_ticks_write_all_over() -> None:
    with arena.tick() as tick:
        view = memoryview(tick.strdup(data_of(1, 60_000)))
        array = np.frombuffer(tick.strbuf(data_of(2, LARGEST + 5)), dtype=np.uint8)
    assert arena.stats().pinned_count == 2
    for turn in range(40):
        with arena.tick() as tick:
            tick.strdup(data_of(turn, 60_000))
            tick.strdup(data_of(turn, LARGEST + 5))
    assert view == data_of(1, 60_000)
    assert array.tobytes() == data_of(2, LARGEST + 5)
    view.release()
    assert arena.stats().pinned_count == 1
    del array
    assert arena.stats().pinned == 0


def test_zeroed_blocks_are_zeroed_on_what_strings_and_views_have_soiled() -> None:
    for size in BOUNDARIES:
        with arena.tick() as tick:
            block = tick.alloc(size)
            block[:] = b"\xff" * size
            tick.strbuf(b"\xff" * size).append(b"\xff" * size)
        with arena.tick() as tick:
            for _ in range(5):
                assert tick.alloc(size) == bytes(size)

"""The model of ticks against the C API, with raw pointers read while their tick is open."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import (
    CHUNK,
    HEAD,
    KIB,
    LARGEST,
    MIB,
    ascii_of,
    data_of,
    piece_sizes,
    seeds,
    sizes,
)

from arena._native import ffi, lib

NULL = ffi.NULL
SIZE_MAX = 2 ** (8 * ffi.sizeof("size_t")) - 1
UNLIMITED = SIZE_MAX // 4
CLEANUPS = ["read", "allocate", "change", "end", "begin", "leave open", "outer"]
COUNTERS = ("ticks_open", "scratch", "chunks", "persisted", "persisted_count", "strays_count")


def stats() -> Any:
    raw = ffi.new("arena_stats *")
    lib.arena_stats_get(raw)
    return raw


def read(pointer: Any, size: int) -> bytes:
    return bytes(ffi.buffer(pointer, size)) if size else b""


def write(pointer: Any, data: bytes) -> None:
    ffi.memmove(pointer, data, len(data))


def address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


@dataclass(eq=False)
class Piece:
    """A block, in a tick or persisted, and what it must hold."""

    pointer: Any
    content: bytearray

    def read(self) -> bytes:
        return read(self.pointer, len(self.content))


@dataclass(eq=False)
class Text:
    """A growing string and what it must hold."""

    pointer: Any
    content: bytearray

    def read(self) -> bytes:
        data = lib.arena_strbuf_data(self.pointer)
        assert lib.arena_strbuf_len(self.pointer) == len(self.content)
        assert data[len(self.content)] == b"\0"
        return read(data, len(self.content))


@dataclass(eq=False)
class Owner:
    """An open tick; or, with pointer NULL, those who outlive ticks."""

    pointer: Any = NULL
    name: str = ""
    number: int = 0
    limit: int = UNLIMITED
    used: int = 0
    pieces: list[Piece] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    cleanups: list[Cleanup] = field(default_factory=list)

    @property
    def everything(self) -> list[Piece | Text]:
        return [*self.pieces, *self.texts]

    def check(self) -> None:
        for thing in self.everything:
            assert thing.read() == thing.content


@dataclass(eq=False)
class Cleanup:
    machine: CoreMachine
    owner: Owner
    does: str

    def run(self) -> None:
        machine, tick = self.machine, self.owner
        assert tick.cleanups.pop() is self  # last in first out, and taken off before the call
        if machine.ending is not tick:  # those inside of it have ended, and what they left open
            machine.ending = tick
            machine.left_open = 0
        tick.check()
        assert lib.arena_used(tick.pointer) == tick.used
        if self.does == "allocate":
            # An earlier cleanup may have left a tick open: then NULL means that one.
            current = lib.arena_current()
            for target in (tick.pointer, NULL if current == tick.pointer else tick.pointer):
                assert lib.arena_alloc(target, 1) == NULL
                assert lib.arena_error() == lib.ARENA_E_ENDING
                assert lib.arena_zalloc(target, 0) == NULL
                assert lib.arena_strbuf_new(target, 0) == NULL
                assert lib.arena_error() == lib.ARENA_E_ENDING
                assert lib.arena_limit(target, SIZE_MAX) == lib.ARENA_E_ENDING
                assert lib.arena_cleanup(target, on_end, NULL) == lib.ARENA_E_ENDING
        elif self.does == "change":
            for text in tick.texts:
                assert lib.arena_strbuf_append(text.pointer, b"x", 1) == lib.ARENA_E_ENDING
                assert lib.arena_strbuf_clear(text.pointer) == lib.ARENA_E_ENDING
            for piece in tick.pieces:
                size = len(piece.content)
                assert lib.arena_realloc(tick.pointer, piece.pointer, size, size + 1) == NULL
                assert lib.arena_error() == lib.ARENA_E_ENDING
        elif self.does == "end":
            assert lib.arena_end(tick.pointer) == lib.ARENA_E_ENDING
            if lib.arena_current() == tick.pointer:
                assert lib.arena_end(NULL) == lib.ARENA_E_ENDING
        elif self.does == "begin":
            inner = lib.arena_begin(NULL)
            machine.fill_in_cleanup(self.owner, 300)
            assert lib.arena_end(inner) == lib.ARENA_OK
        elif self.does == "leave open":
            lib.arena_begin(b"left open in a cleanup")
            machine.left_open += machine.fill_in_cleanup(self.owner, 100_000)
        elif self.does == "outer":
            depth = machine.stack.index(tick)
            if depth and machine.fits(machine.stack[depth - 1], 8):
                outer = machine.stack[depth - 1]
                pointer = lib.arena_memdup(outer.pointer, b"from in!", 8)
                machine.put(outer, pointer, b"from in!")
        tick.check()


failures: list[BaseException] = []


@ffi.callback("void(void *)")
def on_end(arg: Any) -> None:
    """Run a Cleanup; an error cannot pass through C, so it waits in `failures`."""
    try:
        ffi.from_handle(arg).run()
    except BaseException as error:
        failures.append(error)


RETAINED = ["", "a", "n" * 31]
"""The process, and names of ticks, that get policies."""


class CoreMachine(RuleBasedStateMachine):
    """Nested ticks, every allocating call, strays and persisted memory, against plain bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[Owner] = []
        self.persisted = Owner()
        self.strays = Owner()
        self.handles: list[Any] = []  # keeps the args of cleanups alive
        self.last_number = 0
        self.ending: Owner | None = None  # the tick whose cleanups run
        self.left_open = 0  # bytes of the ticks that these cleanups have left open
        lib.arena_trim(0)
        self.policies: dict[str, tuple[int, int]] = {}
        now = stats()
        self.baseline = {name: getattr(now, name) for name in COUNTERS}
        self.retired = now.maps - now.unmaps  # what other tests' debug dial keeps out of use
        failures.clear()

    # Choosing.

    def owner(self, pick: int) -> tuple[Any, Owner]:
        """An open tick by pointer, or the current one by NULL: the top, else the strays."""
        if pick < 0 or not self.stack:
            return NULL, self.stack[-1] if self.stack else self.strays
        chosen = self.stack[pick % len(self.stack)]
        return chosen.pointer, chosen

    def put(self, owner: Owner, pointer: Any, content: bytes) -> Piece:
        assert address(pointer) % 16 == 0
        piece = Piece(pointer, bytearray(content))
        owner.pieces.append(piece)
        if owner.pointer != NULL:
            owner.used += len(content)
        return piece

    def refused(self, owner: Owner, size: int) -> bool:
        """Whether a limit refuses this many bytes more. Strays have none."""
        return owner.pointer != NULL and not self.fits(owner, size)

    def held(self, owner: Owner) -> int:
        """What counts against its limit: its own bytes, and those of the ticks inside of it."""
        alive = self.stack
        if self.ending is not None:
            alive = alive[: alive.index(self.ending) + 1]
        return sum(o.used for o in alive[alive.index(owner) :]) + self.left_open

    def fits(self, owner: Owner, size: int) -> bool:
        return all(
            self.held(around) + size <= around.limit
            for around in self.stack[: self.stack.index(owner) + 1]
            if around is not self.ending
        )

    def fill_in_cleanup(self, ending: Owner, size: int) -> int:
        """Allocate in the tick that a cleanup has begun: the limits around the ending one hold."""
        pointer = lib.arena_alloc(NULL, size)
        depth = self.stack.index(ending)
        if depth and not self.fits(self.stack[depth - 1], size):
            self.check_refused(pointer)
            return 0
        write(pointer, data_of(size, size))
        return size

    def check_refused(self, result: Any) -> None:
        assert result in (NULL, lib.ARENA_E_LIMIT)
        assert lib.arena_error() == lib.ARENA_E_LIMIT

    picks = st.integers(-1, 5)

    # Ticks.

    @initialize(names=st.lists(st.just("first"), max_size=2))
    def start(self, names: list[str]) -> None:
        for name in names:
            self.begin(name)

    @precondition(lambda self: len(self.stack) < 6)
    @rule(name=st.none() | st.sampled_from(["", "a", "n" * 31, "n" * 32, "n" * 100]))
    def begin(self, name: str | None) -> None:
        pointer = lib.arena_begin(NULL if name is None else name.encode())
        number = lib.arena_number(pointer)
        assert number > self.last_number
        self.last_number = number
        self.stack.append(Owner(pointer, (name or "")[:31], number))

    @precondition(lambda self: self.stack)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        """Ending an outer tick ends the inner ones first; a second end is an error code."""
        pointer, chosen = self.owner(pick)
        depth = self.stack.index(chosen)
        ended = self.stack[depth:]
        code = lib.arena_end(pointer)
        del self.stack[depth:]
        self.ending, self.left_open = None, 0
        assert code == lib.ARENA_OK
        assert not failures, failures
        assert not any(owner.cleanups for owner in ended)  # every one ran
        for owner in ended:
            assert lib.arena_end(owner.pointer) == lib.ARENA_E_ENDED
            assert lib.arena_limit(owner.pointer, SIZE_MAX) == lib.ARENA_E_ENDED
            assert lib.arena_alloc(owner.pointer, 16) == NULL
            assert lib.arena_error() == lib.ARENA_E_ENDED

    @precondition(lambda self: self.stack)
    @rule(pick=st.integers(0, 5))
    def end_from_another_thread(self, pick: int) -> None:
        pointer, _ = self.owner(pick)
        seen: list[int] = []

        def other() -> None:
            seen.extend((lib.arena_end(pointer), lib.arena_error(), lib.arena_end(NULL)))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [lib.ARENA_E_THREAD, lib.ARENA_E_THREAD, lib.ARENA_E_ENDED]

    @precondition(lambda self: self.stack)
    @rule(pick=picks, drawn=st.lists(st.sampled_from(CLEANUPS), min_size=1, max_size=3))
    def cleanup(self, pick: int, drawn: list[str]) -> None:
        pointer, owner = self.owner(pick)
        for does in drawn:
            record = Cleanup(self, owner, does)
            handle = ffi.new_handle(record)
            self.handles.append(handle)
            assert lib.arena_cleanup(pointer, on_end, handle) == lib.ARENA_OK
            owner.cleanups.append(record)

    @precondition(lambda self: self.stack)
    @rule(pick=picks, above=st.sampled_from([0, 0, 1, 2, 15, 16, 240, 5000, 70_000]))
    def limit(self, pick: int, above: int) -> None:
        pointer, owner = self.owner(pick)
        held = self.held(owner)
        if held:
            assert lib.arena_limit(pointer, held - 1) == lib.ARENA_E_INVALID
            assert lib.arena_error() == lib.ARENA_E_INVALID
        assert lib.arena_limit(pointer, held + above) == lib.ARENA_OK
        owner.limit = held + above

    @precondition(lambda self: self.stack)
    @rule(pick=picks)
    def lift_the_limit(self, pick: int) -> None:
        pointer, owner = self.owner(pick)
        assert lib.arena_limit(pointer, SIZE_MAX) == lib.ARENA_OK
        owner.limit = UNLIMITED

    # Blocks.

    @rule(pick=picks, size=sizes, seed=seeds)
    def alloc(self, pick: int, size: int, seed: int) -> None:
        target, owner = self.owner(pick)
        pointer = lib.arena_alloc(target, size)
        if self.refused(owner, size):
            self.check_refused(pointer)
            return
        write(pointer, data_of(seed, size))
        self.put(owner, pointer, data_of(seed, size))

    @rule(pick=picks, size=sizes, seed=seeds)
    def zalloc(self, pick: int, size: int, seed: int) -> None:
        target, owner = self.owner(pick)
        pointer = lib.arena_zalloc(target, size)
        if self.refused(owner, size):
            self.check_refused(pointer)
            return
        assert read(pointer, size) == bytes(size)
        write(pointer, data_of(seed, size))
        self.put(owner, pointer, data_of(seed, size))

    @rule(pick=picks, size=sizes, seed=seeds)
    def memdup(self, pick: int, size: int, seed: int) -> None:
        target, owner = self.owner(pick)
        pointer = lib.arena_memdup(target, data_of(seed, size), size)
        if self.refused(owner, size):
            self.check_refused(pointer)
        else:
            self.put(owner, pointer, data_of(seed, size))

    @rule(pick=picks, size=piece_sizes, seed=seeds, how=st.sampled_from("dnmp"))
    def text(self, pick: int, size: int, seed: int, how: str) -> None:
        target, owner = self.owner(pick)
        text = ascii_of(seed, size).encode()
        expected = text + b"\0"
        if how == "d":
            pointer = lib.arena_strdup(target, text)
        elif how == "n":
            pointer = lib.arena_strndup(target, text, size // 2)
            expected = text[: size // 2] + b"\0"
        elif how == "m":
            pointer = lib.arena_strndup(target, text, SIZE_MAX)
        else:
            argument = ffi.new("char[]", text)
            pointer = lib.arena_printf(target, b"%s-%d", argument, ffi.cast("int", seed))
            expected = text + b"-%d\0" % seed
        if self.refused(owner, len(expected)):
            self.check_refused(pointer)
        else:
            self.put(owner, pointer, expected)

    @precondition(lambda self: any(owner.pieces for owner in self.stack))
    @rule(pick=picks, which=st.integers(-3, 9), size=sizes, by=st.none() | st.integers(-40, 40))
    def realloc(self, pick: int, which: int, size: int, by: int | None) -> None:
        target, owner = self.owner(pick)
        if not owner.pieces:
            return
        piece = owner.pieces[which % len(owner.pieces)]
        old = len(piece.content)
        if by is not None:
            size = max(0, old + by)
        pointer = lib.arena_realloc(target, piece.pointer, old, size)
        if self.refused(owner, size - old):
            self.check_refused(pointer)
            return
        assert pointer != NULL
        piece.pointer = pointer
        del piece.content[size:]
        owner.used += size - old
        if size > old:
            fresh = data_of(old % 4096, size - old)
            assert read(pointer, old) == piece.content
            write(pointer + old if old else pointer, fresh)
            piece.content += fresh

    # Growing strings.

    @rule(pick=picks, capacity=st.just(0) | piece_sizes)
    def strbuf(self, pick: int, capacity: int) -> None:
        target, owner = self.owner(pick)
        pointer = lib.arena_strbuf_new(target, capacity)
        assert pointer != NULL
        owner.texts.append(Text(pointer, bytearray()))

    def any_text(self, which: int) -> tuple[Owner, Text] | None:
        found = [
            (owner, text)
            for owner in (*self.stack, self.persisted, self.strays)
            for text in owner.texts
        ]
        return found[which % len(found)] if found else None

    def appended(self, owner: Owner, text: Text, code: int, added: bytes) -> None:
        if self.refused(owner, len(added)):
            self.check_refused(code)
            return
        assert code == lib.ARENA_OK
        text.content += added
        if owner.pointer != NULL:
            owner.used += len(added)

    @rule(which=st.integers(0, 9), size=piece_sizes, seed=seeds, how=st.sampled_from("abup"))
    def append(self, which: int, size: int, seed: int, how: str) -> None:
        """Also to a string of an outer tick: it grows there and not in the current one."""
        if (chosen := self.any_text(which)) is None:
            return
        owner, text = chosen
        if how in "ab":
            added = data_of(seed, size)
            code = lib.arena_strbuf_append(text.pointer, added, size)
        elif how == "u":
            added = ascii_of(seed, size).encode()
            code = lib.arena_strbuf_puts(text.pointer, added)
        else:
            added = ascii_of(seed, size).encode()
            argument = ffi.new("char[]", added)
            code = lib.arena_strbuf_printf(text.pointer, b"<%s>%d", argument, ffi.cast("int", 7))
            added = b"<" + added + b">7"
        self.appended(owner, text, code, added)

    @rule(which=st.integers(0, 9), start=st.floats(0, 1), stop=st.floats(0, 1))
    def append_a_part_of_the_string_itself(self, which: int, start: float, stop: float) -> None:
        if (chosen := self.any_text(which)) is None:
            return
        owner, text = chosen
        size = len(text.content)
        if size > 2 * MIB:
            return
        low, high = sorted((round(start * size), round(stop * size)))
        part = bytes(text.content[low:high])
        data = lib.arena_strbuf_data(text.pointer) + low
        self.appended(owner, text, lib.arena_strbuf_append(text.pointer, data, high - low), part)

    @rule(which=st.integers(0, 9), keep=st.just(0.0) | st.floats(0, 1))
    def truncate(self, which: int, keep: float) -> None:
        if (chosen := self.any_text(which)) is None:
            return
        owner, text = chosen
        size = len(text.content)
        assert lib.arena_strbuf_truncate(text.pointer, size + 1) == lib.ARENA_E_INVALID
        kept = round(keep * size)
        if kept:
            assert lib.arena_strbuf_truncate(text.pointer, kept) == lib.ARENA_OK
        else:
            assert lib.arena_strbuf_clear(text.pointer) == lib.ARENA_OK
        del text.content[kept:]
        if owner.pointer != NULL:
            owner.used -= size - kept

    # What outlives ticks.

    @rule(size=piece_sizes, seed=seeds, how=st.sampled_from("azmsnpb"))
    def persist(self, size: int, seed: int, how: str) -> None:
        content = data_of(seed, size)
        text = ascii_of(seed, size).encode()
        if how == "a":
            pointer = lib.arena_alloc_persist(size)
            write(pointer, content)
        elif how == "z":
            pointer = lib.arena_zalloc_persist(size)
            content = bytes(size)
        elif how == "m":
            pointer = lib.arena_memdup_persist(content, size)
        elif how == "s":
            pointer = lib.arena_strdup_persist(text)
            content = text + b"\0"
        elif how == "n":
            pointer = lib.arena_strndup_persist(text, size // 3)
            content = text[: size // 3] + b"\0"
        elif how == "p":
            argument = ffi.new("char[]", text)
            pointer = lib.arena_printf_persist(b"%s|%d", argument, ffi.cast("int", -seed))
            content = text + b"|%d\0" % -seed
        else:
            pointer = lib.arena_strbuf_new_persist(size if seed % 2 else 0)
            assert pointer != NULL
            self.persisted.texts.append(Text(pointer, bytearray()))
            return
        assert pointer != NULL
        self.put(self.persisted, pointer, content)

    @precondition(lambda self: self.persisted.pieces)
    @rule(which=st.integers(0, 9), size=piece_sizes, seed=seeds)
    def realloc_persist(self, which: int, size: int, seed: int) -> None:
        piece = self.persisted.pieces[which % len(self.persisted.pieces)]
        old = len(piece.content)
        pointer = lib.arena_realloc_persist(piece.pointer, size)
        assert pointer != NULL
        assert lib.arena_size_persist(pointer) == size
        piece.pointer = pointer
        del piece.content[size:]
        if size > old:
            write(pointer + old, data_of(seed, size - old))
            piece.content += data_of(seed, size - old)

    @rule(which=st.integers(0, 9), stray=st.booleans(), text=st.booleans())
    def free(self, which: int, stray: bool, text: bool) -> None:
        owner = self.strays if stray else self.persisted
        things: list[Any] = owner.texts if text else owner.pieces
        if things:
            lib.arena_free_persist(things.pop(which % len(things)).pointer)

    @rule(keep=st.sampled_from([0, 1, CHUNK, MIB, SIZE_MAX]))
    def trim(self, keep: int) -> None:
        before = stats()
        given = lib.arena_trim(keep)
        after = stats()
        assert after.cached == before.cached - given
        assert after.cached <= keep
        assert (given == 0) == (before.cached <= keep)

    @rule(
        name=st.sampled_from(RETAINED),
        policy=st.integers(lib.ARENA_RETAIN_ADAPTIVE, lib.ARENA_RETAIN_AS_PROCESS),
        most=st.sampled_from([0, CHUNK - 1, CHUNK, 5 * CHUNK, 100 * MIB]),
    )
    def retain(self, name: str, policy: int, most: int) -> None:
        sense = bool(name) or policy != lib.ARENA_RETAIN_AS_PROCESS
        assert (lib.arena_retain(name.encode(), policy, most) == lib.ARENA_OK) == sense
        if sense:
            self.policies[name] = (policy, most)

    # What must hold after each step.

    @invariant()
    def what_is_cached_is_within_each_policy(self) -> None:
        rows = ffi.new("arena_retained[]", 16)
        shown = {
            ffi.string(row.name).decode(): row for row in rows[0 : lib.arena_retention(rows, 16)]
        }
        assert stats().cached == sum(row.cached for row in shown.values())
        for name, (policy, most) in self.policies.items():
            if policy == lib.ARENA_RETAIN_AS_PROCESS:
                assert name not in shown
                continue
            assert shown[name].policy == policy
            if policy == lib.ARENA_RETAIN_NONE:
                assert shown[name].cached == 0
            if policy == lib.ARENA_RETAIN_BYTES:
                assert shown[name].cached <= most

    @invariant()
    def every_live_byte_is_what_was_written(self) -> None:
        for owner in (*self.stack, self.persisted, self.strays):
            owner.check()

    @invariant()
    def no_two_live_pieces_overlap(self) -> None:
        spans = []
        for owner in (*self.stack, self.persisted, self.strays):
            for piece in owner.pieces:
                start = address(piece.pointer)
                spans.append((start, start + max(1, len(piece.content))))
            for text in owner.texts:
                start = address(text.pointer)
                spans.append((start, start + ffi.sizeof("void *")))
                if text.content:  # an empty one may share one byte with all the others
                    start = address(lib.arena_strbuf_data(text.pointer))
                    spans.append((start, start + len(text.content) + 1))
        spans.sort()
        for (_, stop), (start, _) in itertools.pairwise(spans):
            assert stop <= start

    @invariant()
    def the_counters_are_exact(self) -> None:
        now = stats()
        base = self.baseline
        assert now.ticks_open == base["ticks_open"] + len(self.stack)
        assert now.ticks_open == now.ticks_begun - now.ticks_ended
        assert now.scratch == base["scratch"] + sum(owner.used for owner in self.stack)
        assert now.chunks >= now.scratch
        assert now.chunks_peak >= now.chunks
        assert (
            now.maps - now.unmaps - self.retired <= (now.chunks + now.cached + now.pinned) // CHUNK
        )
        for owner in self.stack:
            assert lib.arena_used(owner.pointer) == owner.used
        for owner, count, size in (
            (self.persisted, now.persisted_count - base["persisted_count"], now.persisted),
            (self.strays, now.strays_count - base["strays_count"], now.strays),
        ):
            # A growing string is its record, and its data once it has any.
            texts = len(owner.texts)
            filled = sum(bool(text.content) for text in owner.texts)
            assert len(owner.pieces) + texts + filled <= count
            assert count <= len(owner.pieces) + 2 * texts
            held = sum(len(thing.content) for thing in owner.everything)
            if not texts and owner is self.persisted:
                assert size - base["persisted"] == held
            else:
                assert size >= held
            for piece in owner.pieces:
                assert lib.arena_size_persist(piece.pointer) == len(piece.content)

    @invariant()
    def the_innermost_tick_is_the_current_one(self) -> None:
        assert lib.arena_current() == (self.stack[-1].pointer if self.stack else NULL)
        for owner in self.stack:
            assert ffi.string(lib.arena_name(owner.pointer)).decode() == owner.name
            assert lib.arena_number(owner.pointer) == owner.number

    def teardown(self) -> None:
        try:
            while self.stack:
                self.end(0)
            self.the_counters_are_exact()
        finally:
            for name in RETAINED:
                adaptive = lib.ARENA_RETAIN_ADAPTIVE, lib.ARENA_RETAIN_AS_PROCESS
                lib.arena_retain(name.encode(), adaptive[bool(name)], 0)
            while lib.arena_current() != NULL and lib.arena_end(NULL) == lib.ARENA_OK:
                pass
            for owner in (self.persisted, self.strays):
                for thing in owner.everything:
                    lib.arena_free_persist(thing.pointer)
        now = stats()
        assert {name: getattr(now, name) for name in COUNTERS} == self.baseline


@pytest.mark.as_ever
@pytest.mark.timeout(7200)  # the long profile
def test_the_c_api_behaves_like_plain_bytes_whatever_the_order_of_calls() -> None:
    # Its steps are cheap: it takes three times as many examples as the others.
    examples = 3 * settings().max_examples
    run_state_machine_as_test(CoreMachine, settings=settings(max_examples=examples))


# Single rules, each on its own.


@pytest.fixture
def tick() -> Iterator[Any]:
    tick = lib.arena_begin(b"test")
    yield tick
    lib.arena_end(tick)


@pytest.mark.parametrize(
    "alloc",
    [
        lib.arena_alloc,
        lib.arena_zalloc,
        lambda tick, size: lib.arena_memdup(tick, bytes(size), size),
        lambda tick, size: lib.arena_realloc(tick, NULL, 0, size),
        lambda tick, size: lib.arena_printf(tick, b"%s", ffi.new("char[]", b"x" * (size - 1))),
        lambda tick, size: lib.arena_strdup(tick, b"x" * (size - 1)),
    ],
    ids=["alloc", "zalloc", "memdup", "realloc", "printf", "strdup"],
)
@pytest.mark.parametrize("size", [1, 16, 17, 240, CHUNK // 4 + 1, CHUNK, LARGEST + 1])
def test_a_limit_is_exact_to_the_byte(
    tick: Any, alloc: Callable[[Any, int], Any], size: int
) -> None:
    assert lib.arena_limit(tick, size - 1) == lib.ARENA_OK
    assert alloc(tick, size) == NULL
    assert lib.arena_error() == lib.ARENA_E_LIMIT
    assert lib.arena_used(tick) == 0
    assert lib.arena_limit(tick, size) == lib.ARENA_OK
    assert alloc(tick, size) != NULL
    assert lib.arena_used(tick) == size
    assert lib.arena_alloc(tick, 1) == NULL
    assert lib.arena_error() == lib.ARENA_E_LIMIT
    assert lib.arena_alloc(tick, 0) != NULL


def test_a_growing_string_is_limited_by_its_length_and_not_by_its_capacity(tick: Any) -> None:
    assert lib.arena_limit(tick, 1000) == lib.ARENA_OK
    text = lib.arena_strbuf_new(tick, 5000)
    for count in range(1, 1001):
        assert lib.arena_strbuf_append(text, b"x", 1) == lib.ARENA_OK
        assert lib.arena_used(tick) == count
    assert lib.arena_strbuf_append(text, b"y", 1) == lib.ARENA_E_LIMIT
    assert lib.arena_strbuf_puts(text, b"y") == lib.ARENA_E_LIMIT
    assert lib.arena_strbuf_printf(text, b"%d", ffi.cast("int", 1)) == lib.ARENA_E_LIMIT
    assert read(lib.arena_strbuf_data(text), 1001) == b"x" * 1000 + b"\0"
    assert lib.arena_strbuf_truncate(text, 999) == lib.ARENA_OK
    assert lib.arena_strbuf_append(text, b"z", 1) == lib.ARENA_OK
    assert lib.arena_strbuf_append(text, b"z", 1) == lib.ARENA_E_LIMIT


def test_a_limit_counts_what_a_realloc_adds_and_gives_back(tick: Any) -> None:
    block = lib.arena_memdup(tick, data_of(3, 100), 100)
    assert lib.arena_limit(tick, 150) == lib.ARENA_OK
    assert lib.arena_realloc(tick, block, 100, 151) == NULL
    assert lib.arena_error() == lib.ARENA_E_LIMIT
    assert read(block, 100) == data_of(3, 100)
    block = lib.arena_realloc(tick, block, 100, 150)
    assert lib.arena_used(tick) == 150
    block = lib.arena_realloc(tick, block, 150, 40)
    assert lib.arena_used(tick) == 40
    assert lib.arena_alloc(tick, 111) == NULL
    assert lib.arena_alloc(tick, 110) != NULL
    assert read(block, 40) == data_of(3, 40)


@pytest.mark.parametrize("size", [SIZE_MAX, SIZE_MAX - 15, SIZE_MAX // 2, UNLIMITED + 1, UNLIMITED])
@pytest.mark.parametrize("alloc", [lib.arena_alloc, lib.arena_zalloc])
def test_memory_that_nobody_has_is_refused_and_the_tick_is_as_it_was(
    tick: Any, alloc: Callable[[Any, int], Any], size: int
) -> None:
    before = lib.arena_memdup(tick, data_of(5, 77), 77)
    held = stats().chunks
    assert alloc(tick, size) == NULL
    assert lib.arena_error() == lib.ARENA_E_NOMEM
    assert lib.arena_realloc(tick, before, 77, size) == NULL
    assert lib.arena_error() == lib.ARENA_E_NOMEM
    text = lib.arena_strbuf_new(tick, 0)
    assert lib.arena_strbuf_puts(text, b"kept") == lib.ARENA_OK
    assert lib.arena_strbuf_append(text, b"", size) == lib.ARENA_E_NOMEM
    assert read(lib.arena_strbuf_data(text), 5) == b"kept\0"
    assert lib.arena_strbuf_new(tick, size) == NULL
    assert lib.arena_error() == lib.ARENA_E_NOMEM
    assert lib.arena_used(tick) == 77 + 4
    assert stats().chunks == held
    assert read(before, 77) == data_of(5, 77)


@pytest.mark.parametrize("size", [SIZE_MAX, SIZE_MAX - 15, SIZE_MAX // 2, UNLIMITED + 1, UNLIMITED])
def test_persisted_memory_that_nobody_has_is_refused_and_nothing_is_counted(size: int) -> None:
    kept = lib.arena_memdup_persist(b"kept", 4)
    before = stats()
    assert lib.arena_alloc_persist(size) == NULL
    assert lib.arena_error() == lib.ARENA_E_NOMEM
    assert lib.arena_zalloc_persist(size) == NULL
    assert lib.arena_realloc_persist(kept, size) == NULL
    assert lib.arena_strbuf_new_persist(size) == NULL
    assert lib.arena_alloc(NULL, size) == NULL  # a stray
    assert lib.arena_error() == lib.ARENA_E_NOMEM
    after = stats()
    assert (after.persisted, after.persisted_count) == (before.persisted, before.persisted_count)
    assert (after.strays, after.strays_count) == (before.strays, before.strays_count)
    assert read(kept, 4) == b"kept"
    lib.arena_free_persist(kept)


def test_a_limit_below_what_is_used_is_refused(tick: Any) -> None:
    lib.arena_alloc(tick, 100)
    assert lib.arena_limit(tick, 99) == lib.ARENA_E_INVALID
    assert lib.arena_alloc(tick, 1000) != NULL  # no limit was set


def test_with_no_tick_open_an_allocation_is_a_stray_and_is_counted() -> None:
    before = stats()
    strays = [
        lib.arena_alloc(NULL, 10),
        lib.arena_zalloc(NULL, 20),
        lib.arena_memdup(NULL, b"abc", 3),
        lib.arena_strdup(NULL, b"text"),
        lib.arena_strndup(NULL, b"text", 2),
        lib.arena_printf(NULL, b"%d", ffi.cast("int", 1234)),
        lib.arena_realloc(NULL, NULL, 0, 6),
    ]
    now = stats()
    assert now.strays - before.strays == 10 + 20 + 3 + 5 + 3 + 5 + 6
    assert now.strays_count - before.strays_count == len(strays)
    assert now.strays_ever - before.strays_ever == len(strays)
    assert (now.persisted, now.scratch) == (before.persisted, before.scratch)
    assert read(strays[1], 20) == bytes(20)
    text = lib.arena_strbuf_new(NULL, 0)
    assert lib.arena_strbuf_puts(text, b"a stray that grows") == lib.ARENA_OK
    assert stats().persisted == before.persisted
    for stray in (*strays, text):
        lib.arena_free_persist(stray)
    after = stats()
    assert (after.strays, after.strays_count) == (before.strays, before.strays_count)
    assert lib.arena_end(NULL) == lib.ARENA_E_ENDED
    assert lib.arena_limit(NULL, 10) == lib.ARENA_E_ENDED
    assert lib.arena_cleanup(NULL, on_end, NULL) == lib.ARENA_E_ENDED


def test_a_stray_stays_a_stray_when_a_tick_opens() -> None:
    stray = lib.arena_strbuf_new(NULL, 0)
    tick = lib.arena_begin(NULL)
    assert lib.arena_strbuf_append(stray, data_of(1, 5000), 5000) == lib.ARENA_OK
    assert lib.arena_used(tick) == 0
    assert lib.arena_end(tick) == lib.ARENA_OK
    assert read(lib.arena_strbuf_data(stray), 5000) == data_of(1, 5000)
    lib.arena_free_persist(stray)


def test_zeroed_memory_is_zeroed_on_chunks_that_other_ticks_have_written() -> None:
    for size in (CHUNK // 4, CHUNK - HEAD, MIB, LARGEST - HEAD):
        tick = lib.arena_begin(NULL)
        write(lib.arena_alloc(tick, size), data_of(0, size))
        text = lib.arena_strbuf_new(tick, 0)
        assert lib.arena_strbuf_append(text, data_of(1, size), size) == lib.ARENA_OK
        lib.arena_end(tick)
        tick = lib.arena_begin(NULL)
        for _ in range(8):
            assert read(lib.arena_zalloc(tick, size), size) == bytes(size)
        for _ in range(200):
            assert read(lib.arena_zalloc(tick, 1000), 1000) == bytes(1000)
        lib.arena_end(tick)


def test_zeroed_memory_is_zeroed_where_a_realloc_or_a_string_had_grown_in_place() -> None:
    lib.arena_trim(0)
    tick = lib.arena_begin(NULL)
    block = lib.arena_realloc(tick, lib.arena_alloc(tick, 20_000), 20_000, 60_000)
    write(block, data_of(0, 60_000))
    text = lib.arena_strbuf_new(tick, 0)
    for _ in range(60):
        assert lib.arena_strbuf_append(text, data_of(3, 1000), 1000) == lib.ARENA_OK
    lib.arena_end(tick)
    tick = lib.arena_begin(NULL)
    for _ in range(4):
        assert read(lib.arena_zalloc(tick, 60_000), 60_000) == bytes(60_000)
    lib.arena_end(tick)


def test_ending_an_outer_tick_ends_the_inner_ones_first() -> None:
    order: list[str] = []

    @ffi.callback("void(void *)")
    def note(arg: Any) -> None:
        order.append(ffi.from_handle(arg))

    handles = [ffi.new_handle(name) for name in ("outer 1", "outer 2", "inner 1", "inner 2")]
    outer = lib.arena_begin(b"outer")
    inner = lib.arena_begin(b"inner")
    for tick, handle in zip((outer, outer, inner, inner), handles, strict=True):
        assert lib.arena_cleanup(tick, note, handle) == lib.ARENA_OK
    assert lib.arena_end(outer) == lib.ARENA_OK
    assert order == ["inner 2", "inner 1", "outer 2", "outer 1"]
    assert lib.arena_end(inner) == lib.ARENA_E_ENDED
    assert lib.arena_current() == NULL


def test_a_cleanup_needs_a_function(tick: Any) -> None:
    nothing = ffi.cast("arena_cleanup_fn", 0)
    assert lib.arena_cleanup(tick, nothing, NULL) == lib.ARENA_E_INVALID


def test_ticks_that_a_thread_leaves_open_end_with_it() -> None:
    before = stats()

    def leave_open() -> None:
        for _ in range(3):
            write(lib.arena_alloc(lib.arena_begin(NULL), 100_000), data_of(0, 100_000))

    thread = threading.Thread(target=leave_open)
    thread.start()
    thread.join()  # Python lets go of a thread a moment before the system does
    for _ in range(1000):
        if stats().ticks_open == before.ticks_open:
            break
        time.sleep(0.01)
    after = stats()
    assert after.ticks_begun - before.ticks_begun == 3
    assert after.ticks_open == before.ticks_open
    assert (after.scratch, after.chunks) == (before.scratch, before.chunks)


def test_growing_in_place_moves_nothing_and_growing_under_others_moves(tick: Any) -> None:
    block = lib.arena_alloc(tick, 100)
    assert lib.arena_realloc(tick, block, 100, 5000) == block
    lib.arena_alloc(tick, 1)
    assert lib.arena_realloc(tick, block, 5000, 5009) != block


def small_tick(size: int = 100) -> None:
    tick = lib.arena_begin(NULL)
    lib.arena_alloc(tick, size)
    lib.arena_end(tick)


@pytest.mark.as_ever
@pytest.mark.parametrize("piece", [1000, 30_000, 200_000, 3 * MIB])
def test_after_a_spike_the_surplus_is_back_within_32_small_ticks(piece: int) -> None:
    lib.arena_trim(0)
    for _ in range(40):
        small_tick()
    before = stats()
    tick = lib.arena_begin(b"spike")
    for _ in range(64 * MIB // piece):
        assert lib.arena_alloc(tick, piece) != NULL
    assert stats().chunks >= 63 * MIB
    lib.arena_end(tick)
    assert stats().cached >= 63 * MIB
    for _ in range(32):
        small_tick()
    after = stats()
    assert after.cached <= max(before.cached, CHUNK)
    assert after.maps - after.unmaps <= before.maps - before.unmaps
    assert after.high_water <= max(before.high_water, CHUNK)


@pytest.mark.as_ever
def test_oversize_is_never_cached_and_unmapped_at_once() -> None:
    small_tick()
    before = stats()
    tick = lib.arena_begin(NULL)
    sizes_of = [LARGEST - HEAD + 1, LARGEST, LARGEST + 1, 16 * MIB]
    for size in sizes_of:
        assert lib.arena_alloc(tick, size) != NULL
    during = stats()
    assert during.maps - before.maps == len(sizes_of)
    assert during.chunks - before.chunks >= sum(sizes_of)
    lib.arena_end(tick)
    after = stats()
    assert after.unmaps - before.unmaps >= len(sizes_of)
    assert after.cached <= before.cached
    assert after.high_water == before.high_water


def test_a_string_that_grows_through_every_size_leaves_no_chunk_behind() -> None:
    tick = lib.arena_begin(NULL)
    text = lib.arena_strbuf_new(tick, 0)
    expected = bytearray()
    while len(expected) < 20 * MIB:
        piece = data_of(len(expected) % 4096, max(100, len(expected) // 3))
        assert lib.arena_strbuf_append(text, piece, len(piece)) == lib.ARENA_OK
        expected += piece
        assert lib.arena_strbuf_len(text) == len(expected)
        # What it has moved out of is given back at once: never three copies of it.
        assert stats().chunks <= 3 * len(expected) + 3 * CHUNK
    assert read(lib.arena_strbuf_data(text), len(expected)) == expected
    lib.arena_end(tick)


def test_strings_that_grow_in_turns_through_every_size_do_not_disturb_each_other() -> None:
    tick = lib.arena_begin(NULL)
    texts = [(lib.arena_strbuf_new(tick, 0), bytearray()) for _ in range(3)]
    size = 50
    while size < 3 * MIB:
        for turn, (text, expected) in enumerate(texts):
            piece = data_of(size % 1000 + turn, size * (turn + 1) // 2)
            assert lib.arena_strbuf_append(text, piece, len(piece)) == lib.ARENA_OK
            expected += piece
            lib.arena_zalloc(tick, 1000 * turn)
        for text, expected in texts:
            assert read(lib.arena_strbuf_data(text), len(expected)) == expected
        size = size * 3 // 2
    lib.arena_end(tick)


def test_a_string_may_move_its_pages_while_its_neighbours_grow_and_go() -> None:
    tick = lib.arena_begin(NULL)
    texts = [(lib.arena_strbuf_new(tick, 0), bytearray()) for _ in range(3)]

    def grow(which: int, size: int) -> None:
        text, expected = texts[which]
        assert lib.arena_strbuf_append(text, data_of(size % 4096, size), size) == lib.ARENA_OK
        expected += data_of(size % 4096, size)

    grow(0, 100_000)
    grow(1, LARGEST + MIB)
    grow(2, LARGEST + MIB)
    for which in (1, 0, 2, 0, 1, 0, 0):  # those with mappings of their own move between others
        grow(which, LARGEST if which else len(texts[0][1]))
        for text, expected in texts:
            assert read(lib.arena_strbuf_data(text), len(expected)) == expected
    lib.arena_end(tick)


@pytest.mark.as_ever
def test_a_steady_loop_of_117_kb_ticks_makes_no_further_mapping() -> None:
    def turn() -> None:
        tick = lib.arena_begin(b"awareness")
        text = lib.arena_strbuf_new(tick, 0)
        for _ in range(117):
            lib.arena_alloc(tick, 600)
            assert lib.arena_strbuf_append(text, data_of(0, 400), 400) == lib.ARENA_OK
        lib.arena_end(tick)

    for _ in range(64):
        turn()
    before = stats()
    for _ in range(1000):
        turn()
    after = stats()
    assert (after.maps, after.unmaps) == (before.maps, before.unmaps)
    assert after.cached == before.cached


def test_a_trim_gives_back_what_is_cached_down_to_what_is_kept() -> None:
    tick = lib.arena_begin(NULL)
    for size in (1000, 60_000, 100_000, 300_000, MIB, 3 * MIB):
        lib.arena_alloc(tick, size)
    lib.arena_end(tick)
    for keep in (2 * MIB, CHUNK, 1, 0):
        before = stats()
        given = lib.arena_trim(keep)
        after = stats()
        assert given == before.cached - after.cached
        assert after.cached <= keep
    assert lib.arena_trim(0) == 0


def test_a_name_is_cut_after_31_bytes_and_null_is_no_name() -> None:
    for name, expected in ((NULL, b""), (b"", b""), (b"n" * 31, b"n" * 31), (b"n" * 99, b"n" * 31)):
        tick = lib.arena_begin(name)
        assert ffi.string(lib.arena_name(tick)) == expected
        lib.arena_end(tick)
    assert ffi.string(lib.arena_name(NULL)) == b""
    assert lib.arena_number(NULL) == 0
    assert lib.arena_used(NULL) == 0


def test_every_code_has_words_of_its_own() -> None:
    words = {ffi.string(lib.arena_strerror(code)) for code in range(-6, 1)}
    assert len(words) == 7
    assert ffi.string(lib.arena_strerror(-7)) == ffi.string(lib.arena_strerror(1))


def test_freeing_nothing_is_fine() -> None:
    lib.arena_free_persist(NULL)
    assert lib.arena_size_persist(NULL) == 0
    lib.arena_stats_get(NULL)


def test_peaks_stay_after_what_made_them_is_gone() -> None:
    tick = lib.arena_begin(NULL)
    lib.arena_alloc(tick, 9 * MIB)
    during = stats()
    assert during.scratch_peak >= 9 * MIB
    lib.arena_end(tick)
    kept = lib.arena_alloc_persist(3 * MIB)
    lib.arena_free_persist(kept)
    after = stats()
    assert after.scratch_peak >= 9 * MIB
    assert after.chunks_peak >= 9 * MIB
    assert after.persisted_peak >= 3 * MIB


def test_a_reallocated_block_that_had_a_chunk_of_its_own_gives_it_back(tick: Any) -> None:
    block = lib.arena_alloc(tick, 40 * KIB)
    write(block, data_of(9, 40 * KIB))
    for size in (200 * KIB, MIB, 3 * MIB, 6 * MIB, 20 * MIB):
        block = lib.arena_realloc(tick, block, lib.arena_used(tick), size)
        assert read(block, 40 * KIB) == data_of(9, 40 * KIB)
        assert stats().chunks <= 2 * size + CHUNK

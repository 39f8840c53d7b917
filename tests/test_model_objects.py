"""A model of captured blocks: any order of blocks, objects, ticks, threads; contents and escapes.

Blocks are made by C's own functions with a site of their own each, so that the host tells exactly
what the model expects; Python objects beside them, whose contents are compared. Allocation happens
on worker threads, one call at a time, so that what hypothesis allocates is not captured.
"""

from __future__ import annotations

import ctypes
import gc
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)
from objects_host import CALLOC, FREE, KINDS, MALLOC, REALLOC, Host, connected

from arena import _objects
from arena.objects import object_stats

THREADS = 3
ADOPTED = 4096  # see csrc/objects/hooks.c
SIZES = st.one_of(
    st.integers(1, 700),
    st.integers(500, 5000),
    st.integers(5000, 70_000),
    st.sampled_from((512, 513, 528, 529, 32_768, 32_769, 65_536, 65_537, 500_000, 2_500_000)),
)
THREAD = st.integers(0, THREADS - 1)
KIND = st.sampled_from(sorted(KINDS))

_host: Host | None = None


@pytest.fixture(scope="module", autouse=True)
def _recording() -> Iterator[None]:
    global _host
    with connected() as _host:
        yield
    _host = None


class Worker:
    """A thread that runs one call at a time."""

    def __init__(self) -> None:
        self._wanted, self._done = threading.Lock(), threading.Lock()
        self._wanted.acquire()
        self._done.acquire()
        self._call: Callable[[], Any] | None = None
        self._result: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            if self._call is None:
                return
            self._result = self._call()
            self._call = None
            self._done.release()

    def __call__(self, call: Callable[[], Any]) -> Any:
        self._call = call
        self._wanted.release()
        self._done.acquire()
        result, self._result = self._result, None
        return result

    def stop(self) -> None:
        self._wanted.release()
        self._thread.join()


@dataclass
class Tick:
    """An open tick."""

    number: int
    thread: int
    capture: int


@dataclass
class Block:
    """A block as the model knows it: of an open tick, escaped (a row), or outside."""

    address: int
    kind: str
    size: int
    site: int
    value: int
    tick: Tick | None
    escaped: bool = False


def data_of(seed: int, size: int) -> bytes:
    return bytes((seed * 7 + index) % 251 for index in range(16)) * (size // 16 + 1)


class Objects(RuleBasedStateMachine):
    """The machine."""

    blocks = Bundle("blocks")
    things = Bundle("things")

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.open: list[Tick] = []
        self.live: list[Block] = []

    @initialize()
    def start(self) -> None:
        assert _host is not None
        gc.collect()
        self.host = _host
        self.host.value("rows_left").value = 1 << 17
        self.first_row = self.host.value("rows_made").value
        self.site = 1000 + self.first_row
        self.escaped_before = object_stats().escaped_count
        self.workers = [Worker() for _ in range(THREADS)]

    # -- ticks

    def innermost(self, thread: int) -> Tick | None:
        return next((tick for tick in reversed(self.open) if tick.thread == thread), None)

    @rule(thread=THREAD)
    def begin(self, thread: int) -> None:
        self.made += 1
        number = self.made
        capture = self.workers[thread](lambda: self.host.begin(number))
        self.open.append(Tick(number, thread, capture))

    @rule(data=st.data(), thread=THREAD)
    def end(self, data: st.DataObject, thread: int) -> None:
        if not self.open:
            return
        tick = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        escaped = self.workers[thread](lambda: self.host.end(tick.capture))
        mine = [block for block in self.live if block.tick is tick]
        assert escaped >= len(mine)
        for block in mine:
            block.tick, block.escaped = None, True

    # -- blocks

    def sited(self, thread: int, call: Callable[[], int | None]) -> int | None:
        site = self.host.value("site_now")

        def run() -> int | None:
            site.value = self.site
            result = call()
            site.value = 0
            return result

        return self.workers[thread](run)  # type: ignore[no-any-return]

    @rule(target=blocks, thread=THREAD, kind=KIND, size=SIZES, zero=st.booleans())
    def allocate(self, thread: int, kind: str, size: int, zero: bool) -> Block:
        self.site += 1
        function = (lambda: CALLOC[kind](size, 1)) if zero else (lambda: MALLOC[kind](size))
        address = self.sited(thread, function)
        assert address is not None
        assert address % 16 == 0
        if zero:
            assert ctypes.string_at(address, size) == bytes(size)
        tick = self.innermost(thread) if size > 512 else None
        block = Block(address, kind, size, self.site, self.site, tick)
        self.live.append(block)
        self.write(block)
        return block

    def write(self, block: Block) -> None:
        ctypes.memmove(block.address, data_of(block.value, block.size), block.size)

    def check(self, block: Block, size: int) -> None:
        expected = data_of(block.value, block.size)[:size]
        assert ctypes.string_at(block.address, size) == expected

    @rule(block=consumes(blocks), thread=THREAD)
    def free(self, block: Block, thread: int) -> None:
        self.check(block, block.size)
        self.workers[thread](lambda: FREE[block.kind](block.address))
        self.live.remove(block)

    @rule(target=blocks, block=consumes(blocks), thread=THREAD, size=SIZES)
    def reallocate(self, block: Block, thread: int, size: int) -> Block:
        self.site += 1
        current = self.innermost(thread)
        kind, old = block.kind, block.address
        address = self.sited(thread, lambda: REALLOC[kind](old, size))
        assert address is not None
        block.address = address
        self.check(block, min(size, block.size))
        if size <= 512:
            block.tick, block.escaped = None, False
        elif block.escaped:
            if not any(row.size == size for row in self.host.of_site(block.site)):
                block.escaped, block.tick, block.site = False, current, self.site  # it moved
        elif block.tick is None and size <= ADOPTED:
            block.tick, block.site = current, self.site
        block.size, block.value = size, self.site
        self.write(block)
        return block

    # -- objects

    @rule(target=things, thread=THREAD, size=st.integers(1, 3000), shape=st.integers(0, 5))
    def make(self, thread: int, size: int, shape: int) -> tuple[Any, str]:
        makers: list[Callable[[], Any]] = [
            lambda: "é√x"[size % 3] * size,
            lambda: [str(number) for number in range(size)],
            lambda: {f"key {number}": number for number in range(size)},
            lambda: list(map(float, range(size))),
            lambda: json.loads(json.dumps([{"x" * size: [size] * size}] * 3)),
            lambda: [bytearray(b"ab") * size, b"z" * size, {*range(size)}],
        ]
        thing = self.workers[thread](makers[shape])
        return thing, repr(thing)

    @rule(target=things, thing=consumes(things), thread=THREAD, more=st.integers(1, 2000))
    def grow(self, thing: tuple[Any, str], thread: int, more: int) -> tuple[Any, str]:
        object_, text = thing
        assert repr(object_) == text

        def grow() -> None:
            if isinstance(object_, list):
                for number in range(more):
                    object_.append(number)
            elif isinstance(object_, dict):
                for number in range(more):
                    object_[f"more {number}"] = number

        self.workers[thread](grow)
        return object_, repr(object_)

    @rule(thing=consumes(things), thread=THREAD, cycle=st.booleans())
    def drop(self, thing: tuple[Any, str], thread: int, cycle: bool) -> None:
        object_, text = thing
        assert repr(object_) == text
        if cycle:
            loop: list[Any] = [object_]
            loop.append(loop)
        holder = [object_]
        del object_, thing
        self.workers[thread](holder.clear)

    @rule(thread=THREAD)
    def collect(self, thread: int) -> None:
        self.workers[thread](gc.collect)

    @rule()
    def trim(self) -> None:
        while _objects.lib.arena_objects_trim(3):
            pass

    @rule(thread=THREAD)
    def a_thread_ends_with_its_ticks_open(self, thread: int) -> None:
        self.workers[thread].stop()
        self.workers[thread] = Worker()
        for tick in self.open:
            if tick.thread == thread:
                tick.thread = -1

    # -- what always holds

    @invariant()
    def the_host_knows_what_has_escaped(self) -> None:
        if not hasattr(self, "host"):
            return
        assert self.host.value("mistakes").value == 0
        told = sorted(
            (row.site, row.size)
            for row in self.host.rows()[self.first_row :]
            if row.live and row.site
        )
        assert told == sorted((block.site, block.size) for block in self.live if block.escaped)

    @invariant()
    def a_block_has_its_contents(self) -> None:
        for block in self.live[-3:]:
            self.check(block, block.size)

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for tick in self.open:
            self.host.end(tick.capture)
        for block in self.live:
            self.check(block, block.size)
            FREE[block.kind](block.address)
        for worker in self.workers:
            worker.stop()
        stats = object_stats()
        assert (stats.open_count, stats.captured, stats.captured_count) == (0, 0, 0)
        assert self.host.value("mistakes").value == 0
        assert all(not row.live for row in self.host.rows()[self.first_row :] if row.site)


TestObjects = Objects.TestCase

"""The model of requests: any order of what may be done to them, by any thread or asyncio task.

Each call runs on a thread that is drawn, one call at a time, so that what it must do is known
exactly; tests/test_requests_stress.py lets them run against each other. The clock is the model's.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from model import CHUNK, MIB, data_of, piece_sizes, seeds, wide_of

import arena
import arena.requests

GUARDED = ("ticks_open", "scratch", "chunks", "pinned", "pinned_count", "persisted_count")
OWN = CHUNK  # a body that is larger has a mapping of its own
ENOUGH = 6 * MIB  # of one request: comparing it after each step takes time

KEYS: list[Hashable] = ["a", 7, ("turn", 3), b"raw", None]
GROUPS: list[Hashable] = [None, "rollout", 8]
THREADS = 3

DOES = [
    "nothing", "nothing", "fail", "fail", "leave", "read", "write", "allocate", "resize", "view",
    "itself", "another", "elsewhere", "same key", "other key", "group", "late",
]  # fmt: skip


class Clock:
    """The time that the registry reads."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class CallbackError(Exception):
    """What a failing on_discard of the model raises: it carries its number."""


class BodyError(Exception):
    """What the body of a delivery raises."""


@dataclass(eq=False)
class Model:
    """A request and what it must hold."""

    request: Any
    key: Hashable
    group: Hashable
    limit: int | None
    begun: float
    sees: bool
    """It has callbacks that tell when its end begins, and when it is over."""
    things: list[Thing] = field(default_factory=list)
    callbacks: list[tuple[str, int]] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    waiters: list[asyncio.Task[None]] = field(default_factory=list)
    state: str = "open"

    @property
    def used(self) -> int:
        return sum(len(thing.content) for thing in self.things)

    @property
    def failing(self) -> list[int]:
        """The labels of the callbacks that fail, in the order in which they run."""
        return [label for does, label in reversed(self.callbacks) if does in ("fail", "leave")]

    @property
    def leaves(self) -> bool:
        """One of them raises SystemExit, which no group hides."""
        return any(does == "leave" for does, _ in self.callbacks)


@dataclass(eq=False)
class Thing:
    """A handle and what it must hold."""

    handle: Any
    owner: Model
    content: bytearray
    views: list[memoryview] = field(default_factory=list)
    at_the_end: bytes = b""

    @property
    def grows(self) -> bool:
        return isinstance(self.handle, arena.StrBuf)


@dataclass(eq=False)
class Delivery:
    """A task inside of `async with delivering(key)` that waits to be told how to leave."""

    task: asyncio.Task[None]
    model: Model
    go: asyncio.Future[None]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


class RequestMachine(RuleBasedStateMachine):
    """Any order of opens, growth, deliveries, discards, sweeps, groups and views, by any thread."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        now = arena.stats()
        self.baseline = {name: getattr(now, name) for name in GUARDED}
        self.pools = [ThreadPoolExecutor(1) for _ in range(THREADS)]
        self.loop = asyncio.new_event_loop()
        self.labels = itertools.count()
        self.open: dict[Hashable, Model] = {}  # and those whose callbacks run
        self.told: dict[int, asyncio.Future[None]] = {}
        self.stale: list[Thing] = []
        self.viewed: list[Thing] = []  # what has live views
        self.deliveries: list[Delivery] = []
        self.inside: set[Model] = set()  # ended by a call that a callback made
        self.wrong: list[BaseException] = []  # a callback's own findings
        self.logged: list[str] = []
        self.around: arena.Tick | None = None
        self.opened = self.discarded = self.swept = 0
        self.blind = self.closing = False
        self.depth = 0

    @initialize(limit=st.sampled_from([None, None, 300, 70_000, "1 MiB", 3 * MIB]))
    def make(self, limit: Any) -> None:
        self.limit = {"1 MiB": MIB}.get(limit, limit)
        self.reqs = arena.Requests("model", limit=limit)
        self.handler = logging.Handler()
        self.handler.emit = self.note  # type: ignore[method-assign]
        logging.getLogger("arena").addHandler(self.handler)
        logging.getLogger("arena").propagate = False

    def note(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.logged.append(record.getMessage())

    # The model's own answers.

    def on(self, thread: int, call: Callable[[], Any]) -> Any:
        """Call it on a thread: 0 is this one, also for what a callback does."""
        return self.pools[thread - 1].submit(call).result() if thread else call()

    def fits(self, model: Model, size: int) -> bool:
        total = sum(each.used for each in self.open.values())
        return (model.limit is None or model.used + size <= model.limit) and (
            self.limit is None or total + size <= self.limit
        )

    def choose(self, pick: int, *, sees: bool = False, state: str = "open") -> Model | None:
        found = [
            each for each in self.open.values() if each.state == state and (each.sees or not sees)
        ]
        return found[pick % len(found)] if found else None

    def thing(self, which: int, *, grows: bool = False) -> Thing | None:
        found = [
            thing
            for model in self.open.values()
            if model.state == "open"
            for thing in model.things
            if thing.grows or not grows
        ]
        return found[which % len(found)] if found else None

    def spin(self) -> None:
        """Let the loop do all that is ready."""

        async def turn() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())

    picks = st.sampled_from([-1, -1, -1, -2, -2, 0, 1, 3])
    threads = st.sampled_from([0, 0, 0, *range(1, THREADS + 1)])
    keys = st.sampled_from(KEYS)
    groups = st.sampled_from(GROUPS)
    limits = st.sampled_from([None, None, None, 0, 1, 300, 20_000, "64 KiB", 2 * MIB])

    # Opening.

    @rule(
        drawn=st.lists(
            st.tuples(
                threads,
                keys,
                groups,
                limits,
                st.lists(st.sampled_from(DOES), max_size=3),
                st.sampled_from([True, True, True, False]),
            ),
            min_size=2,
            max_size=4,
        )
    )
    def open_some(self, drawn: list[tuple[int, Hashable, Hashable, Any, list[str], bool]]) -> None:
        for thread, key, group, limit, callbacks, sees in drawn:
            if not sees:  # nor in a group: what a callback does there must know who is still open
                group = None

            def call(key: Hashable = key, group: Hashable = group, limit: Any = limit) -> Any:
                return self.reqs.open(key, group=group, limit=limit)

            self.open_by(call, thread, key, group, limit, callbacks if sees else None)

    def open_by(
        self,
        call: Callable[[], Any],
        thread: int,
        key: Hashable,
        group: Hashable,
        limit: Any,
        drawn: list[str] | None,
    ) -> Model | None:
        """Open a request, or see that its key is taken; ``drawn`` is what its callbacks do."""
        if key in self.open:
            with pytest.raises(arena.TickError, match="open"):
                self.on(thread, call)
            assert self.reqs.get(key) is self.open[key].request
            return None
        request = self.on(thread, call)
        exact = {"64 KiB": CHUNK}.get(limit, limit)
        model = Model(request, key, group, exact, CLOCK.now, drawn is not None)
        assert (request.key, request.group, request.limit) == (key, group, exact)
        assert (request.open, request.used, request.age) == (True, 0, 0.0)
        assert self.reqs.get(key) is request
        self.open[key] = model
        self.opened += 1
        if drawn is not None:
            for does in ["nothing", *drawn]:  # the first runs last: it tells that all have run
                self.on_discard(model, does, thread)
        return model

    @precondition(lambda self: self.choose(0, sees=True))
    @rule(pick=picks, thread=threads, drawn=st.lists(st.sampled_from(DOES), min_size=1, max_size=3))
    def on_discard_of_one(self, pick: int, thread: int, drawn: list[str]) -> None:
        model = self.choose(pick, sees=True)
        assert model is not None
        for does in drawn:
            self.on_discard(model, does, thread)

    def on_discard(self, model: Model, does: str, thread: int) -> int:
        label = next(self.labels)
        self.on(thread, lambda: model.request.on_discard(self.run, model, does, label=label))
        model.callbacks.append((does, label))
        return label

    @precondition(lambda self: self.choose(0))
    @rule(pick=picks, thread=threads)
    def on_discard_of_what_cannot_be_called(self, pick: int, thread: int) -> None:
        model = self.choose(pick)
        assert model is not None

        async def later() -> None:
            raise AssertionError("nobody awaits it")

        for bad in (None, "fn", later):
            with pytest.raises(TypeError):
                self.on(thread, lambda bad=bad: model.request.on_discard(bad))

    # What callbacks do.

    def run(self, model: Model, does: str, *, label: int) -> None:
        if not model.ran:
            assert model.state == "open"
            model.state = "ending"
        model.ran.append(label)
        try:
            self.check_in_callback(model, does)
        except BaseException as error:
            self.wrong.append(error)
        if len(model.ran) == len(model.callbacks):
            self.over(model)
        if does == "settle":
            self.loop.call_soon_threadsafe(self.told[label].set_result, None)
        elif does == "fail":
            raise CallbackError(label)
        elif does == "leave":
            raise SystemExit(label)

    def check_in_callback(self, model: Model, does: str) -> None:
        request = model.request
        assert not request.open
        assert request.used == model.used
        assert model.key in self.reqs
        now = self.reqs.stats()
        assert now.opened == self.opened == now.open + now.discarded + now.swept
        assert now.open == len(self.reqs)
        if does == "read":
            assert self.reqs.get(model.key) is request
            for thing in model.things:
                self.check_live(thing)
        elif does == "write":
            for thing in model.things:
                if thing.content and not isinstance(thing.handle, arena.Str):
                    thing.handle[0] = thing.content[0] = 88
        elif does == "allocate":
            for call in (
                lambda: request.alloc(1),
                lambda: request.strdup("x"),
                request.strbuf,
                lambda: request.tick.alloc(1),
            ):
                with pytest.raises(arena.TickError):
                    call()
        elif does == "late":
            with pytest.raises(arena.TickError):
                request.on_discard(print)
        elif does == "resize":
            for thing in model.things:
                if thing.grows:
                    with pytest.raises((arena.TickError, BufferError)):
                        thing.handle.append("x")
                    assert thing.handle == thing.content
        elif does == "view":
            for thing in model.things[:1]:
                self.look_at(thing)
        elif does == "itself":
            assert not request.discard()
            assert not self.reqs.discard(model.key)
        elif does == "another":
            other = self.choose(label_of(model), sees=True)
            if other is not None:
                self.end(other, "discard", 0)
        elif does == "elsewhere":
            other = self.choose(-1, sees=True)
            if other is not None and not self.blind:
                self.allocate(other, 0, b"abc", "strdup")
        elif does == "same key":
            with pytest.raises(arena.TickError):
                self.reqs.open(model.key)
        elif does == "other key":
            key = ("opened by a callback", next(self.labels))
            if self.closing:
                with pytest.raises(arena.TickError, match="closed"):
                    self.reqs.open(key)
            else:
                self.open_by(lambda: self.reqs.open(key), 0, key, None, None, ["read"])
        elif does == "group" and model.group is not None:
            self.close_group_of(model.group, 0)

    def over(self, model: Model) -> None:
        """Its callbacks have run: the entry leaves, the memory goes, what views show stays."""
        assert self.open.pop(model.key) is model
        model.state = "ended"
        for thing in model.things:
            thing.at_the_end = bytes(thing.content)
        self.stale += model.things
        kept = [thing for thing in self.stale[:-40] if thing.views]
        self.stale[:-40] = kept

    # Ends. Each is checked by who asked for it: what was raised, what ran, in which order.

    def expect(
        self,
        models: Iterable[Model],
        call: Callable[[], Any],
        thread: int,
        *,
        swept: bool = False,
    ) -> Any:
        """Call what ends these; return its result, or the exception that came instead."""
        before = list(models)
        failing = {label for model in before for label in model.failing}
        outer, self.inside = (self.inside, self.blind), set()
        self.blind |= not all(model.sees for model in before) and len(before) > 1
        self.depth += 1
        raised: BaseException | None = None
        result: Any = None
        try:
            result = self.on(thread, call)
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            raised = error
        self.depth -= 1
        for model in before:
            if not model.sees:
                self.over(model)
            assert model.state == "ended"
            assert model.ran == [label for _, label in reversed(model.callbacks)]
            assert not model.request.open
            assert self.open.get(model.key) is not model
        inside = self.inside
        for model in inside:
            failing -= set(model.failing)
        self.ended = [model for model in before if model not in inside]
        self.inside, self.blind = outer[0] | inside | set(before), outer[1]
        if swept:
            self.swept += len(self.ended)
        else:
            self.discarded += len(self.ended)
        if not self.depth:
            self.inside = set()
            assert not self.wrong, self.wrong
        body = raised if isinstance(raised, BodyError | asyncio.CancelledError) else None
        if body is not None:
            notes = "".join(getattr(body, "__notes__", []))
            assert all(f"Error: {label}" in notes or f"Exit: {label}" in notes for label in failing)
            assert bool(notes) == bool(failing)
        elif any(model.leaves for model in self.ended):
            assert isinstance(raised, SystemExit), raised
            assert raised.code in failing
        elif failing:
            assert isinstance(raised, ExceptionGroup), raised
            assert {error.args[0] for error in leaves(raised)} == failing
            assert all(type(error) is CallbackError for error in leaves(raised))
            if len(before) == 1:
                assert [error.args[0] for error in leaves(raised)] == before[0].failing
        elif raised is not None:
            raise AssertionError("nothing was to be raised") from raised
        return body if raised is not None else result

    def end(self, model: Model, how: str, thread: int) -> None:
        reqs, key, request = self.reqs, model.key, model.request
        fails = bool(model.failing)

        def deliver(error: BaseException | None) -> None:
            with reqs.delivering(key) as r:
                assert r is request
                if error is not None:
                    raise error

        async def deliver_async(error: BaseException | None) -> None:
            async with reqs.delivering(key) as r:
                assert r is request
                await asyncio.sleep(0)
                if error is not None:
                    raise error

        def other_loop(error: BaseException | None) -> None:
            loop = asyncio.new_event_loop()
            try:
                loop.run_until_complete(deliver_async(error))
            finally:
                loop.close()

        body = BodyError("the body's own")
        ways: dict[str, Callable[[], Any]] = {
            "discard": lambda: reqs.discard(key),
            "own": request.discard,
            "deliver": lambda: deliver(None),
            "fail": lambda: deliver(body),
            "async": lambda: other_loop(None),
            "async fail": lambda: other_loop(body),
            "async cancel": lambda: other_loop(asyncio.CancelledError()),
        }
        if asyncio._get_running_loop() is not None and how.startswith("async"):
            how = "deliver"
        result = self.expect([model], ways[how], thread)
        if how in ("discard", "own"):
            assert result is (None if fails else True)
        elif how in ("fail", "async fail"):
            assert result is body
        elif how == "async cancel":
            assert type(result) is asyncio.CancelledError
        assert not request.discard()

    @precondition(lambda self: self.choose(0))
    @rule(
        drawn=st.lists(
            st.tuples(
                picks,
                st.sampled_from(
                    ["discard", "own", "deliver", "fail", "async", "async fail", "async cancel"]
                ),
                threads,
                st.sampled_from(["unseen", "seen", "seen for long"]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    def end_some(self, drawn: list[tuple[int, str, int, str]]) -> None:
        """In any order, by any thread, with or without a view alive."""
        for pick, how, thread, seen in drawn:
            model = self.choose(pick)
            if model is None:
                return
            thing = model.things[-1] if model.things and seen != "unseen" else None
            if thing is not None:
                self.look_at(thing)
            self.end(model, how, thread)
            self.spin()
            if thing is not None and seen == "seen":
                self.the_counters_are_exact()
                self.drop_views_of(thing, thread)
                self.the_counters_are_exact()

    @precondition(lambda self: self.stale)
    @rule(key=keys, thread=threads)
    def end_what_is_not_open(self, key: Hashable, thread: int) -> None:
        if key in self.open:
            return
        reqs = self.reqs
        assert self.on(thread, lambda: reqs.discard(key)) is False
        assert key not in reqs

        def deliver() -> None:
            with reqs.delivering(key):
                raise AssertionError("there is nothing to deliver")

        async def deliver_async() -> None:
            async with reqs.delivering(key):
                raise AssertionError("there is nothing to deliver")

        for call in (lambda: reqs.get(key), deliver, lambda: asyncio.run(deliver_async())):
            with pytest.raises(KeyError) as caught:
                self.on(thread, call)
            assert caught.value.args == (key,)

    firsts = st.sampled_from(["nothing", "another", "another", "group", "fail"])

    def let_the_first(self, does: str, models: list[Model]) -> None:
        """Let what ends first have a callback that may end what is to be ended next."""
        if models and models[0].sees:
            self.on_discard(models[0], does, 0)

    def close_group_of(self, group: Hashable, thread: int) -> None:
        models = [
            each for each in self.open.values() if each.group == group and each.state == "open"
        ]
        fails = any(each.failing for each in models)
        count = self.expect(models, lambda: self.reqs.close_group(group), thread, swept=True)
        if not fails:
            assert count == len(self.ended)

    @precondition(lambda self: any(each.group is not None for each in self.open.values()))
    @rule(pick=picks, thread=threads, first=firsts)
    def close_group(self, pick: int, thread: int, first: str) -> None:
        groups = [each.group for each in self.open.values() if each.group is not None]
        group = groups[pick % len(groups)]
        self.let_the_first(first, [each for each in self.open.values() if each.group == group])
        self.close_group_of(group, thread)
        self.close_group_of("of nobody", thread)
        self.spin()

    @rule(
        group=st.sampled_from(["rollout", 8]),
        thread=threads,
        drawn=st.lists(st.tuples(keys, limits, st.sampled_from(DOES)), min_size=1, max_size=3),
        early=st.booleans(),
        fails=st.booleans(),
        async_=st.booleans(),
    )
    def group_context(
        self,
        group: Hashable,
        thread: int,
        drawn: list[tuple[Hashable, Any, str]],
        early: bool,
        fails: bool,
        async_: bool,
    ) -> None:
        body = BodyError("the group's own")
        context = self.reqs.group(group)

        def enter() -> Any:
            if not async_:
                return context.__enter__()
            return asyncio.run(context.__aenter__())

        async def leave_async(*details: Any) -> Any:
            return await context.__aexit__(*details)

        def leave() -> None:
            details = (BodyError, body, None) if fails else (None, None, None)
            if async_:
                assert not asyncio.run(leave_async(*details))
            else:
                assert not context.__exit__(*details)
            if fails:
                raise body

        entered = self.on(thread, enter)
        models = []
        for key, limit, does in drawn:

            def call(key: Hashable = key, limit: Any = limit) -> Any:
                return entered.open(key, limit=limit)

            model = self.open_by(call, thread, key, group, limit, [does])
            if model is not None:
                models.append(model)
        if early and models:
            self.end(models[0], "discard", thread)
        still = [
            each for each in self.open.values() if each.group == group and each.state == "open"
        ]
        result = self.expect(still, leave, thread, swept=True)
        assert (result is body) == fails
        self.spin()

    @precondition(lambda self: self.open)
    @rule(
        by=st.sampled_from([0, 0.25, 1, 30]),
        older=st.sampled_from([0, 0.25, 1.0, 2.5, 60]),
        thread=threads,
        first=firsts,
    )
    def sweep(self, by: float, older: float, thread: int, first: str) -> None:
        CLOCK.now += by
        self.let_the_first(first, list(self.open.values()))
        models = [
            each
            for each in self.open.values()
            if each.state == "open" and CLOCK.now - each.begun > older
        ]
        told = [(each, CLOCK.now - each.begun, each.used) for each in models]
        fails = any(each.failing for each in models)
        self.logged.clear()
        count = self.expect(models, lambda: self.reqs.sweep(older_than=older), thread, swept=True)
        if not fails:
            assert count == len(self.ended)
        assert len(self.logged) == len(self.ended)
        for model, age, used in told:
            if model in self.ended:
                (line,) = (line for line in self.logged if f"request {model.key!r} of" in line)
                assert f"group {model.group!r}," in line
                assert f"{age:.1f} s" in line
                assert f" {used} bytes" in line
        self.spin()

    # Deliveries and waiters in tasks of one loop.

    @precondition(lambda self: self.choose(0) and len(self.deliveries) < 4)
    @rule(pick=picks)
    def deliver_in_a_task(self, pick: int) -> None:
        model = self.choose(pick)
        assert model is not None
        go: asyncio.Future[None] = self.loop.create_future()

        async def deliver() -> None:
            async with self.reqs.delivering(model.key) as r:
                assert r is model.request
                await go

        task = self.loop.create_task(deliver())
        self.deliveries.append(Delivery(task, model, go))
        self.spin()
        assert not task.done()

    @precondition(lambda self: self.deliveries)
    @rule(which=picks, how=st.sampled_from(["return", "fail", "cancel"]))
    def let_a_delivery_go(self, which: int, how: str) -> None:
        """The request may have ended meanwhile, and its key been opened again."""
        delivery = self.deliveries.pop(which % len(self.deliveries))
        if delivery.model.leaves and delivery.model.state == "open":
            self.end(delivery.model, "own", 0)  # a loop lets SystemExit through, and stops
        body = BodyError("the task's own")

        def go() -> None:
            if how == "return":
                delivery.go.set_result(None)
            elif how == "fail":
                delivery.go.set_exception(body)
            else:
                delivery.task.cancel()
            self.spin()
            assert delivery.task.done()
            delivery.task.result()

        still = [delivery.model] if delivery.model.state == "open" else []
        result = self.expect(still, go, 0)
        if how == "fail":
            assert result is body
        assert delivery.task.cancelled() == (how == "cancel")
        self.spin()

    @precondition(lambda self: self.choose(0, sees=True))
    @rule(drawn=st.lists(picks, min_size=1, max_size=4))
    def wait_for_some(self, drawn: list[int]) -> None:
        for pick in drawn:
            self.wait_for(pick)

    def wait_for(self, pick: int) -> None:
        """A handler that waits to be told that its request is over, whoever ends it."""
        model = self.choose(pick, sees=True)
        assert model is not None
        told: asyncio.Future[None] = self.loop.create_future()

        async def wait() -> None:
            await told

        self.told[self.on_discard(model, "settle", 0)] = told
        model.waiters.append(self.loop.create_task(wait()))
        self.spin()

    # Memory.

    def allocate(self, model: Model, thread: int, content: bytes, what: str) -> None:
        """Make a handle, or see a limit refuse it; then nothing has changed."""

        def call() -> Any:
            if what == "alloc":
                return model.request.alloc(len(content))
            where = model.request if what != "tick" else model.request.tick
            return getattr(where, "strbuf" if what == "tick" else what)(content)

        if not self.fits(model, len(content)):
            with pytest.raises(arena.LimitError):
                self.on(thread, call)
            assert model.request.used == model.used
            return
        handle = self.on(thread, call)
        if what == "alloc":
            assert handle == bytes(len(content))
            handle[:] = content
        assert not handle.persisted
        model.things.append(Thing(handle, model, bytearray(content)))

    @precondition(lambda self: self.choose(0))
    @rule(
        drawn=st.lists(
            st.tuples(
                picks,
                threads,
                piece_sizes,
                seeds,
                st.sampled_from(["strbuf", "strbuf", "strdup", "alloc", "tick"]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def allocate_some(self, drawn: list[tuple[int, int, int, int, str]]) -> None:
        for pick, thread, size, seed, what in drawn:
            model = self.choose(pick)
            assert model is not None
            if model.used < ENOUGH:
                self.allocate(model, thread, data_of(seed, size), what)

    @precondition(lambda self: self.choose(0))
    @rule(
        which=picks,
        fresh=st.booleans(),
        drawn=st.lists(
            st.tuples(threads, st.booleans(), piece_sizes, seeds), min_size=1, max_size=5
        ),
    )
    def append(self, which: int, fresh: bool, drawn: list[tuple[int, bool, int, int]]) -> None:
        """From any thread: in place where there is room, past 64 KiB in a mapping of its own."""
        if fresh or self.thing(which, grows=True) is None:
            model = self.choose(which)
            assert model is not None
            self.allocate(model, 0, b"", "strbuf")
            thing = model.things[-1]
        else:
            found = self.thing(which, grows=True)
            assert found is not None
            thing = found
        for thread, text, size, seed in drawn:
            piece: Any = wide_of(seed, size) if text else data_of(seed, size)
            added = piece.encode() if text else piece
            self.grow(thing, thread, added, lambda piece=piece: thing.handle.append(piece))

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(which=picks, thread=threads)
    def append_the_string_to_itself(self, which: int, thread: int) -> None:
        thing = self.thing(which, grows=True)
        assert thing is not None
        added = bytes(thing.content)
        self.grow(thing, thread, added, lambda: thing.handle.append(thing.handle))

    def grow(self, thing: Thing, thread: int, added: bytes, call: Callable[[], None]) -> None:
        if len(thing.content) + len(added) > ENOUGH:
            return
        if thing.views:
            error: type[Exception] = BufferError
        elif not self.fits(thing.owner, len(added)):
            error = arena.LimitError
        else:
            self.on(thread, call)
            thing.content += added
            return
        with pytest.raises(error):
            self.on(thread, call)
        assert thing.handle == thing.content

    @precondition(lambda self: self.thing(0, grows=True))
    @rule(which=picks, thread=threads, to=st.just(0.0) | st.floats(0, 1))
    def truncate(self, which: int, thread: int, to: float) -> None:
        thing = self.thing(which, grows=True)
        assert thing is not None
        size = round(to * len(thing.content))
        if thing.views and size < len(thing.content):
            with pytest.raises(BufferError):
                self.on(thread, lambda: thing.handle.truncate(size))
        else:
            assert self.on(thread, lambda: thing.handle.truncate(size)) == size
            del thing.content[size:]

    @precondition(lambda self: self.thing(0))
    @rule(which=picks, thread=threads)
    def take_a_view(self, which: int, thread: int) -> None:
        thing = self.thing(which)
        assert thing is not None
        self.on(thread, lambda: self.look_at(thing))

    def look_at(self, thing: Thing) -> None:
        thing.views.append(memoryview(thing.handle))
        if thing not in self.viewed:
            self.viewed.append(thing)

    @precondition(lambda self: self.viewed)
    @rule(which=picks, thread=threads, all_=st.booleans())
    def drop_views(self, which: int, thread: int, all_: bool) -> None:
        """Before the discard or after it."""
        thing = self.viewed[which % len(self.viewed)]
        if all_ or len(thing.views) == 1:
            self.drop_views_of(thing, thread)
        else:
            self.on(thread, thing.views.pop().release)

    def drop_views_of(self, thing: Thing, thread: int) -> None:
        while thing.views:
            self.on(thread, thing.views.pop().release)
        self.viewed.remove(thing)

    @precondition(lambda self: self.around or self.choose(0))
    @rule(limit=st.sampled_from([None, 0, 1000]))
    def begin_or_end_a_tick_around(self, limit: int | None) -> None:
        """Requests are independent of the current tick: of its limit, and of its end."""
        if self.around is None:
            self.around = arena.begin("around", limit=limit)
            return
        assert self.around.used == 0
        self.around.end()
        self.around = None

    @precondition(lambda self: self.stale)
    @rule(which=picks, thread=threads)
    def use_what_is_stale(self, which: int, thread: int) -> None:
        thing = self.stale[which % len(self.stale)]
        handle, request = thing.handle, thing.owner.request
        calls: list[Callable[[], Any]] = [
            lambda: len(handle),
            lambda: memoryview(handle),
            lambda: handle[0],
            handle.persist,
        ]
        if thing.grows:
            calls += [lambda: handle.append("x"), handle.clear, handle.tell]
        for call in calls:
            with pytest.raises(arena.StaleError) as caught:
                self.on(thread, call)
            assert repr(thing.owner.key) in str(caught.value)
        for call in (
            request.strbuf,
            lambda: request.alloc(1),
            lambda: request.strdup("x"),
            lambda: request.on_discard(print),
        ):
            with pytest.raises((arena.StaleError, arena.TickError)) as caught:
                self.on(thread, call)
            assert repr(thing.owner.key) in str(caught.value)
        assert request.discard() is False

    # What must hold after each step.

    def check_live(self, thing: Thing) -> None:
        handle, content = thing.handle, thing.content
        assert not handle.stale
        assert handle.nbytes == len(handle) == len(content)
        assert handle == content

    @invariant()
    def what_is_open_reads_back_as_written(self) -> None:
        for model in self.open.values():
            assert model.state == "open"
            for thing in model.things:
                self.check_live(thing)

    @invariant()
    def what_has_ended_is_stale_and_its_views_show_what_it_was(self) -> None:
        for thing in self.stale:
            assert thing.handle.stale
        for thing in self.viewed:
            for view in thing.views:
                assert view == thing.content

    @invariant()
    def the_registry_is_the_model(self) -> None:
        if not hasattr(self, "reqs"):
            return
        assert set(self.reqs) == set(self.open)
        assert len(self.reqs) == len(self.open)
        for key in KEYS:
            assert (key in self.reqs) == (key in self.open)
        for model in self.open.values():
            assert self.reqs.get(model.key) is model.request
            assert model.request.open
            assert model.request.used == model.used
            assert model.request.age == CLOCK.now - model.begun
        assert arena.current() is self.around

    @invariant()
    def the_counters_are_exact(self) -> None:
        if not hasattr(self, "reqs"):
            return
        now, process = self.reqs.stats(), arena.stats()
        used = sum(model.used for model in self.open.values())
        oldest = max((CLOCK.now - model.begun for model in self.open.values()), default=0.0)
        assert (now.name, now.open, now.bytes) == ("model", len(self.open), used)
        assert (now.oldest, now.limit) == (oldest, self.limit)
        assert now.opened == self.opened
        assert (now.discarded, now.swept) == (self.discarded, self.swept)
        escaped = [thing for thing in self.viewed if thing.handle.stale]
        sizes = [len(thing.content) for thing in escaped]
        # What is empty may or may not have memory that a view pins.
        assert now.pinned_count <= len(escaped)
        assert (now.pinned > 0) == (now.pinned_count > 0)
        assert now.pinned >= max([0, *sizes, sum(size for size in sizes if size > OWN)])
        if any(sizes):
            assert now.pinned > 0
        base = self.baseline
        assert process.pinned - base["pinned"] == now.pinned
        assert process.pinned_count - base["pinned_count"] == now.pinned_count
        assert process.scratch - base["scratch"] == used
        ticks = len(self.open) + (self.around is not None)
        assert process.ticks_open - base["ticks_open"] == ticks

    @invariant()
    def nobody_waits_for_what_is_over_and_nobody_is_told_before(self) -> None:
        for model in {thing.owner for thing in self.stale}:
            assert all(task.done() for task in model.waiters)
        for model in self.open.values():
            assert not any(task.done() for task in model.waiters)

    def teardown(self) -> None:
        try:
            if hasattr(self, "reqs"):
                models = list(self.open.values())
                self.closing = True
                self.expect(models, self.reqs.close, 0, swept=True)
                self.spin()
                assert all(task.done() for model in models for task in model.waiters)
                assert not self.open
                self.the_registry_is_the_model()
                self.the_counters_are_exact()
                with pytest.raises(arena.TickError, match="closed"):
                    self.reqs.open("late")
        finally:
            with suppress(Exception):
                self.reqs.close()
            for delivery in self.deliveries:
                delivery.task.cancel()
            self.spin()
            self.loop.close()
            if self.around is not None:
                self.around.end()
            for pool in self.pools:
                pool.shutdown()
            logging.getLogger("arena").propagate = True
            if hasattr(self, "handler"):
                logging.getLogger("arena").removeHandler(self.handler)
            for thing in self.viewed:
                for view in thing.views:
                    view.release()
            for name in ("open", "stale", "viewed", "deliveries", "inside"):
                getattr(self, name).clear()
        gc.collect()
        now = arena.stats()
        assert {name: getattr(now, name) for name in GUARDED} == self.baseline


def label_of(model: Model) -> int:
    """A number of its own that is the same in each run."""
    return model.callbacks[0][1]


@pytest.mark.ends
@pytest.mark.timeout(7200)  # the long profile
def test_every_request_ends_once_unblocks_who_waits_and_gives_back_all_it_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena.requests, "_clock", CLOCK)
    examples = settings().max_examples // 2  # it takes as long as the model of ticks otherwise
    run_state_machine_as_test(RequestMachine, settings=settings(max_examples=examples))

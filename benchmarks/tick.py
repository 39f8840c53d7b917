"""Beginning and ending a tick, empty and with allocations in it, against other context managers.

Each case is one `with` statement as a user types it; the limit is the same statement on a native
context manager that does nothing (noop.c), made anew each time by a function without arguments.
"ContextVar set + reset" is what knowing the current tick costs at least, in Python, with bound
methods; "native, ContextVar in C" is a native context manager that does just that in C.
The cost of the end alone is read from the clock around `end()`, with all handles still alive, as
many live objects in each case, and right after the end of another one, so that the code is in the
caches of the processor; what the clock costs is taken off.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import arena
from benchmarks import _noop
from benchmarks._report import Options, Report, Target
from benchmarks._timing import FULL, QUICK, Contender, Effort, Kind, Sampler, race

LIVE = 100_000  # objects that are alive while an end is timed
ENDS = 11
NATIVE_AND_VAR = "native no-op with ContextVar set + reset in it"


class Slotted:
    """A context manager in Python that does nothing, as cheaply as it can."""

    __slots__ = ()

    def __enter__(self) -> Slotted:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class SlottedName(Slotted):
    """The same with a name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


@contextlib.contextmanager
def generated(name: str | None = None) -> Iterator[None]:
    """Do nothing, around a yield."""
    yield


def names() -> dict[str, Any]:
    """Return what the statements of all contenders use."""
    noop = _noop.load()
    var: contextvars.ContextVar[object] = contextvars.ContextVar("var")
    return {
        "tick": arena.tick,
        "begin": arena.begin,
        "make": noop.make,
        "make_scope": noop.make_scope,
        "Noop": noop.Noop,
        "Slotted": Slotted,
        "SlottedName": SlottedName,
        "nullcontext": contextlib.nullcontext,
        "generated": generated,
        "lock": threading.Lock(),
        "set": var.set,
        "reset": var.reset,
        "BytesIO": io.BytesIO,
    }


def empty(known: dict[str, Any]) -> list[Contender]:
    """Return the contenders of the empty scope."""
    return [
        Contender("arena", Kind.ARENA, "with tick(): pass", known),
        Contender("native no-op", Kind.LIMIT, "with make(): pass", known),
        Contender("slotted Python no-op", Kind.PEER, "with Slotted(): pass", known),
        Contender("contextlib.nullcontext", Kind.PEER, "with nullcontext(): pass", known),
        Contender("@contextmanager", Kind.PEER, "with generated(): pass", known),
        Contender("native no-op, its type called", Kind.PART, "with Noop(): pass", known),
        Contender("threading.Lock, one for all", Kind.PART, "with lock: pass", known),
        Contender("ContextVar set + reset alone", Kind.PART, "reset(set(None))", known),
        Contender(NATIVE_AND_VAR, Kind.PART, "with make(): reset(set(None))", known),
        Contender("native, ContextVar in C", Kind.PART, "with make_scope(): pass", known),
    ]


def named(known: dict[str, Any]) -> list[Contender]:
    """Return the contenders of the scope with a name."""
    return [
        Contender("arena", Kind.ARENA, 'with tick("awareness"): pass', known),
        Contender("native no-op, no name", Kind.LIMIT, "with make(): pass", known),
        Contender("slotted Python no-op", Kind.PEER, 'with SlottedName("awareness"): pass', known),
        Contender("@contextmanager", Kind.PEER, 'with generated("awareness"): pass', known),
    ]


def nested(known: dict[str, Any]) -> list[Contender]:
    """Return the contenders of a scope in a scope."""

    def twice(scope: str) -> str:
        return f"with {scope}:\n with {scope}: pass"

    return [
        Contender("arena", Kind.ARENA, twice("tick()"), known),
        Contender("native no-op", Kind.LIMIT, twice("make()"), known),
        Contender("slotted Python no-op", Kind.PEER, twice("Slotted()"), known),
        Contender("contextlib.nullcontext", Kind.PEER, twice("nullcontext()"), known),
        Contender("@contextmanager", Kind.PEER, twice("generated()"), known),
    ]


def explicit(known: dict[str, Any]) -> list[Contender]:
    """Return the contenders of begin and end."""
    set_reset = "ContextVar set + reset alone"
    return [
        Contender("arena", Kind.ARENA, "begin().end()", known),
        Contender("native no-op", Kind.LIMIT, "make().end()", known),
        Contender(set_reset, Kind.PART, "reset(set(None))", known),
        Contender("slotted Python no-op", Kind.PEER, "Slotted().__enter__().__exit__()", known),
    ]


def one_strbuf(known: dict[str, Any]) -> list[Contender]:
    """Return the contenders of a scope with one string that is written once."""
    write = 'write("user: ")'
    return [
        Contender("arena", Kind.ARENA, 'with tick() as t: t.strbuf().append("user: ")', known),
        Contender(
            "native no-op, one no-op call", Kind.LIMIT, 'with make() as t: t.take("user: ")', known
        ),
        Contender(
            "slotted no-op, StringIO",
            Kind.PEER,
            f"with Slotted(): StringIO().{write}",
            {**known, "StringIO": io.StringIO},
        ),
        Contender(
            "slotted no-op, BytesIO",
            Kind.PEER,
            'with Slotted(): BytesIO().write("user: ".encode())',
            known,
        ),
    ]


def filled(known: dict[str, Any], count: int) -> list[Contender]:
    """Return the contenders of a scope with ``count`` allocations of 16 bytes."""
    known = {**known, "turns": range(count)}
    body = "\n alloc = t.alloc\n for _ in turns: alloc(16)"
    own, around = 'tick(limit="64 MiB")', 'tick(limit="64 MiB"), tick()'
    return [
        Contender("arena", Kind.ARENA, f"with tick() as t:{body}", known),
        Contender("arena, with a limit", Kind.PART, f"with {own} as t:{body}", known),
        Contender("arena, a limit around it", Kind.PART, f"with {around} as t:{body}", known),
        Contender("arena, wiped", Kind.PART, f"with tick(wipe=True) as t:{body}", known),
        Contender(
            "no-op calls",
            Kind.LIMIT,
            "with make() as t:\n take = t.take\n for _ in turns: take(16)",
            known,
        ),
        Contender(
            "slotted no-op, bytearray(16)",
            Kind.PEER,
            "with Slotted():\n for _ in turns: bytearray(16)",
            known,
        ),
    ]


def arena_opened(count: int, size: int) -> tuple[Any, object]:
    """Return a tick that has begun, and the handles of its allocations."""
    tick = arena.begin()
    alloc = tick.alloc
    return tick, [alloc(size) for _ in range(count)]


def noop_opened(count: int, size: int) -> tuple[Any, object]:
    """Return what has an end that does nothing, and as many objects."""
    return _noop.load().make(), [object() for _ in range(count)]


def clocked(opened: Callable[[int, int], tuple[Any, object]], count: int, size: int) -> float:
    """Return the seconds that ``end()`` of what ``opened`` returns takes, without the clock."""
    now = time.perf_counter_ns
    taken, clock = [], []
    for _ in range(ENDS):
        owner, alive = opened(count, size)
        others = [object() for _ in range(LIVE - count)]  # the caches are as full in each case
        opened(1, 16)[0].end()  # its code is in the caches now,
        repr(owner)  # and so is what it looks at first
        end = owner.end
        before = now()
        end()
        after = now()
        again = now()
        del alive, others
        taken.append(after - before)
        clock.append(again - after)
    return (statistics.median(taken) - statistics.median(clock)) / 1e9


def ends() -> list[Sampler]:
    """Return the contenders of the end alone."""
    samplers = [
        Sampler(
            f"arena, end after {count} x {size} B",
            Kind.ARENA,
            functools.partial(clocked, arena_opened, count, size),
        )
        for count, size in ((0, 16), (10, 16), (1000, 16), (LIVE, 16), (400, 4000))
    ]
    nothing = functools.partial(clocked, noop_opened, 0, 16)
    return [*samplers, Sampler("native no-op", Kind.LIMIT, nothing)]


def run(options: Options, report: Report) -> None:
    """Time all cases."""
    effort = QUICK if options.quick else FULL
    known = names()
    no_slower = [Target("arena", "slotted Python no-op")]
    report.race(
        "with tick(): pass",
        "ns",
        race(empty(known), effort),
        [*no_slower, Target("arena", NATIVE_AND_VAR, plus=40e-9)],
    )
    report.race('with tick("awareness"): pass', "ns", race(named(known), effort), no_slower)
    report.race("tick in a tick", "ns", race(nested(known), effort), no_slower)
    report.race("begin().end()", "ns", race(explicit(known), effort))
    report.race("tick with one strbuf, one append", "ns", race(one_strbuf(known), effort))
    for count in (10, 1000, LIVE):
        few = Effort(max(3, effort.rounds // 4), effort.seconds)
        series = race(filled(known, count), few if count == LIVE else effort)
        report.race(f"tick with {count} allocations of 16 B", "us", series)
    rounds = Effort(3 if options.quick else 15, effort.seconds)
    report.race(
        "the end alone",
        "ns",
        race(ends(), rounds),
        [Target(f"arena, end after {LIVE} x 16 B", "arena, end after 400 x 4000 B", ratio=1.1)],
    )
    report.say("The last two hold as many bytes in as many chunks, in 250 times more allocations.")

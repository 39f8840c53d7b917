"""Runs the scenarios, the n-th allocation failing for every n that each reaches.

A process of its own, for a failure inside the interpreter itself may be fatal:
``python -m oom.sweep objects|core FAILURES_IN_A_ROW [names...]``. One line of JSON for each
scenario: what was injected, how often the call failed, and what was wrong. What fails:

objects   what the interpreter allocates, objects and memory, by _testcapi.set_nomemory
core      what arena's own shared object asks for, by malloc, realloc, mmap, mremap: shim.c
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

from oom import scenarios
from oom.scenarios import SCENARIOS, Entry, Outcome

import arena
from arena import _native
from arena._native import lib

MOST = 5000
TURNS = 12
NOW = ("ticks_open", "scratch", "pinned", "pinned_count", "persisted_count", "strays_count")
# A persisted StrBuf counts by its room, which it may keep; and a tick keeps the chunk that it got.
LATER = (*NOW, "chunks", "persisted", "strays")
TYPES = [arena.Block, arena.Str, arena.StrBuf, arena.Tick, _native._Scope]


# What was raised, what was returned, and whether a failure was met.
Result = tuple[BaseException | None, object, bool]


class Objects:
    """Fails what the interpreter allocates. It fails in the test's own code too: be brief."""

    def __init__(self) -> None:
        import _testcapi

        self.arm = _testcapi.set_nomemory
        self.disarm = _testcapi.remove_mem_hooks

    def run(self, call: Callable[[], object], n: int, width: int) -> Result:
        """Call with the failure armed."""
        error: BaseException | None = None
        value: object = None
        probe = itertools.repeat(None, n + 2)
        met = True
        sys._getframe()  # CPython 3.11: see interpreters_own
        self.arm(n, n + width)
        try:
            try:
                value = call()
            except BaseException as caught:
                error = caught
            # A failure that was not met lies in wait for the next that allocates.
            for _ in probe:
                object()
        except MemoryError:
            met = False
        finally:
            self.disarm()
        return error, value, met or type(error) is MemoryError

    def check(self) -> None:
        """Nothing to add."""


class Core:
    """Fails what arena's shared object asks of malloc and of the system."""

    def __init__(self) -> None:
        shim = ctypes.CDLL(None)
        shim.shim_watch.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        shim.shim_arm.argtypes = (ctypes.c_long, ctypes.c_long)
        for name in ("shim_calls", "shim_failed"):
            getattr(shim, name).restype = ctypes.c_long
        for name in ("shim_live_maps", "shim_live_map_bytes", "shim_live_mallocs"):
            getattr(shim, name).restype = ctypes.c_size_t
        with open("/proc/self/maps") as maps:
            lines = [line.split("-", 1) for line in maps if _native.__file__ in line]
        low = int(lines[0][0], 16)
        high = max(int(rest.split()[0], 16) for _, rest in lines)
        lib.arena_trim(0)
        shim.shim_watch(low, high)
        self.shim = shim

    def run(self, call: Callable[[], object], n: int, width: int) -> Result:
        error: BaseException | None = None
        value: object = None
        self.shim.shim_arm(n, n + width)
        try:
            value = call()
        except BaseException as caught:
            error = caught
        finally:
            met = self.shim.shim_failed() > 0
            self.shim.shim_arm(-1, -1)
        return error, value, met

    def check(self) -> None:
        """What the system has given is what the counters say, to the byte."""
        now = arena.stats()
        maps = self.shim.shim_live_map_bytes()
        # Records of ticks lie in pages of their own, which stay.
        records = maps - (now.chunks + now.cached + now.pinned)
        slabs = (scenarios.depth + 400) // 200 + 1
        assert records % scenarios.SLAB == 0, f"{records} bytes of mappings that nobody counts"
        assert 0 <= records <= slabs * scenarios.SLAB, f"{records} bytes of mappings too many"
        mallocs = self.shim.shim_live_mallocs()
        counted = now.persisted_count + now.strays_count
        assert mallocs == counted, f"{mallocs} live mallocs, {counted} counted"


def interpreters_own(error: BaseException, call: Callable[[], object]) -> bool:
    """CPython 3.11 loses an exception that leaves a Python function, when it has no memory for the
    frame object that the traceback wants. A call that runs nothing of Python has no such excuse.
    And a lock that cannot be had is a RuntimeError there."""
    text = str(error)
    lost = text == "error return without exception set" or (
        text.startswith("<function ")
        and text.endswith("returned NULL without setting an exception")
    )
    if type(call) is not FunctionType:
        return False
    if type(error) is RuntimeError:
        return text == "can't allocate lock"
    return type(error) is SystemError and lost


def counters(names: tuple[str, ...]) -> dict[str, int]:
    now = arena.stats()
    return {name: getattr(now, name) for name in names}


def living() -> list[int]:
    """What a leak would make grow: uses of each type of arena, and the interpreter's objects."""
    arena.begin().end()  # the context keeps the last tick's scope: now one with nothing around it
    gc.collect()
    return [*map(sys.getrefcount, TYPES), sys.getallocatedblocks()]


class Run:
    """One scenario, one n."""

    def __init__(self, entry: Entry, injector: Objects | Core) -> None:
        self.entry, self.injector = entry, injector

    def __call__(self, n: int, width: int) -> tuple[bool, bool]:
        """Return whether a failure was met, and whether the call failed for it."""
        lib.arena_trim(0)  # so that what needs pages asks for them
        gc.collect()
        before = counters(LATER)
        scenarios.unraisable.clear()
        steps = self.entry.make()
        call = next(steps)
        self.direct = type(call) is not FunctionType
        between = counters(NOW)
        if width > 1 and isinstance(self.injector, Objects) and not self.survives(call):
            error, value, met = None, call(), False
        else:
            error, value, met = self.injector.run(call, n, width)
        failed = error is not None
        if error is not None:
            if type(error) is not MemoryError and not interpreters_own(error, call):
                raise error
            assert met, "a MemoryError out of nowhere"
            # What the frames of the call hold is no leak.
            traceback.clear_frames(error.__traceback__)
            error = None
        gc.collect()
        if failed and self.entry.atomic:
            self.same(counters(NOW), between, "right after the MemoryError")
        del call
        outcome = None if failed else Outcome(value)
        value = None
        try:
            steps.send(outcome)
            raise AssertionError("the scenario went on")
        except StopIteration:
            pass
        del steps, outcome
        strange = [name for name in scenarios.unraisable if name not in TOLD]
        assert not strange, f"told to sys.unraisablehook: {strange}"
        gc.collect()
        self.same(counters(LATER), before, "at the end")
        self.injector.check()
        return met, failed

    def survives(self, call: Callable[[], object]) -> bool:
        """Two failures in a row crash CPython 3.11 itself where it sets a context variable, and
        where an exception leaves a function. So only what goes straight into C, and begins no tick.
        """
        return self.direct and call is not arena.begin and "__enter__" not in repr(call)

    def same(self, now: dict[str, int], then: dict[str, int], when: str) -> None:
        changed = {name: (then[name], now[name]) for name in now if now[name] != then[name]}
        assert not changed, f"counters {when}, before and now: {changed}"


def sweep(entry: Entry, injector: Objects | Core, width: int) -> dict[str, Any]:
    """Every n, and that again while objects seem to leak."""
    run = Run(entry, injector)
    report: dict[str, Any] = {"injected": 0, "failed": 0, "problems": []}
    grew: list[bool] = []
    for turn in range(TURNS):
        before = living()
        before = living()  # with as many numbers alive as there are at the end
        injected = failures = 0
        for n in range(MOST):
            try:
                met, failed = run(n, width)
            except BaseException as error:
                text = "".join(traceback.format_exception(error)).strip()
                report["problems"].append(f"n = {n}: {text}")
                if len(report["problems"]) == 3:
                    return report
                del error
                continue
            injected += met
            failures += failed
            if not met:
                break
        else:
            report["problems"].append("it never came to an end")
        if turn and not report["problems"]:  # the first fills caches
            after = living()
            now = [later > then for later, then in zip(after, before, strict=True)]
            now[-1] &= run.direct
            del after
            grew = [all(both) for both in zip(grew or now, now, strict=True)]
            del now
        report["injected"], report["failed"] = injected, failures
        if report["problems"] or (turn and not any(grew)):
            return report
    # Functions of Python that run out of memory leak in CPython itself: only calls that go straight
    # into C answer for every object, the others for those of arena.
    what = [*(kind.__name__ for kind in TYPES), "objects"]
    leaks = [name for name, grows in zip(what, grew, strict=True) if grows]
    report["problems"].append(f"each of {TURNS} turns leaves more of {leaks}")
    return report


# What an end tells where nothing can be raised.
TOLD = {"MemoryError", "WrongError", "SystemExit", "ExceptionGroup"}


def note(what: sys.UnraisableHookArgs) -> None:
    scenarios.unraisable.append(what.exc_type.__name__)


def main() -> None:
    kind, width, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(300, exit=True)
    sys.unraisablehook = note
    scenarios.lasting = width > 2
    injector = Objects() if kind == "objects" else Core()
    # CPython 3.11 crashes when the first context of a thread cannot be made: so there are contexts.
    arena.begin().end()
    scenarios.OTHER.submit(lambda: arena.begin().end()).result()
    gc.collect()
    gc.freeze()  # the collections between the steps are many
    gc.disable()  # and none comes in between
    for name, entry in SCENARIOS.items():
        # The C functions through cffi: what they gave is lost when the wrapper cannot be made.
        if (names and name not in names) or (kind == "objects" and name.startswith("c ")):
            continue
        print(json.dumps({"name": name}), flush=True)
        report = sweep(entry, injector, width)
        print(json.dumps({"name": name, **report}), flush=True)
    scenarios.close()


if __name__ == "__main__":
    main()

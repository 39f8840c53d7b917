"""Watches the tests that are marked ``@pytest.mark.arena``: what escapes them, and what grows.

Registered by ``_arena_pytest``, the entry point, once a test has the marker. Needs pytest 8.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import arena
from arena._map_text import plural
from arena._native import lib
from arena.escapes import Escape, EscapeMap, Frame, as_it_ran, escapes

__all__ = ["Plugin"]

_DEPTH = 4  # frames of each place, some of them pytest's
_TITLE = "arena: what escapes"


@dataclasses.dataclass(frozen=True)
class _Allowed:
    """The arguments of the marker."""

    max_escapes: int | None = 0
    flat: bool = True


def _allowed(mark: pytest.Mark) -> _Allowed:
    """Read the marker; wrong arguments fail the test with one line."""

    def wrong(what: str) -> None:
        pytest.fail(f"@pytest.mark.arena(max_escapes=0, flat=True): {what}", pytrace=False)

    if mark.args:
        wrong(f"its arguments have names, unlike {mark.args[0]!r}")
    for name in mark.kwargs.keys() - {"max_escapes", "flat"}:
        wrong(f"there is no argument {name!r}")
    allowed = _Allowed(**mark.kwargs)
    most = allowed.max_escapes
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        wrong(f"max_escapes is a whole number from 0, or None for any number, not {most!r}")
    if not isinstance(allowed.flat, bool):
        wrong(f"flat is True or False, not {allowed.flat!r}")
    return allowed


def _in_the_test(site: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames down to the test; those that called it are pytest's."""
    files = [Path(frame.file).parent.name for frame in site]
    return site[: files.index("_pytest")] if "_pytest" in files[1:] else site


def _now() -> EscapeMap:
    gc.collect()  # garbage in cycles is no escape
    return escapes()


class _Watch:
    """What is known of one test while it runs."""

    def __init__(self, allowed: _Allowed) -> None:
        self._allowed = allowed
        self._before = _now()
        self._shared: Counter[Any] = Counter()  # what fixtures that outlive the test hold
        self._in_shared = False
        self.has_fixtures = False  # of its own, which may hold what their teardown frees
        self.passed = False  # up to now
        self.report = ""

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Around the setup of a fixture that outlives the test: what it makes is no escape."""
        if self._in_shared:
            yield
            return
        self._in_shared = True
        before = _now()
        try:
            yield
        finally:
            self._in_shared = False
            self._shared.update({row._key: max(0, row.count) for row in _now().diff(before)})

    def judge(self, *, growth: bool, escapes: bool) -> None:
        """Fail the test if it left too much, or if something grew."""
        uncollected = arena.escapes().diff(self._before)
        changes = _now().diff(self._before)
        found: list[Escape] = []
        said: list[str] = []
        if growth and self._allowed.flat:
            found += as_it_ran(changes, uncollected).growing
            if found:
                said.append(f"memory from {plural(len(found), 'place')} keeps growing")
        if escapes and self._allowed.max_escapes is not None:
            new = [row for row in changes if row.count > self._shared[row._key]]
            count = sum(row.count - self._shared[row._key] for row in new)
            if count > self._allowed.max_escapes:
                keys = {row._key for row in found}
                found += (row for row in new if row._key not in keys)
                said.append(
                    f"{plural(count, 'new escape')} alive after the test, "
                    f"{self._allowed.max_escapes:,} allowed"
                )
        if said:
            found = [dataclasses.replace(row, site=_in_the_test(row.site)) for row in found]
            self.report = str(EscapeMap(tuple(found), changes=True))
            pytest.fail(f"arena: {'; '.join(said)}", pytrace=False)


class Plugin:
    """The hooks. Each leaves tests without the marker alone."""

    def __init__(self) -> None:
        self._watch: _Watch | None = None
        self._told: _Watch | None = None  # after the teardown, for its report
        self._tracing = contextlib.ExitStack()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Look at what is alive before the fixtures of the test are set up."""
        mark = item.get_closest_marker("arena")
        if mark is not None:
            allowed = _allowed(mark)
            self._tracing.enter_context(arena.trace(max(_DEPTH, lib.arena_tracing())))
            self._watch = _Watch(allowed)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        """Tell what fixtures of a module or session make from what the test does."""
        watch = self._watch
        if watch is None:
            return (yield)
        if fixturedef.scope == "function":
            # The parameters of a parametrized test come as fixtures too, and hold nothing of it.
            watch.has_fixtures |= fixturedef.func.__name__ != "get_direct_param_fixture_func"
            return (yield)
        with watch.shared():
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Judge a test that passed, but for what the teardown of its fixtures may still free."""
        result = yield
        watch = self._watch
        if watch is not None:
            watch.judge(growth=True, escapes=not watch.has_fixtures)
            watch.passed = True
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Judge the rest of it, and watch no longer."""
        try:
            result = yield
            watch = self._watch
            if watch is not None and watch.passed and watch.has_fixtures:
                # Until after all hooks pytest holds what the fixtures gave.
                getattr(item, "funcargs", {}).clear()
                watch.judge(growth=False, escapes=True)
            return result
        finally:
            self._told, self._watch = self._watch, None
            self._tracing.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the map into the report of the test that it fails."""
        report = yield
        watch = self._watch or self._told
        if watch is not None and watch.report:
            report.sections.append((_TITLE, watch.report))
            watch.report = ""
        if call.when == "teardown":
            self._told = None
        return report

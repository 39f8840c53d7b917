"""What every test of the suite shares: hypothesis profiles, and a guard on accounting.

The models run under a profile of hypothesis, chosen by the environment variable ARENA_PROFILE:

tiny    for tools that make everything some 30 times slower, as tests/memcheck does
quick   the default: the same examples every time, all models together in some 20 seconds
ci      about two minutes, new examples each time; a failure prints the blob that repeats it
long    about an hour: before a release, or after a change in csrc
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import arena
from arena import _native
from arena._native import lib

settings.register_profile(
    "arena", deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
_BASE = settings.get_profile("arena")
settings.register_profile(
    "quick", _BASE, max_examples=50, stateful_step_count=50, derandomize=True, database=None
)
settings.register_profile(
    "tiny", _BASE, max_examples=5, stateful_step_count=30, derandomize=True, database=None
)
settings.register_profile("ci", _BASE, max_examples=260, stateful_step_count=60)
settings.register_profile("long", _BASE, max_examples=4800, stateful_step_count=100)
settings.load_profile(os.environ.get("ARENA_PROFILE", "quick"))


def pytest_collection_finish() -> None:
    """Leave what the session itself is made of out of later collections.

    The models collect garbage for each example; with all modules of the suite imported that took
    as long as the rest of it.
    """
    gc.collect()
    gc.freeze()


# Counters that a test must leave as it found them. Bytes of persisted memory are left out: objects
# of the test session itself may hold a persisted string that has grown, and the count tells more.
GUARDED = (
    "ticks_open",
    "scratch",
    "chunks",
    "pinned",
    "pinned_count",
    "persisted_count",
    "strays_count",
)


def counters() -> dict[str, int]:
    """Return the guarded counters as they are now."""
    now = arena.stats()
    return {name: getattr(now, name) for name in GUARDED}


@pytest.fixture(autouse=True)
def accounting_is_exact(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test every counter of what lives is back at what it was before it."""
    failed = request.session.testsfailed
    before = counters()
    yield
    if request.session.testsfailed > failed:
        return  # it has its own report, whose traceback keeps handles alive
    after = counters()
    if after != before:  # garbage in a cycle may hold a handle; collecting after each test is dear
        gc.collect()
        after = counters()
    if failed and all(after[name] <= before[name] for name in GUARDED):
        return  # the traceback of an earlier failure has let go
    assert after == before, "the test, or what it tests, left memory behind"


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the suite run with ARENA_TRACE, ARENA_AUDIT and ARENA_OBJECTS set, as tests/watched does.

    An audit keeps the memory of ended ticks. A test marked ``ends`` shows that what has ended is
    gone: it runs with a budget of 2 bytes, so that each tick is kept and let go of at once. One
    marked ``as_ever`` counts mappings, or shows what is there before anybody asks for these: it
    runs without.
    """
    audit, traced, objects = lib.arena_audit_now(), lib.arena_tracing(), arena.tick().objects
    if request.node.get_closest_marker("as_ever"):
        for name in ("ARENA_AUDIT", "ARENA_TRACE", "ARENA_OBJECTS"):
            monkeypatch.delenv(name, raising=False)
        audit, traced = 0, 0
        _native._objects_always(False)
    elif audit and request.node.get_closest_marker("ends"):
        audit = 2
        monkeypatch.setenv("ARENA_AUDIT", "2")
    with arena.audit(audit), arena.trace(traced):
        yield
    if objects:
        _native._objects_always(True)

"""The Trimmer: when it trims, when it does not, and that it starts and stops cleanly."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import arena
from arena import trimmer as module
from arena._native import lib
from arena._stall import Look
from arena.trimming import KEEP_RETAINED, Plan, TrimResult

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(
    lib.arena_heap_kind() == lib.ARENA_HEAP_NONE, reason="no thread is started here"
)


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    assert module.active() is None
    assert "arena-trimmer" not in {thread.name for thread in threading.enumerate()}


def until(fact: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


class Fake:
    """Trims that return what the test says, and a record of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reasons: list[str] = []
        self.keeps: list[int] = []
        self.returned = 0
        self.plan = Plan()
        self.error: Exception | None = None
        monkeypatch.setattr(module, "run", self.run)

    def run(self, reason: str, keep: int, budget_ms: float | None) -> tuple[TrimResult, Plan]:
        self.reasons.append(reason)
        self.keeps.append(keep)
        if self.error is not None:
            raise self.error
        walked = None if self.plan.withheld else 1.5
        skipped = (self.plan.withheld,) if self.plan.withheld else ()
        return (
            TrimResult(
                reason, "glibc", 100 << 20, (100 << 20) - self.returned, 0, 2.0, walked, 1, skipped
            ),
            self.plan,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


def test_it_trims_when_the_time_has_passed(fake: Fake) -> None:
    with arena.Trimmer(every=0.02, growth=None, every_ticks=None, cooldown=0.01) as trimmer:
        until(lambda: trimmer.stats().trims >= 2)
    assert fake.reasons[0] == "0.02 s have passed"
    stats = trimmer.stats()
    assert stats.milliseconds == pytest.approx(2.0 * stats.trims)
    assert stats.worst_ms == 1.5
    assert stats.ms_per_mb > 0


def test_it_trims_when_enough_ticks_have_finished(fake: Fake) -> None:
    with arena.Trimmer(every=1000, growth=None, every_ticks=16, cooldown=0.01) as trimmer:
        for _ in range(15):
            with arena.tick():
                pass
        time.sleep(0.1)
        assert not fake.reasons
        with arena.tick():
            pass
        until(lambda: trimmer.stats().trims == 1)
    assert fake.reasons == ["16 ticks have finished"]


def test_it_trims_when_resident_memory_has_grown(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = 100 << 20
    monkeypatch.setattr(module, "_resident", lambda: resident)
    with arena.Trimmer(every=1000, growth="8 MiB", every_ticks=None, cooldown=0.01) as trimmer:
        time.sleep(0.1)
        assert not fake.reasons
        resident += 8 << 20
        until(lambda: trimmer.stats().trims == 1)
        time.sleep(0.1)
    assert fake.reasons == ["resident memory grew by 8.4 MB"]


def test_no_two_trims_within_the_cooldown(fake: Fake) -> None:
    with arena.Trimmer(every=0.01, growth=1, every_ticks=1, cooldown=30.0):
        for _ in range(100):
            with arena.tick():
                pass
        time.sleep(0.2)
    assert not fake.reasons


def test_a_second_one_is_an_error_that_names_the_first(fake: Fake) -> None:
    with arena.Trimmer() as first:
        for second in (arena.Trimmer(), first):
            with pytest.raises(arena.TrimError, match=rf"{Path(__file__).name}:\d+"):
                second.start()
        assert first.stats().running
        assert module.active() is first
    assert not first.stats().running
    first.start()  # and again, once it has stopped
    assert "runs since" in repr(first)
    first.stop()
    first.stop()
    assert "stopped" in repr(first)


def test_it_backs_off_when_three_in_a_row_return_next_to_nothing_and_says_so_once(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "arena")
    with arena.Trimmer(every=0.01, growth=None, every_ticks=None, cooldown=0.01) as trimmer:
        until(lambda: trimmer.stats().backed_off >= 8)
        fake.returned = 50 << 20  # and comes back when there is something to win again
        until(lambda: trimmer.stats().returned > 0)
        before = trimmer.stats().backed_off
        assert before <= 64
    said = [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]
    assert said == [
        "arena.Trimmer: 3 trims in a row returned next to nothing; it trims less often now"
    ]


def test_it_backs_off_when_what_it_returned_is_faulted_in_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "arena")
    fake.returned = 40 << 20
    faults = 0

    def faulted() -> int:
        nonlocal faults
        faults += (30 << 20) // os.sysconf("SC_PAGE_SIZE")
        return faults

    monkeypatch.setattr(module, "_faulted", faulted)
    with arena.Trimmer(every=0.01, growth=None, every_ticks=None, cooldown=0.01) as trimmer:
        until(lambda: trimmer.stats().backed_off >= 4)
        stats = trimmer.stats()
    assert 0.3 < stats.refault_share <= 0.75
    assert sum("faulted in again" in record.getMessage() for record in caplog.records) == 1


def test_what_returns_much_for_good_is_not_backed_off(fake: Fake) -> None:
    fake.returned = 4 << 40  # more than the faults of any test
    with arena.Trimmer(every=0.01, growth=None, every_ticks=None, cooldown=0.01) as trimmer:
        until(lambda: trimmer.stats().trims >= 8)
        assert trimmer.stats().backed_off == 1
        assert trimmer.stats().refault_share < 0.01


def test_a_heap_that_would_stall_is_left_alone_and_what_stays_is_told(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "arena")
    fake.plan = Plan(198.0, "937 MB are free, to walk them takes 198 ms", "stall", Look(1, 1))
    with arena.Trimmer(every=0.01, growth=None, every_ticks=None, cooldown=0.01) as trimmer:
        until(lambda: trimmer.stats().skips.get("stall", 0) >= 2)
        assert trimmer.stats().withheld == fake.plan.withheld
        assert trimmer.stats().backed_off > 1
        fake.plan = Plan()
        until(lambda: trimmer.stats().withheld is None)
    assert trimmer.stats().worst_ms == 1.5
    assert sum("937 MB are free" in record.getMessage() for record in caplog.records) == 1


def test_what_the_next_ticks_need_stays_while_ticks_go_on_and_goes_when_they_stop(
    fake: Fake,
) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.001):
            with arena.tick():
                pass

    thread = threading.Thread(target=work)
    thread.start()
    with arena.Trimmer(every=0.05, growth=None, every_ticks=None, cooldown=0.05):
        until(lambda: len(fake.keeps) >= 2)
        busy = list(fake.keeps)
        stop.set()
        thread.join()
        count = len(fake.keeps)
        until(lambda: len(fake.keeps) >= count + 2)
    assert set(busy) == {KEEP_RETAINED}
    assert fake.keeps[-1] == 0


def test_an_error_in_a_trim_is_logged_and_it_goes_on(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    fake.error = ValueError("out of luck")
    with arena.Trimmer(every=0.01, growth=None, every_ticks=None, cooldown=0.01) as trimmer:
        until(lambda: len(fake.reasons) >= 2)
        fake.error = None
        until(lambda: trimmer.stats().trims >= 1)
    assert "out of luck" in caplog.text


def test_a_log_handler_that_raises_does_not_end_it(fake: Fake) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the handler's own")

    logger, handler = logging.getLogger("arena"), Raising()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    fake.error = ValueError("out of luck")
    try:
        with arena.Trimmer(every=0.01, growth=None, every_ticks=None, cooldown=0.01) as trimmer:
            until(lambda: len(fake.reasons) >= 3)
            assert trimmer.stats().running
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_a_log_handler_may_ask_for_the_figures(fake: Fake) -> None:
    seen: list[int] = []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(trimmer.stats().trims)

    logger, handler = logging.getLogger("arena"), Asking()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with arena.Trimmer(every=0.01, growth=None, every_ticks=None, cooldown=0.01) as trimmer:
            until(lambda: bool(seen))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_async_with() -> None:
    async def main() -> None:
        async with arena.Trimmer(every=0.02, cooldown=0.02) as trimmer:
            while trimmer.stats().trims == 0:
                await asyncio.sleep(0.01)
            assert trimmer.stats().running
        assert not trimmer.stats().running

    asyncio.run(main())


def child(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_the_child_of_a_fork_has_none_and_may_have_one_of_its_own() -> None:
    out = child(
        """
import os, warnings, arena
warnings.simplefilter("ignore", DeprecationWarning)  # of fork() with threads
trimmer = arena.Trimmer(every=0.01, cooldown=0.01)
trimmer.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        assert not trimmer.stats().running
        trimmer.stop()
        with arena.Trimmer(every=0.01, cooldown=0.01) as mine:
            import time
            while not mine.stats().trims:
                time.sleep(0.005)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
assert trimmer.stats().running
trimmer.stop()
print("ok")
"""
    )
    assert out == "ok\n"


def test_the_interpreter_exits_cleanly_while_it_runs() -> None:
    out = child(
        """
import arena, time
trimmer = arena.Trimmer(every=0.001, cooldown=0.001)
trimmer.start()
keep = [bytearray(1000) for _ in range(50_000)]
time.sleep(0.1)
print("ok")
"""
    )
    assert out == "ok\n"


def test_a_true_one_brings_resident_memory_down() -> None:
    out = child(
        """
import ctypes, time, arena
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks = [libc.malloc(65520) for _ in range(900)]
for block in blocks:
    libc.memset(block, 1, 65520)
for number, block in enumerate(blocks):
    if number % 16:
        libc.free(block)
with arena.Trimmer(every=0.05, cooldown=0.05) as trimmer:
    for _ in range(400):
        if trimmer.stats().returned > 40_000_000: break
        time.sleep(0.02)
    stats = trimmer.stats()
assert stats.returned > 40_000_000, stats
assert stats.last.backend == "glibc"
print("ok")
"""
    )
    assert out == "ok\n"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"every": 0}, ValueError, "every is a number of seconds above 0"),
        ({"every": -1.0}, ValueError, "every is a number of seconds above 0"),
        ({"every": "10s"}, TypeError, "every is a number of seconds"),
        ({"every": True}, TypeError, "every is a number of seconds"),
        ({"cooldown": float("nan")}, ValueError, "cooldown is a number of seconds above 0"),
        ({"growth": "12 potatoes"}, ValueError, "12 potatoes"),
        ({"growth": 0}, ValueError, "growth is a size above 0 bytes"),
        ({"growth": -5}, ValueError, "-5"),
        ({"every_ticks": 0}, ValueError, "every_ticks is a number of ticks from 1"),
        ({"every_ticks": 1.5}, TypeError, "every_ticks is a number of ticks"),
        ({"every_ticks": True}, TypeError, "every_ticks is a number of ticks"),
        ({"max_stall_ms": 0}, ValueError, "max_stall_ms is a number of milliseconds above 0"),
        ({"max_stall_ms": 1e308}, ValueError, "up to 10^9, not 1e+308"),
        ({"every": 10**400}, ValueError, "up to 10^9, not a larger one"),
        ({"max_stall_ms": None}, TypeError, "max_stall_ms is a number of milliseconds"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(
    arguments: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        arena.Trimmer(**arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

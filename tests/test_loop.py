"""ticks(): one tick a turn, on time, nothing skipped silently, ended on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import threading
import time

import pytest

import arena
from arena.loop import Ticks


class Clock:
    """A clock that only moves when told to: waiting moves it to the end of the wait, exactly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.waits: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(threading.Event, "wait", lambda event, seconds: self.wait(seconds))

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_each_turn_has_an_open_tick_that_ends_before_the_next() -> None:
    before: list[arena.Tick] = []
    for t in arena.ticks(0, "turn", count=5, limit=100):
        assert not any(old.open for old in before)
        assert (t.open, t.name, t.limit) == (True, "turn", 100)
        assert arena.current() is t
        t.strdup("scratch")
        before.append(t)
    assert len(before) == 5
    assert not any(t.open for t in before)


def test_starts_keep_to_the_grid_whatever_the_bodies_take(clock: Clock) -> None:
    starts = []
    for i, _ in enumerate(arena.ticks(0.2, count=50)):
        starts.append(clock.now)
        clock.now += 0.001 * (i % 7)
    assert starts == pytest.approx([1000.0 + 0.2 * i for i in range(50)], abs=1e-6)


def test_an_overrun_is_counted_and_told_and_the_missed_starts_are_left_out(clock: Clock) -> None:
    starts, told = [], []
    loop = arena.ticks(1.0, count=5, on_overrun=lambda it: told.append((it.overruns, it.skipped)))
    for _ in loop:
        starts.append(clock.now - 1000)
        clock.now += 3.5 if len(starts) == 2 else 0.1
    # The second body ran from 1.0 to 4.5: the starts at 2 and 3 were missed, that at 4 is late.
    assert starts == pytest.approx([0, 1, 4.5, 5, 6])
    assert (loop.begun, loop.overruns, loop.skipped) == (5, 1, 2)
    assert told == [(1, 2)]
    assert "5 begun, 1 overruns, 2 skipped" in repr(loop)


def test_being_late_is_measured(clock: Clock) -> None:
    loop = arena.ticks(1.0, count=3)
    late = []
    for _ in loop:
        late.append(loop.late)
        clock.now += 1.25 if len(late) == 1 else 0
    assert late == pytest.approx([0, 0.25, 0])


def test_an_interval_of_zero_never_waits_and_never_overruns(clock: Clock) -> None:
    loop = arena.ticks(0, count=10)
    for _ in loop:
        clock.now += 1
    assert (clock.waits, loop.overruns) == ([], 0)


@pytest.mark.parametrize("way", ["break", "return", "raise"])
def test_the_tick_ends_on_every_way_out_of_a_plain_loop(way: str) -> None:
    log: list[str] = []
    kept: list[arena.Tick] = []
    loop = arena.ticks(0, "out")

    def leave() -> None:
        for t in loop:
            kept.append(t)
            t.cleanup(log.append, "cleaned")
            if way == "break":
                break
            if way == "return":
                return
            raise LookupError

    with contextlib.suppress(LookupError):
        leave()
    assert log == ["cleaned"]
    assert not kept[0].open


@pytest.mark.parametrize("way", ["break", "raise", "cancel"])
def test_the_tick_ends_on_every_way_out_of_an_async_loop(way: str) -> None:
    log: list[str] = []
    kept: list[arena.Tick] = []
    loop = arena.ticks(0.001, "out")

    async def leave() -> None:
        async for t in loop:
            kept.append(t)
            t.cleanup(log.append, "cleaned")
            if way == "break":
                break
            if way == "raise":
                raise LookupError
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(leave())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert log == ["cleaned"]

    asyncio.run(main())
    assert not kept[0].open


def test_two_async_loops_share_a_thread_and_never_each_others_tick() -> None:
    async def run(name: str, interval: float) -> int:
        turns = 0
        async for t in arena.ticks(interval, name, count=20):
            s = arena.strdup(name)
            await asyncio.sleep(interval / 2)
            assert arena.current() is t
            assert s == name
            turns += 1
        return turns

    async def main() -> list[int]:
        return await asyncio.gather(run("a", 0.001), run("b", 0.0017))

    assert asyncio.run(main()) == [20, 20]


def test_an_async_loop_that_is_always_late_lets_others_run() -> None:
    async def main() -> int:
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        async for _ in arena.ticks(1e-9, count=10):
            pass
        task.cancel()
        return others

    assert asyncio.run(main()) >= 9


def test_stop_from_another_thread_wakes_a_waiting_loop() -> None:
    loop = arena.ticks(60)
    timer = threading.Timer(0.05, loop.stop)
    timer.start()
    turns = sum(1 for _ in loop)
    timer.join()
    assert turns == 1
    assert list(loop) == []


@pytest.mark.parametrize("from_thread", [True, False])
def test_stop_wakes_a_waiting_async_loop(from_thread: bool) -> None:
    async def main() -> int:
        loop = arena.ticks(60)
        if from_thread:
            threading.Timer(0.05, loop.stop).start()
        else:
            asyncio.get_running_loop().call_later(0.05, loop.stop)
        turns = 0
        async for _ in loop:
            turns += 1
        return turns

    assert asyncio.run(asyncio.wait_for(main(), 30)) == 1


def test_stop_in_a_signal_handler_ends_the_loop_after_its_body() -> None:
    loop = arena.ticks(0.01)
    old = signal.signal(signal.SIGUSR1, lambda *_: loop.stop())
    try:
        turns = 0
        for _ in loop:
            turns += 1
            if turns == 3:
                signal.raise_signal(signal.SIGUSR1)
        assert turns == 3
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_a_tick_that_the_body_ended_itself_is_fine() -> None:
    for t in arena.ticks(0, count=2):
        t.end()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"interval": "0.2"}, TypeError),
        ({"interval": True}, TypeError),
        ({"interval": -1}, ValueError),
        ({"interval": math.nan}, ValueError),
        ({"interval": math.inf}, ValueError),
        ({"interval": 1e10}, ValueError),
        ({"interval": 10**400}, ValueError),
        ({"interval": 5e-324}, ValueError),
        ({"interval": 1, "count": 1.5}, TypeError),
        ({"interval": 1, "count": -1}, ValueError),
        ({"interval": 1, "name": 3}, TypeError),
        ({"interval": 1, "limit": "much"}, ValueError),
        ({"interval": 1, "escapes": "no"}, ValueError),
        ({"interval": 1, "on_overrun": 3}, TypeError),
    ],
)
def test_wrong_arguments_fail_at_once(arguments: dict[str, object], error: type) -> None:
    with pytest.raises(error):
        arena.ticks(**arguments)  # type: ignore[arg-type]


def test_a_loop_of_no_turns_opens_no_tick() -> None:
    before = arena.stats().ticks_begun
    assert list(arena.ticks(60, count=0)) == []
    assert arena.stats().ticks_begun == before
    assert isinstance(arena.ticks(1), Ticks)

"""``assert_no_growth()``: what piles up fails it, with the line; what does not passes."""

from __future__ import annotations

import asyncio
import functools
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import arena
from arena import _native
from arena.growth import assert_no_growth


@pytest.fixture(autouse=True)
def kept() -> Iterator[list[Any]]:
    """A place to leave things in, which is empty again for the accounting of the suite."""
    things: list[Any] = []
    yield things
    things.clear()


@pytest.fixture(autouse=True)
def _objects_may_not_be_built() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "assert_no_growth.. does not see Python objects")
        yield


class Counted:
    """A turn that knows its number."""

    def __init__(self, turn: Callable[[int], object]) -> None:
        self.turn = turn
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        self.turn(self.calls)


def persisted(size: int) -> arena.Block:
    return arena.alloc_persist(size)


def test_a_leak_in_each_tick_fails_with_the_map_and_the_line(kept: list[Any]) -> None:
    def leak() -> None:
        kept.append(arena.strdup_persist("x" * 1024))  # the leak

    with pytest.raises(arena.GrowthError) as caught:
        assert_no_growth(leak)
    text = str(caught.value)
    lines = Path(__file__).read_text().split("\n")
    line = next(n for n, source in enumerate(lines, 1) if source.endswith("# the leak"))
    assert text.startswith("memory grew by 1,0")
    assert "a tick over 50 ticks, after 10 to warm up; 0 bytes a tick are allowed" in text
    assert f"test_growth.py:{line} in " in text
    assert 'kept.append(arena.strdup_persist("x" * 1024))' in text
    assert "persist    +50" in text
    assert "GROWS" in text
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, arena.ArenaError)
    caught.value.__traceback__ = None


@pytest.mark.parametrize("every", [1, 2, 5, 10])
def test_a_leak_now_and_then_fails(every: int, kept: list[Any]) -> None:
    turn = Counted(lambda n: kept.append(persisted(10)) if n % every == 0 else None)
    with pytest.raises(arena.GrowthError):
        assert_no_growth(turn)


@pytest.mark.parametrize("period", [2, 3, 7, 13, 20, 30])
def test_a_cache_that_is_emptied_now_and_then_passes(period: int, kept: list[Any]) -> None:
    def turn(n: int) -> None:
        if n % period == 0:
            kept.clear()
        kept.append(persisted(100))

    assert_no_growth(Counted(turn), warmup=30)


def test_a_cache_that_is_full_after_the_warm_up_passes_and_one_that_fills_on_fails(
    kept: list[Any],
) -> None:
    def turn(n: int) -> None:
        if len(kept) < 30:
            kept.append(persisted(100))

    assert_no_growth(Counted(turn), warmup=30)
    kept.clear()
    assert_no_growth(Counted(turn), warmup=5)  # full in the middle
    kept.clear()
    with pytest.raises(arena.GrowthError):
        assert_no_growth(Counted(turn), warmup=0, ticks=29)


@pytest.mark.parametrize("when", [1, 11, 35, 60])
def test_what_is_made_once_passes(when: int, kept: list[Any]) -> None:
    assert_no_growth(Counted(lambda n: kept.append(persisted(10**6)) if n == when else None))


def test_garbage_in_cycles_is_no_growth(kept: list[Any]) -> None:
    class Node:
        pass

    def turn() -> None:
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        node.held = persisted(100)  # type: ignore[attr-defined]

    gc.disable()
    try:
        assert_no_growth(turn)
    finally:
        gc.enable()


def test_scratch_and_what_is_freed_again_pass() -> None:
    def turn() -> None:
        with arena.tick("inner") as t:
            t.strbuf("x" * 100_000)
            t.strdup("kept a while").persist().free()

    assert_no_growth(turn)


def test_views_stale_handles_and_empty_ones_are_growth_too(kept: list[Any]) -> None:
    for leak in (
        lambda: kept.append(memoryview(arena.alloc(10))),
        lambda: kept.append(arena.strdup("stale")),
        lambda: kept.append(arena.strdup_persist("")),
    ):
        with pytest.raises(arena.GrowthError):
            assert_no_growth(leak)
        kept.clear()


def test_leaks_of_one_line_by_many_ways_are_one_leak(kept: list[Any]) -> None:
    """Each tick has another caller, so another row of the map."""

    def leak() -> None:
        kept.append(persisted(10))

    names = [f"way_{n}" for n in range(60)]
    ways: dict[str, Any] = {"leak": leak}
    exec("\n".join(f"def {name}(): leak()" for name in names), ways)
    with pytest.raises(arena.GrowthError) as caught:
        assert_no_growth(Counted(lambda n: ways[names[n - 1]]()))
    assert "in way_20" in str(caught.value)


@pytest.mark.parametrize(
    ("tolerance", "passes"),
    [(1024, True), ("1 KiB", True), ("1 kB", False), (1023, False), (0, False), ("1 MiB", True)],
)
def test_tolerance_is_in_bytes_a_tick_and_exact(
    tolerance: int | str, passes: bool, kept: list[Any]
) -> None:
    def leak() -> None:
        kept.append(persisted(1024))

    if passes:
        assert_no_growth(leak, tolerance=tolerance)
    else:
        with pytest.raises(arena.GrowthError):
            assert_no_growth(leak, tolerance=tolerance)


@pytest.mark.parametrize(("ticks", "warmup"), [(4, 0), (5, 3), (50, 10)])
def test_it_calls_the_function_in_that_many_ticks_of_its_own(ticks: int, warmup: int) -> None:
    seen = []

    def turn() -> None:
        current = arena.current()
        assert current is not None
        seen.append((current.name, current.number))

    assert_no_growth(turn, ticks=ticks, warmup=warmup)
    assert len(seen) == len(set(seen)) == ticks + warmup
    assert {name for name, _ in seen} == {"assert_no_growth"}
    assert arena.current() is None


def test_an_async_function_is_awaited_in_the_callers_loop(kept: list[Any]) -> None:
    async def leak() -> None:
        await asyncio.sleep(0)
        kept.append(arena.strdup("x").persist())

    async def clean() -> None:
        await asyncio.sleep(0)
        arena.strdup("x")

    class Callable_:  # noqa: N801
        async def __call__(self) -> None:
            await leak()

    async def main() -> None:
        await assert_no_growth(clean)
        await assert_no_growth(functools.partial(clean), ticks=4)
        for fn in (leak, Callable_()):
            with pytest.raises(arena.GrowthError):
                await assert_no_growth(fn)

    asyncio.run(main())


def test_what_the_function_raises_goes_through_and_its_tick_is_ended() -> None:
    def turn(n: int) -> None:
        if n == 20:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        assert_no_growth(Counted(turn))
    assert arena.stats().ticks_open == 0


def objects_are_captured() -> bool:
    try:
        with arena.tick(objects=True):
            return True
    except (ImportError, arena.ArenaError):
        return False


@pytest.mark.skipif(not objects_are_captured(), reason="this build captures no objects")
def test_python_objects_that_pile_up_are_found_and_those_that_go_are_not(kept: list[Any]) -> None:
    def leak() -> None:
        kept.append(bytes(2000))  # the object

    with pytest.raises(arena.GrowthError) as caught:
        assert_no_growth(leak)
    assert "object " in str(caught.value)
    assert "kept.append(bytes(2000))" in str(caught.value)
    kept.clear()

    def goes() -> None:
        garbage: list[Any] = [bytes(2000)]
        garbage.append(garbage)

    assert_no_growth(goes)


def test_a_script_that_calls_it_from_its_top_level_gets_the_lines(tmp_path: Path) -> None:
    """All frames of the process are fewer than are recorded, and one of them is arena's own."""
    script = tmp_path / "short.py"
    script.write_text(
        "import arena\n"
        "kept = []\n"
        "def turn():\n"
        "    kept.append(arena.strdup('x').persist())\n"
        "try: arena.assert_no_growth(turn)\n"
        "except arena.GrowthError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert f"{script}:4 in turn" in done.stdout
    assert f"from {script}:5 in <module>" in done.stdout


def test_without_the_objects_module_it_warns_and_watches_the_rest(
    monkeypatch: pytest.MonkeyPatch, kept: list[Any]
) -> None:
    tick = _native.tick

    def no_objects(name: str | None = None, **options: Any) -> arena.Tick:
        if options.pop("objects", False):
            raise ImportError("arena._objects is not built")
        return tick(name, **options)

    monkeypatch.setattr(_native, "tick", no_objects)
    with pytest.warns(RuntimeWarning, match="does not see Python objects: arena._objects") as told:
        assert_no_growth(lambda: None)
    assert told[0].filename == __file__
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(arena.GrowthError, match="Python objects were not watched"),
    ):
        assert_no_growth(lambda: kept.append(persisted(1)))


def generator() -> Iterator[int]:
    yield 1


async def async_function() -> None:
    pass


@pytest.mark.parametrize(
    ("fn", "options", "error", "words"),
    [
        (3, {}, TypeError, "takes a function, not int"),
        (generator, {}, TypeError, "to call a generator's runs nothing"),
        (lambda: async_function(), {}, TypeError, "give it the async function itself"),
        (print, {"ticks": 3}, ValueError, "ticks is a whole number from 4, not 3"),
        (print, {"ticks": "50"}, TypeError, "ticks is a whole number, not str"),
        (print, {"ticks": True}, TypeError, "ticks is a whole number, not bool"),
        (print, {"warmup": -1}, ValueError, "warmup is a whole number from 0, not -1"),
        (print, {"warmup": 1.5}, TypeError, "warmup is a whole number, not float"),
        (print, {"trace": 0}, ValueError, "trace is a whole number from 1, not 0"),
        (print, {"trace": 99}, ValueError, "32"),
        (print, {"tolerance": "lots"}, ValueError, "the tolerance a tick is a number of bytes"),
        (print, {"tolerance": -1}, ValueError, "the tolerance a tick is from 0"),
        (print, {"tolerance": 1.5}, TypeError, "a whole number of bytes, not float"),
        (print, {"tolerance": None}, TypeError, "tolerance is a number of bytes, not None"),
        (print, {"tolerance": True}, TypeError, "tolerance"),
    ],
)
def test_wrong_arguments_are_clear_errors(
    fn: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        assert_no_growth(fn, **options)
    assert words in str(caught.value)


def test_wrong_arguments_for_an_async_function_fail_before_the_await() -> None:
    with pytest.raises(ValueError, match="ticks"):
        assert_no_growth(async_function, ticks=0)

"""The doctor: verdicts from figures, the census, a process from inside and from outside."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import arena
from arena import _census
from arena._census import Count, census, grown
from arena._native import lib
from arena._verdicts import (
    Collector,
    Evidence,
    Level,
    Moved,
    Outside,
    Trimmed,
    judge,
    judge_outside,
    mb,
)
from arena.diagnosis import Verdict

MB = 10**6
ROOT = Path(__file__).resolve().parent.parent
glibc = pytest.mark.skipif(
    lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC, reason="this process's malloc is not glibc's"
)
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

# ---- Verdicts from figures

LEVEL = Level(
    resident=100 * MB, anonymous=90 * MB, file=10 * MB, peak=101 * MB,
    heap_used=50 * MB, heap_free=1 * MB, small_used=25 * MB, small_held=26 * MB,
)  # fmt: skip
UP = Moved("growing", 48 * MB, 50 * MB, 52 * MB)
FLAT = Moved("flat", -0.1 * MB, 0.0, 0.1 * MB)
COLLECTOR = Collector(True, (700, 10, 10), 5, 1, 0, unreachable=0)


def level(**more: int | None) -> Level:
    """The level with so many MB more of each."""
    values: dict[str, int | None] = {}
    for name in Level.__dataclass_fields__:
        value = getattr(LEVEL, name)
        values[name] = None if value is None else value + (more.pop(name, 0) or 0) * MB
    assert not more
    return Level(**values)  # type: ignore[arg-type]


def evidence(last: Level = LEVEL, **changes: Any) -> Evidence:
    values: dict[str, Any] = {
        "allocator": "glibc", "seconds": 10.0, "first": LEVEL, "last": last,
        "moved": {"resident": FLAT}, "collector": COLLECTOR, "collected": last,
        "trimmed": last, "trim": Trimmed(0),
    }  # fmt: skip
    return Evidence(**{**values, **changes})


def rising(last: Level, **changes: Any) -> Evidence:
    return evidence(last, moved={"resident": UP}, **changes)


def main(found: Evidence) -> Verdict:
    return judge(found)[0]


def test_growth_in_pythons_arenas_is_of_python_objects_and_names_the_types() -> None:
    last = level(resident=50, anonymous=50, small_used=50, small_held=50)
    verdict = main(rising(last, types=(Count("dict", 1000, 40 * MB),)))
    assert (verdict.kind, verdict.growing) == ("python-objects", True)
    assert verdict.text.startswith(
        "growing: live Python objects, most of them dict (+1,000): 50 MB in 10 s ("
    )
    assert verdict.next.startswith("map: ")


def test_growth_of_the_heap_is_of_python_objects_when_these_are_large_ones() -> None:
    last = level(resident=50, anonymous=50, heap_used=50)
    assert main(rising(last, large=45 * MB)).kind == "python-objects"
    assert main(rising(last, large=2 * MB)).kind == "native-memory"


def test_growth_outside_of_malloc_is_native_memory_too() -> None:
    assert main(rising(level(resident=50, anonymous=50))).kind == "native-memory"


def test_both_are_named_when_both_grow_and_the_larger_comes_first() -> None:
    last = level(resident=50, anonymous=50, heap_used=28, small_used=22, small_held=22)
    kinds = [verdict.kind for verdict in judge(rising(last)) if verdict.growing]
    assert kinds == ["native-memory", "python-objects"]


def test_growth_that_a_collection_frees_is_in_cycles_and_says_since_when() -> None:
    last = level(resident=50, anonymous=50, heap_used=50)
    collector = Collector(True, (150_000, 10, 10), 0, 0, 0, age=7200.0, unreachable=9000)
    verdict = main(rising(last, large=48 * MB, collector=collector, collected=LEVEL))
    assert (verdict.kind, verdict.growing) == ("cycles", True)
    assert "has not visited since the process began 2 hours ago" in verdict.text
    assert "(thresholds 150000, 10, 10)" in verdict.text
    assert verdict.next.startswith("collect: ")


def test_a_level_in_cycles_is_told_unless_the_collector_came_by_and_left_little() -> None:
    last = level(resident=30, anonymous=30, heap_used=20)
    asleep = Collector(True, (150_000, 10, 10), 3, 0, 0, unreachable=9000)
    verdict = main(evidence(last, collector=asleep, collected=LEVEL))
    assert (verdict.kind, verdict.growing) == ("cycles", False)
    assert verdict.text.startswith("flat, but 20 MB were held in reference cycles")
    awake = Collector(True, (700, 10, 10), 3, 1, 0, unreachable=9000)
    assert main(evidence(last, collector=awake, collected=LEVEL)).kind == "flat"
    off = Collector(False, (700, 10, 10), 3, 0, 0, unreachable=9000)
    assert "switched off" in main(evidence(last, collector=off, collected=LEVEL)).text


def test_what_a_trim_returned_was_free_in_the_allocator() -> None:
    last = level(resident=1300, anonymous=1300, heap_free=1300)
    trim = Trimmed(1290 * MB, milliseconds=105.0)
    verdict = main(
        evidence(last, trim=trim, trimmed=level(resident=10, anonymous=10, heap_free=1300))
    )
    assert verdict.kind == "retained"
    assert verdict.text == (
        "flat, but 1.3 GB are free inside glibc: a trim returns it (measured: 1.3 GB in 105 ms)"
    )
    assert verdict.next.startswith("trim: ")


def test_where_much_came_back_the_rest_is_no_fragmentation_but_told() -> None:
    last = level(resident=200, anonymous=200, heap_free=200)
    after = level(resident=100, anonymous=100, heap_free=200)
    verdicts = judge(evidence(last, trim=Trimmed(100 * MB), trimmed=after))
    assert [verdict.kind for verdict in verdicts] == ["retained"]
    assert "MB more are free there and did not come back" in verdicts[0].text


def test_with_many_heaps_the_step_is_to_cap_them() -> None:
    last = level(resident=300, anonymous=300, heap_free=300)
    found = evidence(last, trim=Trimmed(290 * MB), trimmed=LEVEL, heaps=64)
    verdict = main(found)
    assert verdict.text.endswith("or cap arenas: there are 64")
    assert verdict.next.startswith("tune: ")


def test_what_stays_resident_after_a_trim_is_fragmented() -> None:
    last = level(resident=100, anonymous=100, heap_free=100)
    after = level(resident=97, anonymous=97, heap_free=100)
    verdict = main(evidence(last, trim=Trimmed(3 * MB), trimmed=after))
    assert verdict.kind == "fragmented"
    assert "a trim cannot help, 3 % would come back" in verdict.text
    assert verdict.figures["share"] == pytest.approx(0.03, abs=0.01)


def test_what_is_free_in_the_heap_but_not_resident_is_no_matter() -> None:
    last = level(heap_free=1000)
    assert main(evidence(last)).kind == "flat"


def test_the_mappings_of_the_heap_tell_better_than_all_private_memory_what_is_stuck() -> None:
    last = level(resident=500, anonymous=500, heap_free=1000)  # other mappings, and a trimmed heap
    assert main(evidence(last)).kind == "fragmented"
    assert main(evidence(dataclasses.replace(last, loose=2 * MB))).kind == "flat"


def test_half_empty_python_arenas_are_fragmented_and_no_trim_reaches_them() -> None:
    last = level(resident=60, anonymous=60, small_held=60)
    verdict = main(evidence(last, trim=Trimmed(0)))
    assert verdict.kind == "fragmented"
    assert "Python's own arenas" in verdict.text


def test_what_the_collection_freed_and_the_trim_returned_is_not_counted_twice() -> None:
    last = level(resident=60, anonymous=60, heap_used=60)
    collected = level(resident=60, anonymous=60, heap_free=60)
    asleep = Collector(True, (150_000, 10, 10), 3, 0, 0, unreachable=9000)
    found = evidence(
        last, collector=asleep, collected=collected, trim=Trimmed(58 * MB), trimmed=LEVEL
    )
    assert [verdict.kind for verdict in judge(found)] == ["cycles"]


def test_pinned_memory_is_named_at_a_level_and_when_it_grows() -> None:
    last = level(resident=12, anonymous=12, pinned=12, chunks=12)
    verdict = main(evidence(last))
    assert verdict.kind == "pinned"
    assert verdict.text == "arena: 12 MB pinned by views into ticks that have ended"
    last = level(resident=50, anonymous=50, pinned=50, chunks=50)
    verdicts = judge(rising(last))
    assert [(verdict.kind, verdict.growing) for verdict in verdicts] == [("pinned", True)]


@pytest.mark.parametrize(
    ("grows", "kind"),
    [
        ({"persisted": 50, "heap_used": 50, "anonymous": 50}, "persisted"),
        ({"strays": 50, "heap_used": 50, "anonymous": 50}, "strays"),
        ({"scratch": 50, "chunks": 50, "anonymous": 50}, "scratch"),
        ({"file": 50}, "file-mapped"),
        ({"shmem": 50}, "shared-memory"),
        ({"heap_free": 50, "anonymous": 50}, "retained"),
    ],
)
def test_each_other_cause_of_growth_is_named_alone(grows: dict[str, int], kind: str) -> None:
    verdicts = judge(rising(level(resident=50, **grows)))
    assert [verdict.kind for verdict in verdicts if verdict.growing] == [kind]


def test_a_leak_into_memory_that_was_free_already_is_growth_though_resident_memory_is_flat() -> (
    None
):
    last = level(heap_used=50)
    verdict = main(evidence(last, moved={"resident": FLAT, "live": UP}))
    assert (verdict.kind, verdict.growing) == ("native-memory", True)


def test_less_than_the_looks_themselves_take_is_no_growth() -> None:
    small = Moved("growing", 0.1 * MB, 0.3 * MB, 0.4 * MB)
    assert main(evidence(moved={"resident": small})).kind == "flat"


def test_nothing_wrong_is_flat_and_says_what_would_not_have_shown() -> None:
    verdict = main(evidence())
    assert verdict.kind == "flat"
    assert verdict.text == "flat at 100 MB: growth below 3.1 MB a minute would not show in 10 s"


def test_a_flat_process_on_another_allocator_names_it() -> None:
    last = Level(resident=100 * MB, anonymous=90 * MB)
    found = evidence(last, allocator="jemalloc", first=last)
    assert main(found).text.startswith("flat on jemalloc at 100 MB")
    trim = Trimmed(60 * MB, milliseconds=5.0)
    assert "free inside jemalloc" in main(evidence(last, allocator="jemalloc", trim=trim)).text


def test_without_figures_of_the_heap_native_growth_is_what_python_does_not_explain() -> None:
    first = Level(resident=100 * MB, anonymous=90 * MB, small_used=20 * MB, small_held=20 * MB)
    last = Level(resident=150 * MB, anonymous=140 * MB, small_used=20 * MB, small_held=20 * MB)
    found = rising(last, first=first, allocator="jemalloc")
    assert main(found).kind == "native-memory"
    assert main(rising(last, first=first, large=45 * MB)).kind == "python-objects"


def test_a_peak_far_above_the_level_is_told_beside_it() -> None:
    verdicts = judge(evidence(level(peak=900)))
    assert [verdict.kind for verdict in verdicts] == ["flat", "peak"]
    assert verdicts[1].text.startswith("peak, not level: it once had 1.0 GB")
    assert [verdict.kind for verdict in judge(evidence(level(peak=40)))] == ["flat"]
    last = level(resident=50, anonymous=50, small_used=50, small_held=50, peak=900)
    assert [verdict.kind for verdict in judge(rising(last))] == ["python-objects"]


def test_large_mapped_files_are_no_leak() -> None:
    verdict = main(evidence(level(resident=200, file=200)))
    assert (verdict.kind, verdict.growing) == ("file-mapped", False)


def test_what_nobody_worked_at_or_was_too_short_is_unknown() -> None:
    assert main(evidence(worked=False)).kind == "unknown"
    assert "nothing else ran" in main(evidence(worked=False)).text
    assert main(evidence(moved={"resident": Moved("not yet")})).kind == "unknown"


def test_growth_tells_when_the_cgroups_limit_is_reached_and_how_much_a_turn_adds() -> None:
    last = level(resident=50, anonymous=50, small_used=50, small_held=50)
    text = main(rising(last, limit=1150 * MB, turns=1000)).text
    assert "50 KB a turn" in text
    assert "the cgroup's limit of 1.1 GB in 3 minutes" in text or "1.2 GB" in text


def test_the_next_step_is_one() -> None:
    steps = {"map", "trim", "tune", "tick", "collect", "profile", "watch", "doctor", "none"}
    last = level(resident=50, anonymous=50, small_used=50, small_held=50)
    for found in (rising(last), evidence(), evidence(level(peak=900)), evidence(worked=False)):
        for verdict in judge(found):
            assert verdict.next.partition(":")[0] in steps


def outside(last: Level = LEVEL, **moved: Moved) -> Outside:
    series = dict.fromkeys(("resident", "anonymous", "file", "shmem"), FLAT)
    return Outside("glibc", 10.0, LEVEL, last, {**series, **moved})


def test_from_outside_growth_is_named_by_its_kind_of_page_alone() -> None:
    verdict = judge_outside(outside(resident=UP, anonymous=UP))[0]
    assert (verdict.kind, verdict.growing) == ("anonymous", True)
    assert "from outside these look alike" in verdict.text
    assert verdict.next.startswith("doctor: ")
    assert judge_outside(outside(resident=UP, file=UP))[0].kind == "file-mapped"
    assert judge_outside(outside(resident=UP, shmem=UP))[0].kind == "shared-memory"
    assert judge_outside(outside())[0].kind == "flat"
    assert judge_outside(outside(level(resident=200, file=200)))[0].kind == "file-mapped"
    assert judge_outside(outside(resident=Moved("not yet")))[0].kind == "unknown"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (12_345_678, "12 MB"), (1.3e9, "1.3 GB"),
     (9.96e6, "10 MB"), (999_999, "1.0 MB")],
)  # fmt: skip
def test_sizes_are_written_for_people(count: float, text: str) -> None:
    assert mb(count) == text


# ---- The census


class Thing:
    pass


def found(before: _census.Census, after: _census.Census) -> dict[str, Count]:
    return {row.type: row for row in grown(before, after)}


def test_a_census_counts_what_is_tracked_and_what_that_refers_to() -> None:
    census(30)  # what the first one leaves behind is no part of what follows
    before = census(30)
    things = [Thing() for _ in range(5000)]
    texts = [f"{number} of many" for number in range(5000)]
    records = [{"number": 10**6 + number} for number in range(5000)]  # dicts that are not tracked
    rows = found(before, census(30))
    assert 5000 <= rows[f"{__name__}.Thing"].count < 5010
    assert 4950 < rows["str"].count < 5200
    assert 4950 < rows["dict"].count < 5200
    assert 4950 < rows["int"].count < 5300
    del things, texts, records


def test_a_census_counts_what_many_refer_to_once() -> None:
    before = census(30)
    shared = bytes(10 * MB)
    holders = [[shared] for _ in range(100)]
    rows = found(before, census(30))
    assert rows["bytes"].bytes == pytest.approx(10 * MB, rel=0.05)
    del holders


def test_a_census_sees_the_variables_of_running_functions_and_keeps_nothing_of_them() -> None:
    class Marked(bytearray):
        alive = 0

        def __del__(self) -> None:
            Marked.alive -= 1

    before = census(30)
    local = bytearray(3 * MB)
    after = census(30)
    assert found(before, after)["bytearray"].bytes == pytest.approx(3 * MB, rel=0.01)
    assert after.above_small - before.above_small == pytest.approx(3 * MB, rel=0.1)
    del local

    def inner() -> None:
        Marked.alive += 1
        marked = Marked(10)
        census(30)
        del marked
        assert Marked.alive == 0

    inner()


def test_a_census_that_is_cut_short_says_so_and_estimates_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    things = [Thing() for _ in range(50_000)]
    whole = census(30)
    assert whole.share == 1.0
    looks = itertools.count()
    # A clock by which a census of a second stops after some of its looks at it.
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) / 60)
    part = census(1.0)
    assert 0 < part.share < 1
    name = f"{__name__}.Thing"
    of = {row.type: row.count for row in part.types}
    assert of[name] == pytest.approx(len(things), rel=0.2)


def test_a_census_takes_no_memory_that_stays() -> None:
    census(30)
    gc.collect()
    blocks = sys.getallocatedblocks()
    for _ in range(3):
        census(30)
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 500


def test_a_census_of_a_large_table_takes_a_sample_but_leaves_no_large_thing_out() -> None:
    before = census(30)
    table: list[object] = []
    for number in range(40_000):
        table += [10**6 + number, f"text number {number}"]  # every other is of another type
    table[50] = bytes(7 * MB)
    rows = found(before, census(30))
    assert rows["int"].count == pytest.approx(40_000, rel=0.1)
    assert rows["str"].count == pytest.approx(40_000, rel=0.1)
    assert rows["bytes"].bytes == pytest.approx(7 * MB, rel=0.01)


def test_a_census_holds_nothing_when_it_meets_a_size_that_raises() -> None:
    class Odd:
        def __sizeof__(self) -> int:
            raise RuntimeError("no")

    odd = [Odd() for _ in range(10)]
    assert f"{__name__}.{Odd.__qualname__}" in {row.type for row in census(30).types}
    del odd


# ---- From inside


def keeping(size: int) -> tuple[list[object], Any]:
    kept: list[object] = []

    def work() -> None:
        kept.append({"id": len(kept), "text": "x" * size})
        time.sleep(0.0005)

    return kept, work


def test_a_doctor_calls_the_work_and_names_what_it_keeps() -> None:
    kept, work = keeping(5000)
    diagnosis = arena.doctor(work, turns=1000)
    assert len(kept) == 1001  # the first warms up
    assert diagnosis.turns == 1000
    assert diagnosis.growing
    assert diagnosis.exit_status == 1
    assert diagnosis.verdicts[0].kind == "python-objects"
    assert "KB a turn" in diagnosis.verdicts[0].text
    assert {row.type for row in diagnosis.types[:2]} == {"str", "dict"}
    assert str(diagnosis).startswith("growing: live Python objects, most of them ")
    assert json.loads(diagnosis.as_json())["verdicts"][0]["kind"] == "python-objects"


def test_a_doctor_beside_a_busy_thread_that_keeps_nothing_finds_no_growth() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.wait(0.001):
            [{"n": number} for number in range(200)]

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        diagnosis = arena.doctor(seconds=2.0, trim=False)
    finally:
        stop.set()
        thread.join()
    assert not diagnosis.growing
    assert diagnosis.turns is None


def test_a_doctor_that_nothing_ran_beside_says_that_it_saw_no_growth_but_a_level() -> None:
    diagnosis = arena.doctor(seconds=0.5, trim=False)
    assert not diagnosis.growing
    assert any("nothing else ran" in note for note in diagnosis.notes)


def test_without_collecting_and_trimming_the_doctor_does_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(gc, "collect", never)
    monkeypatch.setattr("arena.trimming.run", never)
    diagnosis = arena.doctor(lambda: None, turns=20, trim=False, collect=False)
    assert "collected" not in diagnosis.figures
    assert "trimmed" not in diagnosis.figures
    assert diagnosis.costs_ms.keys() >= {"census", "heap", "objects"}


def a_generator() -> Iterator[int]:
    yield 1


def test_the_error_of_the_work_is_the_doctors() -> None:
    def work() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        arena.doctor(work)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"seconds": 0}, ValueError, "seconds is a number of seconds above 0"),
        ({"seconds": -1}, ValueError, "not -1"),
        ({"seconds": float("inf")}, ValueError, "not inf"),
        ({"seconds": 10**400}, ValueError, "up to 10"),
        ({"seconds": "10"}, TypeError, "not '10'"),
        ({"seconds": True}, TypeError, "not True"),
        ({"turns": 5}, ValueError, "turns counts calls of work"),
        ({"work": print, "turns": 0}, ValueError, "a whole number above 0"),
        ({"work": print, "turns": 1.5}, TypeError, "not 1.5"),
        ({"work": print, "turns": True}, TypeError, "not True"),
        ({"work": asyncio.sleep}, TypeError, "give a plain function"),
        ({"work": a_generator}, TypeError, "give a plain function"),
        ({"trim": 1}, TypeError, "trim is True or False, not 1"),
        ({"collect": None}, TypeError, "collect is True or False, not None"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        arena.doctor(**arguments)


def test_work_that_cannot_be_called_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="work is a function to call, or None, not int"):
        arena.doctor(3)  # type: ignore[arg-type]


# ---- Real programs, each with one condition. The benchmark has more of them, with other sizes.


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "arena", "doctor", *map(str, args)]


def run(*args: object, **more: Any) -> subprocess.CompletedProcess[str]:
    env = {**ENV, **more.pop("env", {})}
    return subprocess.run(
        command(*args), capture_output=True, text=True, env=env, timeout=120, check=False, **more
    )


def case(name: str, *args: object) -> list[object]:
    return ["-m", "benchmarks._doctor_cases", name, *args]


CONDITIONS = {
    "leaking list": ("python-objects", True),
    "leaking C memory": ("native-memory", True),
    "freed but retained": ("retained", False),
    "fragmented": ("fragmented", False),
    "pinned views": ("pinned", False),
    "uncollected cycles": ("cycles", True),
    "mapped file": ("file-mapped", False),
    "warm-up, then flat": ("flat", False),
}


@pytest.fixture(scope="module")
def diagnosed(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[subprocess.CompletedProcess[str], dict[str, Any]]]:
    """Each program under the doctor, some at a time: they wait more than they work."""
    folder = tmp_path_factory.mktemp("cases")
    env = {"ARENA_CASES_DIR": str(folder)}

    def diagnose(name: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        path = folder / f"{name}.json"
        done = run(
            "--for", "4s", "--warm-up", "2s", "--json", path,
            *case(name, "--size", 90, "--rate", 8), cwd=ROOT, env=env,
        )  # fmt: skip
        return done, json.loads(path.read_text())

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return dict(zip(CONDITIONS, pool.map(diagnose, CONDITIONS), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=glibc) if name in ("freed but retained", "fragmented") else name
        for name in CONDITIONS
    ],
)
def test_a_program_with_one_condition_is_diagnosed(name: str, diagnosed: Any) -> None:
    kind, growing = CONDITIONS[name]
    done, found = diagnosed[name]
    assert (found["verdicts"][0]["kind"], found["growing"]) == (kind, growing), done.stderr
    assert done.returncode == found["exit_status"] == (0 if kind in ("file-mapped", "flat") else 1)
    assert done.stdout == "ready\n"
    assert found["verdicts"][0]["text"] in done.stderr
    assert "Traceback" not in done.stderr


@glibc  # so is the library that is here
def test_on_jemalloc_what_is_free_is_said_to_be_in_jemalloc() -> None:
    library = "libjemalloc.so.2"
    if subprocess.run(["true"], env={"LD_PRELOAD": library}, capture_output=True).stderr:
        pytest.skip(f"{library} is not installed")
    env = {"LD_PRELOAD": library, "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}
    done = run("--for", "3s", "--warm-up", "1s", *case("jemalloc"), cwd=ROOT, env=env)
    assert "are free inside jemalloc: a trim returns it (measured:" in done.stderr
    assert "glibc" not in done.stderr


def test_the_benchmark_counts_each_wrong_claim_and_writes_a_row_for_each_trial() -> None:
    from rich.console import Console

    from benchmarks import doctor
    from benchmarks._report import Report

    right = {case: min(kinds) for case, kinds in doctor.WANTED.items()}
    right["jemalloc"] = "retained"  # of its even trials

    def ask(trial: doctor.Trial) -> dict[str, Any]:
        kind = "flat" if trial.case == "fragmented" else right[trial.case]
        allocator = "jemalloc" if trial.case == "jemalloc" else "glibc"
        main = {"kind": kind, "text": f"free inside {allocator}"}
        growing = trial.case in doctor.GROWING
        return {"verdicts": [main], "growing": growing, "allocator": allocator}

    console = Console(width=110, record=True, quiet=True)
    report = Report(console)
    report.begin("doctor", "")
    doctor._confusion(doctor.INSIDE, ask, list(doctor.trials(1, 1.0)), report)
    assert {row.case: row.value for row in report.rows} == {
        case: int(case != "fragmented") for case in doctor.WANTED
    }
    assert {(row.contender, row.unit) for row in report.rows} == {("arena", "right")}
    # From outside all that it claims of the first and the last is wrong: they are not its words.
    trials = {trial.case: trial for trial in doctor.trials(1, 1.0)}
    for case in ("leaking list", "jemalloc"):
        assert not trials[case].judge_outside(ask(trials[case]))


# ---- The command line around a program


def write(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


LOOP = """
    import sys, time
    print("arguments", sys.argv[1:])
    try:
        while True:
            time.sleep(0.01)
            sum(range(20_000))
    except KeyboardInterrupt:
        print("interrupted")
        raise
    finally:
        print("cleaned up")
"""


def test_the_program_is_interrupted_after_the_diagnosis_and_cleans_up(tmp_path: Path) -> None:
    path = write(tmp_path, LOOP)
    done = run("--for", "1.5s", "--warm-up", "0.5s", path, "its", "--own")
    assert done.stdout == "arguments ['its', '--own']\ninterrupted\ncleaned up\n"
    assert done.returncode in (0, 3)
    assert done.stderr.startswith("python -m arena doctor: ")
    assert "Traceback" not in done.stderr


def test_kept_running_the_program_goes_on_to_its_own_end(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import sys, time
        until = time.monotonic() + 3
        while time.monotonic() < until:
            sum(range(20_000))
            time.sleep(0.01)
        print("at its own end")
        sys.exit(7)
        """,
    )
    done = run("--for", "1s", "--warm-up", "0.2s", "--keep-running", path)
    assert done.stdout == "at its own end\n"
    assert done.returncode == 7
    assert done.stderr.startswith("python -m arena doctor: ")


def test_a_program_that_ends_before_is_diagnosed_as_far_as_it_got(tmp_path: Path) -> None:
    done = run("--warm-up", "0.1s", write(tmp_path, "print('short')"))
    assert done.stdout == "short\n"
    assert done.returncode == 3
    assert "not yet" in done.stderr


def test_a_program_that_fails_ends_with_its_own_traceback_and_status(tmp_path: Path) -> None:
    done = run("--warm-up", "0.1s", write(tmp_path, "raise ValueError('mine')"))
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "python -m arena doctor: " in done.stderr


def test_a_program_that_does_not_heed_the_interrupt_is_ended(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import time
        while True:
            try:
                while True:
                    time.sleep(0.01)
                    sum(range(20_000))
            except KeyboardInterrupt:
                print("never mind", flush=True)
        """,
    )
    done = run("--for", "1.5s", "--warm-up", "0.5s", path)
    assert done.stdout == "never mind\n"
    assert "was killed" in done.stderr
    assert done.returncode in (0, 3)


def test_in_the_background_where_shells_ignore_ctrl_c_the_program_is_interrupted_too(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, LOOP)

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    done = run("--for", "1s", "--warm-up", "0.2s", path, preexec_fn=ignore)
    assert done.stdout.endswith("interrupted\ncleaned up\n")


def test_a_program_that_waits_in_a_system_call_is_interrupted_there(tmp_path: Path) -> None:
    text = "import signal\ntry: signal.pause()\nfinally: print('woken')"
    done = run("--for", "1s", "--warm-up", "0.2s", write(tmp_path, text))
    assert done.stdout == "woken\n"
    assert "was killed" not in done.stderr


def test_a_child_that_the_program_forks_prints_no_diagnosis(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        import os, time
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            for _ in range(150):
                time.sleep(0.01)
                sum(range(20_000))
        else:
            print("in the child", flush=True)
        """,
    )
    json_path = tmp_path / "found.json"
    done = run("--for", "1s", "--warm-up", "0.2s", "--json", json_path, path)
    assert done.stdout == "in the child\n"
    assert done.stderr.count("python -m arena doctor: ") == 1
    assert json.loads(json_path.read_text())["pid"] > 0
    assert {entry.name for entry in tmp_path.iterdir()} == {"found.json", "program.py"}


# ---- From outside


@pytest.fixture
def neighbour() -> Iterator[Any]:
    """Starts a case that is ended with the test."""
    programs: list[subprocess.Popen[str]] = []

    def start(*args: object) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, *map(str, args)], cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True
        )
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.kill()
        program.communicate()


@glibc
def test_growth_of_another_process_is_seen_and_what_it_is_made_of_is_not_claimed(
    neighbour: Any,
) -> None:
    program = neighbour(*case("leaking list", "--size", 30, "--rate", 10))
    assert program.stdout.readline() == "ready\n"
    done = run("--for", "3s", "--json", "-", program.pid)
    found = json.loads(done.stdout)
    assert found["pid"] == program.pid
    assert (found["verdicts"][0]["kind"], done.returncode) == ("anonymous", 1)
    assert found["allocator"] == "glibc"
    assert any("from outside" in note for note in found["notes"])
    text = run("--for", "2s", program.pid)
    assert text.stdout.startswith("growing: private memory: ")
    assert "next: doctor: " in text.stdout
    assert text.stderr == ""


def test_the_ticks_that_another_process_shows_are_counted(neighbour: Any) -> None:
    code = (
        "import arena, time\narena.export_ticks()\nprint('ready', flush=True)\n"
        "while True:\n with arena.tick(): time.sleep(0.002)"
    )
    program = neighbour("-c", code)
    assert program.stdout.readline() == "ready\n"
    found = json.loads(run("--for", "2s", "--json", "-", program.pid).stdout)
    assert 100 < found["turns"] < 2000


def test_a_process_that_ends_meanwhile_is_one_line_and_status_2(neighbour: Any) -> None:
    program = neighbour("-c", "import time; print('ready', flush=True); time.sleep(1)")
    assert program.stdout.readline() == "ready\n"
    done = run("--for", "20s", program.pid)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"process {program.pid} ended after" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "required: PID|SCRIPT"),
        (["99999999"], "there is no process 99999999"),
        (["--for", "12 potatoes", "1"], "'12 potatoes'"),
        (["--for", "0", "1"], "not a time above 0"),
        (["--for=-3s", "1"], "-3s"),
        (["no/such/script.py"], "no such script: 'no/such/script.py'"),
        (["-m", "no such"], "not the name of a module"),
        (["--json", "no/such/folder/x.json", "1"], "--json"),
        (["1", "argument"], "a PID takes no arguments"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(args: list[str], words: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_without_proc_the_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from arena import _proc
    from arena.cli import main as command_line

    monkeypatch.setattr(_proc, "PROC", str(tmp_path))
    assert command_line(["doctor", "1"]) == 2
    assert "there is no /proc here" in capsys.readouterr().err


HOOKED = """
import arena
keep = []
def turn():
    with arena.tick(objects=True):
        for number in range(200):
            keep.append({"number": number + 10**6, "text": f"{number} of many"})
found = arena.doctor(turn, seconds=3)
print(found.verdicts[0].kind, found.growing, found)
"""


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        (HOOKED, {}),
        (HOOKED.replace("objects=True", ""), {"ARENA_OBJECTS": "1"}),
        (HOOKED.replace("objects=True", ""), {"PYTHONMALLOC": "malloc"}),
    ],
)
def test_a_leak_of_objects_is_pythons_also_where_its_allocators_are_others(
    code: str, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**ENV, **environment}, cwd=ROOT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("python-objects True"), done.stdout


def test_growth_of_shared_memory_is_not_said_to_be_others() -> None:
    code = """
import arena, mmap
keep = []
def turn():
    one = mmap.mmap(-1, 200_000)
    one.write(b"x" * 200_000)
    keep.append(one)
found = arena.doctor(turn, turns=300)
print(found)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert "growing: shared memory (mmap.mmap(-1, n), shared_memory" in done.stdout, done.stdout
    assert "mmap.mmap(-1, n)" in done.stdout.splitlines()[1]

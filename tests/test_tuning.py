"""tune(): what it sets, what comes too late, what it refuses; and `python -m arena tune`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import arena
from arena import _native, tuning
from arena._native import lib

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
glibc = pytest.mark.skipif(
    lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC, reason="this process's malloc is not glibc's"
)
NAMES = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
LINE = "MALLOC_ARENA_MAX=2 MALLOC_MMAP_THRESHOLD_=1048576 MALLOC_TRIM_THRESHOLD_=2097152"

# Threads with a heap each, one after the other, that stay until `go` is set.
THREADS = """
import ctypes, json, os, sys, threading, warnings, arena
from arena.heap import heap_count, heap_figures
warnings.simplefilter("ignore")
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
go, threads = threading.Event(), []
def work(ready):
    block = libc.malloc(2000)
    ready.set()
    go.wait()
    libc.free(block)
def start(count):
    for _ in range(count):
        ready = threading.Event()
        threads.append(threading.Thread(target=work, args=(ready,)))
        threads[-1].start()
        ready.wait()
def done():
    go.set()
    for thread in threads:
        thread.join()
"""


def python(code: str, **environment: str) -> str:
    """Run it in a process of its own, with no settings but these; return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", THREADS + code],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@glibc
def test_heaps_are_capped_when_it_comes_in_time() -> None:
    out = python("""
result = arena.tune()
start(12)
print(json.dumps([result.applied, result.late, result.notes, result.backend, heap_count()]))
done()
""")
    assert json.loads(out) == [
        {"arena_max": 2, "mmap_threshold": MIB, "trim_threshold": 2 * MIB},
        [],
        [],
        "glibc",
        2,
    ]
    assert python("start(7); print(heap_count()); done()") == "8\n"  # without it


@glibc
def test_heaps_that_exist_already_are_counted_and_stay() -> None:
    out = python("""
start(5)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result = arena.tune()
    again = arena.tune()  # the same once more
start(5)
print(json.dumps([result.applied["arena_max"], result.late, heap_count(), len(caught),
                  str(caught[0].message), caught[0].category.__name__,
                  os.path.basename(caught[0].filename), again.late]))
done()
""")
    applied, late, heaps, warned, message, category, where, again = json.loads(out)
    assert (applied, heaps, warned, category) == (2, 6, 2, "RuntimeWarning")
    assert late == again == ["6 heaps exist already (counted): arena_max=2 stops new ones only"]
    assert message == (
        f"arena.tune() came late: {late[0]}. Call it before threads start, or set {LINE} in the "
        "environment of the process"
    )
    assert where == "<string>"


@glibc
def test_with_ten_heaps_glibc_listens_no_more_and_it_says_so() -> None:
    out = python("""
start(9)
before = heap_count()
result = arena.tune()
start(2)
print(json.dumps([before, heap_count() > before or os.cpu_count() == 1, result.applied,
                  result.late]))
done()
""")
    before, grew, applied, late = json.loads(out)
    assert before == 10 or os.cpu_count() == 1
    assert grew
    assert applied == {"mmap_threshold": MIB, "trim_threshold": 2 * MIB}
    assert late == [
        f"{before} heaps exist already (counted), and from 10 on glibc has fixed how many there "
        "may be: arena_max=2 changes nothing"
    ]


@glibc
def test_what_was_set_first_may_stay_and_it_says_so() -> None:
    out = python("""
arena.tune(arena_max=3)
start(5)
result = arena.tune(arena_max=2)
start(5)
print(json.dumps([heap_count(), result.late, result.notes]))
done()
""")
    heaps, late, notes = json.loads(out)
    assert (heaps, notes) == (3, [])
    assert late == [
        "3 heaps exist already (counted), and glibc keeps to the arena_max=3 that was set first "
        "once another heap was wanted: arena_max=2 may change nothing"
    ]


@glibc
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4:glibc.malloc.x"}],
)
def test_what_the_environment_says_is_said(environment: dict[str, str]) -> None:
    out = python(
        """
first = arena.tune(arena_max=4)
result = arena.tune()
print(json.dumps([first.notes, result.notes, result.late]))
""",
        **environment,
    )
    said = "arena_max=4 is in the environment that the process has"
    assert json.loads(out) == [[], [said], []]


@glibc
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_variable_that_is_set_from_inside_has_no_effect_and_it_says_so() -> None:
    out = python("""
os.environ["MALLOC_ARENA_MAX"] = "2"
start(5)
print(json.dumps([heap_count(), arena.tune().notes]))
done()
""")
    assert json.loads(out) == [
        6,
        [
            "MALLOC_ARENA_MAX was put into os.environ by the process itself: that has no effect "
            "here, only on programs that it starts"
        ],
    ]


# What 64 threads that each cycle buffers of 11 MiB leave behind: bytes, of resident memory.
CYCLES = """
gate = threading.Barrier(64)
def cycle():
    for turn in range(4):
        gate.wait()
        size = (11 << 20) - turn * 4096
        block = libc.malloc(size)
        libc.memset(block, 1, size)
        libc.free(block)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
threads = [threading.Thread(target=cycle) for _ in range(64)]
before = resident()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before)
"""


@glibc
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_64_threads_leave_behind_is_a_fraction() -> None:
    # glibc raises its threshold as the first buffers are freed; from then on they are in the heaps.
    untouched = int(python(CYCLES))
    capped = int(python("arena.tune(mmap_threshold=None)\n" + CYCLES))
    tuned = int(python("arena.tune()\n" + CYCLES))
    assert tuned < 8 * MIB
    assert untouched > 2 * max(capped, tuned)


@glibc
def test_a_threshold_holds_from_then_on_whatever_is_freed() -> None:
    code = """
def mapped(size):
    before = heap_figures().mmapped
    block = libc.malloc(size)
    more = heap_figures().mmapped - before
    libc.free(block)
    return more >= size
large = libc.malloc(8 << 20)
libc.free(large)  # raises glibc's own threshold to 8 MiB
print(mapped(2 << 20), mapped(500_000))
"""
    assert python(code) == "False False\n"
    assert python("arena.tune()\n" + code) == "True False\n"
    assert python("arena.tune(mmap_threshold=400_000)\n" + code) == "True True\n"
    assert python("arena.tune(mmap_threshold=None, trim_threshold=None)\n" + code) == (
        "False False\n"
    )


@glibc
def test_the_lines_for_the_environment_do_the_same_from_the_start() -> None:
    result = json.loads(
        python("""
r = arena.tune(mmap_threshold="2 MiB", arena_max=3, trim_threshold=4_000_000)
print(json.dumps([r.environment, r.dockerfile, r.unit, str(r)]))
""")
    )
    line = "MALLOC_ARENA_MAX=3 MALLOC_MMAP_THRESHOLD_=2097152 MALLOC_TRIM_THRESHOLD_=4000000"
    assert result == [
        line,
        f"ENV {line}",
        f"Environment={line}",
        "set: arena_max=3, mmap_threshold=2097152, trim_threshold=4000000 (glibc)",
    ]
    environment = dict(one.split("=") for one in line.split())
    assert python("start(12); print(heap_count()); done()", **environment) == "3\n"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"arena_max": 0}, ValueError, "arena_max is a number of heaps, 1 to 2147483647, not 0"),
        ({"arena_max": -2}, ValueError, "arena_max is a number of heaps, 1 to 2147483647, not -2"),
        ({"arena_max": 2**31}, ValueError, "1 to 2147483647, not 2147483648"),
        (
            {"arena_max": True},
            TypeError,
            "arena_max is a number of heaps such as 2, or None, not T",
        ),
        (
            {"arena_max": "2"},
            TypeError,
            "arena_max is a number of heaps such as 2, or None, not '2",
        ),
        ({"mmap_threshold": 0}, ValueError, "mmap_threshold is 1 to 33554432 bytes, the most that"),
        ({"mmap_threshold": "33 MiB"}, ValueError, "the most that glibc takes, not '33 MiB'"),
        ({"mmap_threshold": -1}, ValueError, "mmap_threshold is from 0 to"),
        ({"mmap_threshold": False}, TypeError, "mmap_threshold is a number of bytes, such as"),
        (
            {"mmap_threshold": 1.5},
            TypeError,
            "mmap_threshold is a whole number of bytes, not float",
        ),
        ({"mmap_threshold": "auto"}, ValueError, "mmap_threshold is a number of bytes such as 671"),
        ({"trim_threshold": "12 potatoes"}, ValueError, "not '12 potatoes'"),
        ({"trim_threshold": 0}, ValueError, "trim_threshold is 1 to 2147483647 bytes"),
        ({"trim_threshold": "2 GiB"}, ValueError, "trim_threshold is 1 to 2147483647 bytes"),
        ({"mmap_threshold": None, "arena_max": None}, ValueError, "nothing is to be set: give one"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_set(
    arguments: dict[str, object],
    error: type[Exception],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: object) -> bool:
        raise AssertionError(f"set {args}")

    monkeypatch.setattr(_native, "_heap_set", never)
    with pytest.raises(error) as caught:
        arena.tune(**arguments)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def set_by(monkeypatch: pytest.MonkeyPatch, answer: bool = True) -> dict[int, int]:
    """Note what is set, and set nothing; with one heap, and no settings before."""
    found: dict[int, int] = {}

    def put(option: int, value: int) -> bool:
        found[option] = value
        return answer

    monkeypatch.setattr(tuning, "_arena_max", None)
    monkeypatch.setattr(_native, "_heap_set", put)
    monkeypatch.setattr(_native, "_heap_count", lambda: 1)
    monkeypatch.setattr(tuning, "_started_with", lambda: ({}, []))
    return found


@glibc
def test_none_leaves_a_setting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set_by(monkeypatch)
    for arguments, expected in (
        ({}, {-8: 2, -3: MIB, -1: 2 * MIB}),
        ({"mmap_threshold": "4 MiB", "arena_max": None}, {-3: 4 * MIB, -1: 8 * MIB}),
        ({"mmap_threshold": None}, {-8: 2}),
        ({"trim_threshold": None}, {-8: 2, -3: MIB}),
        ({"arena_max": None, "mmap_threshold": None, "trim_threshold": 5}, {-1: 5}),
        ({"mmap_threshold": 32 * MIB}, {-8: 2, -3: 32 * MIB, -1: 64 * MIB}),
    ):
        found.clear()
        result = arena.tune(**arguments)  # type: ignore[arg-type]
        assert found == expected
        assert len(result.applied) == len(expected)
        assert result.late == ()


@glibc
def test_what_glibc_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    set_by(monkeypatch, answer=False)
    result = arena.tune(arena_max=7, mmap_threshold=None)
    assert result.applied == {}
    assert result.notes == ("glibc refused arena_max=7",)
    assert str(result) == "set: nothing (glibc); glibc refused arena_max=7"


@glibc
def test_it_waits_for_a_trim_to_count_the_heaps(monkeypatch: pytest.MonkeyPatch) -> None:
    set_by(monkeypatch)
    counts = iter([None, None, 4])
    monkeypatch.setattr(_native, "_heap_count", lambda: next(counts))
    with pytest.warns(RuntimeWarning, match=r"4 heaps exist already \(counted\)"):
        arena.tune()


@glibc
def test_where_heaps_cannot_be_counted_nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    set_by(monkeypatch)
    monkeypatch.setattr(_native, "_heap_count", lambda: -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert arena.tune().late == ()


@glibc  # so are the libraries that are here
@pytest.mark.parametrize("name", ["jemalloc", "mimalloc"])
def test_where_malloc_is_not_glibcs_nothing_is_set(name: str) -> None:
    found = sorted(Path("/usr/lib").rglob(f"lib{name}.so.[0-9]*"))
    if not found:
        pytest.skip(f"lib{name} is not installed")
    out = python(
        "r = arena.tune(); print(json.dumps([r.applied, r.notes, r.environment]))",
        LD_PRELOAD=str(found[0]),
    )
    assert json.loads(out) == [
        {},
        [f"this process's malloc is {name}'s, not glibc's: nothing was set"],
        LINE,
    ]


# ---- the command ---------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "arena", "tune", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_prints_the_lines() -> None:
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "# environment",
        LINE,
        "# Dockerfile",
        f"ENV {LINE}",
        "# unit file, in [Service]",
        f"Environment={LINE}",
    ]
    done = command("--arena-max", "4", "--mmap-threshold", "none", "--trim-threshold", "1 MiB")
    assert "ENV MALLOC_ARENA_MAX=4 MALLOC_TRIM_THRESHOLD_=1048576" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arena-max", "0"], "arena_max is a number of heaps, 1 to 2147483647, not 0"),
        (["--arena-max", "two"], "--arena-max is a number of heaps such as 2, or none, not 'two'"),
        (["--arena-max", "-1"], "--arena-max is a number of heaps such as 2, or none, not '-1'"),
        (["--mmap-threshold", "12 potatoes"], "mmap_threshold is a number of bytes such as 67"),
        (["--mmap-threshold", "64 MiB"], "mmap_threshold is 1 to 33554432 bytes, the most that"),
        (["--trim-threshold", "0"], "trim_threshold is 1 to 2147483647 bytes, the most that"),
        (["--arena-max=none", "--mmap-threshold=none"], "nothing is to be set: give one of"),
        (["--heaps"], "unrecognized arguments: --heaps"),
    ],
)
def test_what_the_command_is_given_wrongly_is_one_line(arguments: list[str], says: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert says in done.stderr

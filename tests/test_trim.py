"""Trims: what comes back, what it costs, who waits, and when nothing is done."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import arena
from arena import _native, _walk
from arena._native import lib
from arena._proc import statm
from arena._stall import Stall
from arena.heap import HeapFigures

pytestmark = pytest.mark.as_ever  # what an audit keeps, and objects' spans, are memory too
ROOT = Path(__file__).resolve().parent.parent
glibc = pytest.mark.skipif(
    lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC, reason="this process's malloc is not glibc's"
)


def cache(size: int = 3 << 20) -> None:
    with arena.tick() as t:
        t.alloc(size)


def python(code: str, **environment: str) -> str:
    """Run it in a process of its own, whose heap is nobody else's; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A heap with so many MB of 4 KB blocks, of which 15 of 16 are free.
FRAGMENTED = """
import ctypes, os, arena
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def fragment(mb, size=4080, every=16):
    blocks = [libc.malloc(size) for _ in range(mb * 10**6 // size)]
    for block in blocks:
        libc.memset(block, 1, size)
    for number, block in enumerate(blocks):
        if number % every:
            libc.free(block)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
"""


@pytest.mark.ends
def test_cached_chunks_go_and_the_result_says_how_many() -> None:
    arena.trim()
    cache()
    assert arena.stats().cached > 3 << 20
    result = arena.trim(reason="a test")
    assert result.chunks > 3 << 20
    assert result.reason == "a test"
    assert arena.stats().cached == 0
    assert result.milliseconds > 0
    assert result.returned == result.resident_before - result.resident_after
    assert result.resident_after > 1 << 20
    assert "MB came back in" in str(result)


@pytest.mark.ends
@pytest.mark.parametrize("keep", [65536, "64 KiB"])
def test_keep_is_what_may_stay_cached(keep: int | str) -> None:
    arena.trim()
    cache()
    cache(1)
    arena.trim(keep=keep)
    assert 0 < arena.stats().cached <= 65536
    arena.trim(keep="1 GiB")
    assert arena.stats().cached > 0


@glibc
def test_what_is_free_in_the_heap_comes_back_and_is_measured() -> None:
    out = python(
        FRAGMENTED
        + """
fragment(60)
before = resident()
result = arena.trim()
after = resident()
assert result.backend == "glibc" and result.heap_milliseconds > 0 and not result.skipped
assert result.returned > 40_000_000, result
assert abs((before - after) - result.returned) < 3_000_000, (before, after, result)
assert result.code == 1
again = arena.trim()
assert again.code == 1 and abs(again.returned) < 1_000_000, again  # and yet it says 1
print("ok")
"""
    )
    assert out == "ok\n"


@glibc
def test_a_budget_leaves_out_a_walk_that_would_take_longer_and_says_what_stays() -> None:
    out = python(
        FRAGMENTED
        + """
fragment(60, size=1000)
before = resident()
result = arena.trim(budget_ms=8)
assert result.heap_milliseconds is None and result.code is None
(why,) = result.skipped
assert "predicted to take" in why and "MB are free in" in why, why
assert before - resident() < 2_000_000
result = arena.trim(budget_ms=10_000)
assert result.heap_milliseconds is not None and result.returned > 20_000_000, result
print("ok")
"""
    )
    assert out == "ok\n"


@glibc
def test_a_heap_too_large_to_look_at_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_walk, "stall", Stall())
    monkeypatch.setattr(_walk, "_own", lambda: 3 * 10**9)
    monkeypatch.setattr(_walk, "heaps", lambda: 2 * 10**9)
    monkeypatch.setattr(_walk, "heap_figures", lambda: pytest.fail("it looked"))
    (why,) = arena.trim(budget_ms=20).skipped
    assert "2,000 MB are too much to look at what is free in 20 ms" in why
    assert _walk.plan(20).kind == "unseen"


@glibc
def test_next_to_nothing_free_is_not_worth_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = HeapFigures("glibc", 10_000, 9_000, 1_000, 0, 0, 2)
    monkeypatch.setattr(_walk, "heap_figures", lambda: seen)
    planned = _walk.plan(1000.0)
    assert planned.kind == "nothing"
    result = arena.trim(budget_ms=1000)
    assert result.heap_milliseconds is None
    assert "1,000 bytes of it are free" in result.skipped[0]


@glibc
def test_what_a_walk_has_given_back_is_not_free_any_more_though_malloc_counts_it() -> None:
    out = python(
        FRAGMENTED
        + """
from arena.heap import heap_figures
fragment(100, size=1000)
arena.trim()
assert heap_figures().free > 80_000_000  # as malloc has it
result = arena.trim(budget_ms=3)
assert "are free and resident" in result.skipped[0], result
fragment(30, size=8000)
before = resident()
result = arena.trim(budget_ms=60)
assert result.heap_milliseconds is not None, result
assert before - resident() > 20_000_000, result
print("ok")
"""
    )
    assert out == "ok\n"


@glibc
def test_what_is_mapped_beside_the_heap_does_not_make_a_look_dear() -> None:
    out = python(
        FRAGMENTED
        + """
import mmap
large = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, 1 << 30, 4096):
    large[at] = 1
fragment(60, size=65520)
result = arena.trim(budget_ms=14)  # a look at a gigabyte would take longer
assert result.heap_milliseconds is not None and result.returned > 40_000_000, result
print("ok")
"""
    )
    assert out == "ok\n"


@glibc
@pytest.mark.parametrize("name", ["jemalloc", "mimalloc"])
def test_what_an_allocator_does_not_tell_is_not_made_up(name: str) -> None:
    out = python(
        FRAGMENTED
        + """
keep = fragment(200, size=30_000, every=2)
result = arena.trim(budget_ms=0.5)
print(*result.skipped)
""",
        LD_PRELOAD=preloaded(name),
    )
    assert "0 pieces" not in out
    assert ("mimalloc does not tell" in out) == (name == "mimalloc")


def test_chunks_that_others_put_there_meanwhile_are_not_blamed_on_time() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            cache(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    skipped = {why for _ in range(300) for why in arena.trim().skipped}
    stop.set()
    for thread in threads:
        thread.join()
    assert not any("time was over" in why for why in skipped)


def test_the_collector_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(gc, "collect", lambda *args: seen.append(args))
    gc.callbacks.append(note := lambda phase, info: seen.append(phase))
    try:
        gc.disable()
        arena.trim()
        arena.trim(budget_ms=5)
    finally:
        gc.enable()
        gc.callbacks.remove(note)
    assert not seen


@glibc  # a checker's malloc gives back what it keeps at any time
def test_pages_go_at_once_as_they_do_here_and_not_when_the_system_wants_them() -> None:
    """MADV_FREE does not lower resident memory, so nothing here may use it."""
    size = 32 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(b"1" * size)
        before = statm().resident
        pages.madvise(mmap.MADV_FREE)
        assert abs(statm().resident - before) < size // 4
        pages.madvise(mmap.MADV_DONTNEED)
        assert before - statm().resident > size // 2
    before = statm().resident
    with arena.tick() as t:
        t.alloc(size)[:] = b"1" * size
        assert statm().resident - before > size // 2
    assert statm().resident - before < size // 4
    for source in (ROOT / "csrc").rglob("*.c"):
        assert "MADV_FREE" not in source.read_text()


@glibc
def test_the_gil_is_let_go_of() -> None:
    """Another thread runs Python code while the heap is walked."""
    out = python(
        FRAGMENTED
        + """
import threading, time
fragment(200, size=1000)
stamps, done = [], threading.Event()
def count():
    while not done.is_set():
        stamps.append(time.perf_counter())
thread = threading.Thread(target=count)
thread.start()
time.sleep(0.05)
start = time.perf_counter()
result = arena.trim()
end = time.perf_counter()
done.set(); thread.join()
during = sum(start < stamp < end for stamp in stamps)
print(during, result.milliseconds)
"""
    )
    during, milliseconds = out.split()
    assert float(milliseconds) > 1
    assert int(during) > 100


@glibc
def test_callers_in_many_threads_share_one_walk() -> None:
    out = python(
        FRAGMENTED
        + """
import threading
fragment(150, size=1000)
barrier, results = threading.Barrier(8), []
def one():
    barrier.wait()
    results.append(arena.trim(reason="one of eight"))
threads = [threading.Thread(target=one) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert all(r.reason == "one of eight" for r in results)
own = [r for r in results if not r.shared]
shared = [r for r in results if r.shared]
assert 1 <= len(own) and len(own) + len(shared) == 8
for r in shared:
    assert any(r.resident_before == o.resident_before and r.milliseconds == o.milliseconds for o in
    own)
print(len(shared) > 0)
"""
    )
    assert out == "True\n"


@glibc
def test_a_child_that_is_forked_in_the_middle_can_trim() -> None:
    out = python(
        FRAGMENTED
        + """
import threading, signal
fragment(150, size=1000)
thread = threading.Thread(target=arena.trim)
thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        result = arena.trim(budget_ms=1000)
        os._exit(0 if not result.shared else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
thread.join()
print("ok")
"""
    )
    assert out == "ok\n"


def test_the_kill_switch_leaves_everything_as_it_is() -> None:
    out = python(
        """
import arena
with arena.tick() as t:
    t.alloc(3 << 20)
cached = arena.stats().cached
result = arena.trim()
assert result.skipped == ("ARENA_TRIM=off is set",) and result.chunks == 0, result
assert arena.stats().cached == cached > 0
with arena.Trimmer() as trimmer:
    assert not trimmer.stats().running and trimmer.stats().withheld == "ARENA_TRIM=off is set"
print("ok")
""",
        ARENA_TRIM="off",
    )
    assert out == "ok\n"


def test_a_misspelt_switch_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import arena"],
        env={**os.environ, "ARENA_TRIM": "of"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ARENA_TRIM='of' is not understood: it takes on or off" in done.stderr


@glibc
def test_it_can_be_awaited() -> None:
    async def main() -> arena.TrimResult:
        ticks = 0

        async def count() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        result = await arena.trim_async(reason="awaited")
        counting.cancel()
        assert ticks > 0
        return result

    assert asyncio.run(main()).reason == "awaited"


def preloaded(name: str) -> str:
    found = sorted(Path("/usr/lib").rglob(f"lib{name}.so.[0-9]*"))
    if not found:
        pytest.skip(f"lib{name} is not installed")
    return str(found[0])


@glibc
@pytest.mark.parametrize("name", ["jemalloc", "mimalloc"])
def test_the_allocator_of_the_process_is_found_and_asked(name: str) -> None:
    out = python(
        FRAGMENTED
        + """
fragment(60, size=30_000)
result = arena.trim()
print(result.backend, result.heap_milliseconds is not None, result.skipped)
with arena.Trimmer(every=0.05, cooldown=0.05) as trimmer:
    import time
    for _ in range(200):
        if trimmer.stats().trims > 1: break
        time.sleep(0.05)
    assert trimmer.stats().trims > 1
""",
        LD_PRELOAD=preloaded(name),
    )
    assert out == f"{name} True ()\n"


@glibc
def test_where_there_is_no_way_nothing_is_done_and_it_says_so() -> None:
    """A malloc that is nobody's we know: here one of a library that only passes calls on."""
    source = """
#include <stddef.h>
extern void *__libc_malloc(size_t); extern void __libc_free(void *);
extern void *__libc_calloc(size_t, size_t); extern void *__libc_realloc(void *, size_t);
void *malloc(size_t n) { return __libc_malloc(n); }
void free(void *p) { __libc_free(p); }
void *calloc(size_t a, size_t b) { return __libc_calloc(a, b); }
void *realloc(void *p, size_t n) { return __libc_realloc(p, n); }
"""
    import shutil
    import tempfile

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "other.so")
        Path(folder, "other.c").write_text(source)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", str(library), f"{folder}/other.c"],
            check=True,
            capture_output=True,
        )
        out = python(
            """
import threading, asyncio, arena
from arena import _native
first, second = arena.trim(), arena.trim()
assert first is second and first.backend == "none", first
assert "no way to give memory back" in first.skipped[0]
with arena.tick() as t:
    t.alloc(3 << 20)
assert arena.trim().chunks > 3 << 20  # its own chunks all the same
assert arena.trim(budget_ms=5, reason="x").reason == "x"
assert asyncio.run(arena.trim_async()).backend == "none"
trimmer = arena.Trimmer()
trimmer.start()
assert not trimmer.stats().running
assert "no way" in trimmer.stats().withheld
assert threading.active_count() == 1
print("ok")
""",
            LD_PRELOAD=str(library),
        )
    assert out == "ok\n"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget_ms": 0}, ValueError, "a number of milliseconds above 0 and up to 10^9, not 0"),
        ({"budget_ms": 2**70}, ValueError, "up to 10^9, not a larger one"),
        ({"budget_ms": 10**400}, ValueError, "up to 10^9, not a larger one"),
        ({"budget_ms": 1e308}, ValueError, "up to 10^9, not 1e+308"),
        ({"budget_ms": -1}, ValueError, "above 0"),
        ({"budget_ms": float("nan")}, ValueError, "above 0"),
        ({"budget_ms": float("inf")}, ValueError, "above 0"),
        ({"budget_ms": "20"}, TypeError, "budget_ms is a number of milliseconds"),
        ({"budget_ms": True}, TypeError, "budget_ms is a number of milliseconds"),
        ({"keep": "12 potatoes"}, ValueError, "12 potatoes"),
        ({"keep": -1}, ValueError, "-1"),
        ({"keep": 1.5}, TypeError, "keep is a whole number of bytes, not float"),
        ({"keep": None}, TypeError, "not NoneType"),
        ({"reason": 3}, TypeError, "reason is a str"),
        ({"budget": 3}, TypeError, "budget"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line_and_nothing_is_done(
    arguments: dict[str, object], error: type[Exception], words: str
) -> None:
    cache()
    cached = arena.stats().cached
    with pytest.raises(error) as caught:
        arena.trim(**arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert arena.stats().cached == cached


def test_spans_of_objects_go_too() -> None:
    out = python(
        """
import arena
with arena.tick(objects=True):
    keep = [b'x' * 10_000 for _ in range(3000)]
    del keep
cached = arena.object_stats().cached
result = arena.trim(budget_ms=1e-6)
assert result.chunks == 0 and arena.object_stats().cached == cached  # there was no time
result = arena.trim()
assert cached > 0 and result.chunks >= cached, (cached, result)
assert result.returned > cached / 2 and result.milliseconds > 0.01, result
assert arena.object_stats().cached == 0
print("ok")
"""
    )
    assert out == "ok\n"


def test_trims_and_ticks_of_many_threads_do_not_disturb_each_other() -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                with arena.tick("work") as t:
                    pieces = [t.strdup(f"{number} " * 50) for number in range(200)]
                    assert all(str(p) == f"{n} " * 50 for n, p in enumerate(pieces))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        arena.trim()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert _native.lib.arena_trim(0) >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="signals by setitimer")
def test_a_signal_handler_may_trim_in_the_middle_of_a_trim() -> None:
    out = python(
        """
import arena, signal, time
count = 0
def handler(*_):
    global count
    count += 1
    arena.trim()
    arena.Trimmer().stats()
    signal.setitimer(signal.ITIMER_REAL, 0.0003)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0003)
end = time.monotonic() + 2
while time.monotonic() < end:
    arena.trim()
signal.signal(signal.SIGALRM, signal.SIG_IGN)
print(count > 100)
"""
    )
    assert out == "True\n"


FORKED = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
import arena
call, delay = sys.argv[1:]
threading.Thread(target=lambda: eval(call), daemon=True).start()
time.sleep(float(delay))
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    eval(call)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


@pytest.mark.parametrize(
    "call", ["trim()", "memory()", "tune()", "Trimmer()", "doctor(lambda: None, turns=5)"]
)
def test_a_fork_in_the_middle_of_the_first_call_leaves_a_child_that_can_call_it(call: str) -> None:
    """What is imported at the first call has a lock, whose owner is not in the child."""
    for delay in ("0", "0.0005", "0.001", "0.002", "0.004"):
        done = subprocess.run(
            [sys.executable, "-c", FORKED, f"arena.{call}", delay],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr

"""What memory() tells: of the system, the C heap, Python's arenas and arena, and what it cannot."""

from __future__ import annotations

import dataclasses
import gc
import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import arena
from arena import _native, _proc
from arena._native import lib
from arena.heap import heap_count, heap_figures

pytestmark = pytest.mark.as_ever  # what an audit keeps, and objects' spans, are memory too
ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
glibc = pytest.mark.skipif(
    lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC, reason="this process's malloc is not glibc's"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A malloc of the C heap, without Python's own in between.
MALLOC = """
import ctypes, json, os, sys, threading, time, arena
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
"""


def python(code: str, **environment: str) -> str:
    """Run it in a process of its own, whose heap is nobody else's; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", MALLOC + code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def preloaded(name: str) -> str:
    found = sorted(Path("/usr/lib").rglob(f"lib{name}.so.[0-9]*"))
    if not found:
        pytest.skip(f"lib{name} is not installed")
    return str(found[0])


@linux
def test_what_is_cheap_is_always_there_and_what_is_dear_only_when_asked_for() -> None:
    report = arena.memory()
    assert report.pid == os.getpid()
    assert report.resident > 5 * MIB
    assert 0 < report.shared < report.resident
    assert report.peak is not None
    assert report.peak >= report.resident - MIB
    assert report.anonymous is not None
    assert report.file is not None
    assert report.shmem is not None
    assert abs(report.anonymous + report.file + report.shmem - report.resident) < MIB
    assert report.swap is not None
    assert (report.private, report.proportional, report.heap, report.objects) == (None,) * 4
    assert report.notes == ()
    assert set(report.costs_ms) == {"arena", "statm", "status", "cgroup"}
    asked = arena.memory(private=True, heap=True, heaps=True, objects=True)
    assert asked.private is not None
    assert asked.proportional is not None
    assert asked.private <= asked.proportional <= asked.resident + MIB
    more = {"rollup", "heap", "heaps", "objects"} & set(asked.costs_ms)
    assert all(ms > 0 for ms in asked.costs_ms.values())
    assert "rollup" in more


@glibc  # a checker's malloc gives back what it keeps at any time
def test_growth_shows_where_it_is() -> None:
    before = arena.memory(private=True)
    # Not of a heap, which may have as much to spare; private, or it would be shared memory.
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        taken.write(b"1" * (32 * MIB))
        after = arena.memory(private=True)
    for name in ("resident", "anonymous", "private", "proportional"):
        assert getattr(after, name) - getattr(before, name) > 30 * MIB, name


@glibc
def test_the_c_heap_is_split_into_used_mmapped_and_free() -> None:
    out = python("""
from arena.heap import heap_figures
def look():
    return heap_figures()
blocks = [libc.malloc(1000) for _ in range(20_000)]  # in the heap
start = look()
large = libc.malloc(50 << 20)  # in a mapping of its own
mapped = look()
for block in blocks[::2]:
    libc.free(block)
holes = look()
print(json.dumps([
    start.used, mapped.mmapped - start.mmapped, mapped.used - start.used, mapped.held - start.held,
    mapped.used - holes.used, holes.free - mapped.free,
    holes.blocks_free - mapped.blocks_free, holes.held - mapped.held, holes.backend, holes.top,
]))
""")
    used, mmapped, grown, held, freed, free, pieces, kept, backend, top = json.loads(out)
    assert used > 20_000_000
    assert 50 * MIB <= mmapped < 51 * MIB
    assert grown - mmapped < MIB
    assert held - mmapped < MIB
    assert 9_900_000 < freed < 10_300_000
    assert free > 9_900_000
    assert 9_900 < pieces < 10_200
    assert kept < MIB
    assert backend == "glibc"
    assert top > 0


@glibc
def test_heaps_are_counted() -> None:
    out = python("""
go = threading.Event()
def work(ready):
    block = libc.malloc(100)  # of a heap of its own
    ready.set()
    go.wait()
    libc.free(block)
counts = [arena.memory(heaps=True).heap.heaps]
threads = []
for _ in range(5):
    ready = threading.Event()
    threads.append(threading.Thread(target=work, args=(ready,)))
    threads[-1].start()
    ready.wait()
counts.append(arena.memory(heaps=True).heap.heaps)
go.set()
for thread in threads:
    thread.join()
print(counts, arena.memory(heap=True).heap.heaps)
""")
    assert out == "[1, 6] None\n"


def test_pythons_arenas_hold_what_small_objects_use() -> None:
    gc.collect()
    before = arena.memory(objects=True).objects
    if before is None:
        pytest.skip("this Python does not tell")
    kept = [bytes(400) for _ in range(50_000)]
    after = arena.memory(objects=True).objects
    assert after is not None
    assert 50_000 * 400 < after.used - before.used < 50_000 * 500
    assert after.blocks - before.blocks >= 50_000
    assert after.used + after.free <= after.arena_bytes
    assert after.arena_bytes >= after.arenas * 256 * 1024
    assert after.arena_bytes - before.arena_bytes > 50_000 * 400 - before.free
    every_other = kept[::2]
    del kept
    holes = arena.memory(objects=True).objects
    assert holes is not None
    assert holes.free - after.free > 25_000 * 400 - MIB
    assert len(every_other) == 25_000


def test_arenas_own_figures_are_in_it() -> None:
    with arena.tick() as t:
        t.alloc(1000)
        report = arena.memory()
        assert report.arena.scratch == 1000
        assert "scratch 0.0 MB" in str(report)


@linux
def test_a_control_group_that_is_there_is_reported() -> None:
    from arena._cgroup import cgroup

    group, report = cgroup(), arena.memory()
    if group is None:
        assert report.cgroup is None
        pytest.skip("no group counts the memory of this process")
    assert report.cgroup is not None
    assert (report.cgroup.path, report.cgroup.limit) == (group.path, group.limit)
    assert f"cgroup v{group.version}: " in str(report)


@linux
def test_the_report_is_a_few_readable_lines_and_json() -> None:
    report = arena.memory(private=True, heaps=True, objects=True)
    lines = str(report).splitlines()
    assert 4 <= len(lines) <= 8
    assert lines[0].startswith(f"process {os.getpid()}: ")
    assert " MB resident (anonymous " in lines[0]
    assert all(len(line) < 200 for line in lines)
    read = json.loads(report.as_json())
    assert read["resident"] == report.resident
    assert read["arena"]["ticks_begun"] == report.arena.ticks_begun
    assert read["arena_version"] == arena.__version__
    assert set(read) == {field.name for field in dataclasses.fields(report)} | {"arena_version"}


def test_a_report_never_changes() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        arena.memory().resident = 1  # type: ignore[misc]


# ---- what cannot be had --------------------------------------------------------------------------


def test_without_proc_all_of_it_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_proc, "PROC", "/nowhere")
    report = arena.memory(private=True)
    assert report.resident == report.shared == 0
    assert (report.swap, report.peak, report.private, report.cgroup) == (None,) * 4
    assert report.notes == ("there is no /proc here: memory is read from it, on Linux only",)
    assert "note: there is no /proc here" in str(report)
    assert "peak ?" in str(report)


@pytest.mark.parametrize(
    "text", ["", "arenas = many", "# arenas allocated current = 3\n", "x" * 1000 + "= 5"]
)
def test_a_python_that_tells_nothing_is_a_note(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(_native, "_small_objects", lambda: text)
    report = arena.memory(objects=True)
    assert report.objects is None
    assert "does not tell what is in its arenas" in report.notes[-1]


def test_a_python_without_arenas_is_a_note() -> None:
    out = python("r = arena.memory(objects=True); print(r.objects, r.notes)", PYTHONMALLOC="malloc")
    assert out.startswith("None ('this Python does not tell what is in its arenas")
    assert "PYTHONMALLOC is set?" in out


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ((0, False, *(None,) * 6), "this process's allocator tells nothing of its heap"),
        ((1, True, *(5,) * 6), "figures of 32 bits only: they wrap at 4 GB"),
    ],
)
def test_an_allocator_without_figures_is_a_note(
    monkeypatch: pytest.MonkeyPatch, raw: tuple[object, ...], says: str
) -> None:
    monkeypatch.setattr(_native, "_heap_figures", lambda: raw)
    monkeypatch.setattr(_native, "_heap_count", lambda: -1)
    report = arena.memory(heaps=True)
    assert report.heap is None
    assert says in report.notes[-1]
    assert heap_figures() is None
    assert heap_count() is None


def test_an_allocator_that_tells_half_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_heap_figures", lambda: (3, False, 5000, *(None,) * 5))
    monkeypatch.setattr(_native, "_heap_count", lambda: -1)
    report = arena.memory(heaps=True)
    assert report.heap == arena.HeapFigures("mimalloc", 5000, *(None,) * 5)
    assert report.notes == (
        "this process's allocator does not tell how many heaps it has",
        "mimalloc does not tell what is used and what is free",
    )
    assert "? in use (mmapped ?), ? free" in str(report)


@glibc  # so is the library that is here
def test_jemalloc_tells_what_is_used_and_free() -> None:
    out = python(
        """
def look():
    return arena.memory(heaps=True).heap
blocks = [libc.malloc(1000) for _ in range(20_000)]
full = look()
for number, block in enumerate(blocks):
    if number % 16:
        libc.free(block)
holes = look()
print(json.dumps([full.backend, full.used, full.used - holes.used, holes.free - full.free,
                  full.heaps, full.held]))
""",
        LD_PRELOAD=preloaded("jemalloc"),
    )
    backend, used, freed, free, heaps, held = json.loads(out)
    assert backend == "jemalloc"
    assert used > 20_000_000
    assert freed > 18_000_000
    assert free > 10_000_000
    assert heaps >= 1
    assert held > used


@glibc
def test_mimalloc_tells_what_it_has_taken() -> None:
    out = python(
        """
before = arena.memory(heap=True)
blocks = [libc.malloc(60_000) for _ in range(2_000)]
for block in blocks:
    ctypes.memset(block, 1, 60_000)
after = arena.memory(heap=True)
print(after.heap.backend, after.heap.held - before.heap.held > 50_000_000, after.heap.used,
      after.notes)
""",
        LD_PRELOAD=preloaded("mimalloc"),
    )
    assert out == ("mimalloc True None ('mimalloc does not tell what is used and what is free',)\n")


# ---- trims, threads, forks -----------------------------------------------------------------------

# A heap whose trim takes long enough to look meanwhile, and a thread that trims it all the time.
TRIMMING = """
from arena import _native
blocks = [libc.malloc(4080) for _ in range(60_000)]
for block in blocks:
    ctypes.memset(block, 1, 4080)
for number, block in enumerate(blocks):
    if number % 8:
        libc.free(block)
over = threading.Event()
def trim():
    while not over.is_set():
        _native._trim(0, 2**64 - 1, 0)
trimmer = threading.Thread(target=trim)
trimmer.start()
"""


@glibc
def test_while_a_trim_runs_the_heap_is_not_looked_at_and_the_report_says_so() -> None:
    out = python(
        TRIMMING
        + """
seen = None
for _ in range(100_000):
    report = arena.memory(heaps=True, objects=True)
    if report.heap is None and report.objects is None:
        seen = report
        break
    time.sleep(0.0005)
over.set()
trimmer.join()
print(seen.notes)
later = arena.memory(heaps=True, objects=True)
print(later.notes, later.heap.heaps >= 1, later.objects is not None)
"""
    )
    assert out == (
        "('a trim runs: the C heap is not looked at meanwhile', "
        '"a trim runs: Python\'s arenas are not looked at meanwhile")\n'
        "() True True\n"
    )


@glibc
def test_a_child_that_is_forked_in_the_middle_of_a_trim_can_look() -> None:
    out = python(
        TRIMMING
        + """
oks = 0
for _ in range(20):
    pid = os.fork()
    if not pid:
        report = arena.memory(private=True, heaps=True, objects=True)
        os._exit(0 if report.pid == os.getpid() and report.heap and not report.notes else 1)
    oks += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
over.set()
trimmer.join()
print(oks)
"""
    )
    assert out == "20\n"


def test_many_threads_may_look_at_once() -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(8)

    def look() -> None:
        try:
            barrier.wait()
            for _ in range(30):
                report = arena.memory(private=True, heap=True, heaps=True, objects=True)
                assert report.arena is not None
                if lib.arena_heap_kind() == lib.ARENA_HEAP_GLIBC:
                    assert report.heap is not None
                    assert report.heap.used is not None
                    assert report.heap.heaps is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@glibc
def test_others_run_python_while_the_heap_is_looked_at() -> None:
    """A test's malloc_info that waits for Python to run would hang if the GIL were held."""
    source = """
#include <stdio.h>
#include <unistd.h>
extern void *__libc_malloc(size_t); extern void __libc_free(void *);
extern void *__libc_calloc(size_t, size_t); extern void *__libc_realloc(void *, size_t);
void *malloc(size_t n) { return __libc_malloc(n); }
void free(void *p) { __libc_free(p); }
void *calloc(size_t a, size_t b) { return __libc_calloc(a, b); }
void *realloc(void *p, size_t n) { return __libc_realloc(p, n); }
volatile int let_go;
int malloc_trim(size_t n) { (void)n; return 0; }
int malloc_info(int options, FILE *file) {
    (void)options;
    for (int i = 0; i < 20000 && !let_go; i++) usleep(1000);
    return fprintf(file, "<heap nr=\\"0\\"><heap nr=\\"1\\">") < 0 || !let_go;
}
"""
    import shutil
    import tempfile

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "slow.so")
        Path(folder, "slow.c").write_text(source)
        command = [compiler, "-shared", "-fPIC", "-o", str(library), f"{folder}/slow.c"]
        subprocess.run(command, check=True, capture_output=True)
        out = python(
            """
from arena.heap import heap_count
found = []
thread = threading.Thread(target=lambda: found.append(heap_count()))
thread.start()
time.sleep(0.05)
ctypes.c_int.in_dll(libc, "let_go").value = 1
thread.join()
print(found)
""",
            LD_PRELOAD=str(library),
        )
    assert out == "[2]\n"


@pytest.mark.parametrize("source", ["private", "heap", "heaps", "objects"])
@pytest.mark.parametrize("value", ["yes", None, 1])
def test_a_source_is_asked_for_by_true_or_false(source: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{source} is True or False, not {value!r}"):
        arena.memory(**{source: value})  # type: ignore[arg-type]

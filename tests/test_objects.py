"""Python's own blocks in ticks: which are captured, what escapes, and that each comes back."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from objects_host import CALLOC, FREE, KINDS, MALLOC, REALLOC, Host, connected

import arena
from arena import _objects, objects
from arena.objects import connect, object_stats

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path(__file__).resolve().parent
MIB = 1 << 20
SIZES = (513, 528, 529, 1000, 4096, 5000, 21841, 32768, 32769, 65536, 65537, 300_000, 3 * MIB)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """Connect a recording host for this module's tests."""
    with connected() as host:
        yield host


@pytest.fixture(autouse=True)
def nothing_is_left(host: Host) -> Iterator[None]:
    """After each test no tick captures, and what it made is gone."""
    gc.collect()
    before = object_stats()
    yield
    gc.collect()
    after = object_stats()
    assert after.open_count == before.open_count == 0
    assert after.captured == after.captured_count == 0
    assert host.value("mistakes").value == 0


def bytes_at(address: int, size: int) -> bytes:
    """Return what lies there."""
    return ctypes.string_at(address, size)


def fill(address: int, size: int, value: int) -> None:
    """Write one value to all bytes."""
    ctypes.memset(address, value, size)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a child that has the recording host as `host`."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path[:0] = {[str(TESTS), *sys.path]!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


# ---------------------------------------------------------------- what is captured


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_above_512_bytes_are_captured_in_a_tick_and_only_there(
    host: Host, kind: str
) -> None:
    outside = MALLOC[kind](1000)
    capture = host.begin()
    before = object_stats()
    small, large = MALLOC[kind](512), MALLOC[kind](513)
    after = object_stats()
    assert (after.captured_count - before.captured_count, after.captured - before.captured) == (
        1,
        513,
    )
    for block in (outside, small, large):
        FREE[kind](block)
    assert object_stats().captured == before.captured
    host.end(capture)
    later = MALLOC[kind](1000)
    assert object_stats().captured_count == 0
    FREE[kind](later)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_writable_aligned_and_its_own(host: Host, kind: str, size: int) -> None:
    with host.tick():
        blocks = [MALLOC[kind](size) for _ in range(5)]
        for value, block in enumerate(blocks):
            assert block % 16 == 0
            fill(block, size, value)
        for value, block in enumerate(blocks):
            assert bytes_at(block, size) == bytes([value]) * size
        for block in blocks:
            FREE[kind](block)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_calloc_is_zero_also_where_freed_blocks_were(host: Host, kind: str, size: int) -> None:
    with host.tick():
        for _ in range(3):
            block = CALLOC[kind](1, size)
            assert bytes_at(block, size) == bytes(size)
            fill(block, size, 0xFF)
            FREE[kind](block)
            block = MALLOC[kind](size)
            fill(block, size, 0xFF)
            FREE[kind](block)


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_sizes_are_refused_as_outside(host: Host, kind: str) -> None:
    with host.tick():
        before = object_stats().captured
        for size in (2**62, 2**63 - 1, 2**64 - 1, 1 << 37):
            block = MALLOC[kind](size)
            assert block is None or size == 1 << 37  # a system may promise what it has not
            FREE[kind](block)
            assert CALLOC[kind](size, 16) is None
        assert object_stats().captured == before


def test_freed_blocks_are_used_again_inside_of_the_tick(host: Host) -> None:
    with host.tick():
        for size in SIZES:
            before = object_stats().spans
            seen = set()
            for _ in range(1000 if size < MIB else 10):
                block = MALLOC["Object"](size)
                seen.add(block)
                FREE["Object"](block)
            assert len(seen) == 1
            assert object_stats().spans == before


def test_a_dead_span_serves_any_other_class(host: Host) -> None:
    blocks = [0] * 5000
    with host.tick():
        spans = object_stats().spans
        for at in range(5000):
            blocks[at] = MALLOC["Mem"](600)
        used = object_stats().spans - spans
        assert used >= 5000 * 600
        for block in blocks:
            FREE["Mem"](block)
        assert object_stats().spans == spans
        cached = object_stats().cached
        for at in range(1400):
            blocks[at] = MALLOC["Mem"](2000)
        assert object_stats().cached < cached
        assert object_stats().cached + object_stats().spans - spans == cached
        for block in blocks[:1400]:
            FREE["Mem"](block)


def test_memory_that_is_there_is_used_before_lower_addresses(host: Host) -> None:
    with host.tick():
        low, high = MALLOC["Mem"](640_000), MALLOC["Mem"](640_000)
        FREE["Mem"](low)
        objects.give_back()
        FREE["Mem"](high)
        cached = object_stats().cached
        one = MALLOC["Mem"](20_000)
        assert object_stats().cached == cached - 65536
        assert one >= high > low
        FREE["Mem"](one)


def test_objects_of_all_kinds_work_as_ever(host: Host) -> None:
    text = json.dumps([{"name": "x" * 900, "list": list(range(200)), "é": "ü" * 700}] * 30)
    with host.tick():
        document = json.loads(text)
        again = json.dumps(document)
        assert object_stats().captured > 30 * 900
        table = {number: str(number) * 200 for number in range(1000)}
        text_of = "".join(table.values())
        numbers = sorted(range(10_000), reverse=True)
        grown = bytearray()
        for number in range(5000):
            grown += number.to_bytes(2, "little")
        assert again == text
    assert text_of == "".join(str(number) * 200 for number in range(1000))
    assert numbers[0] == 9999
    assert grown[-2:] == (4999).to_bytes(2, "little")
    assert table[7] == "7" * 200


def test_another_threads_blocks_stay_outside(host: Host) -> None:
    def allocate() -> None:
        before = object_stats().captured_count
        block = MALLOC["Mem"](1000)
        assert object_stats().captured_count == before
        FREE["Mem"](block)
        done.append(True)

    done: list[bool] = []
    with host.tick():
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    assert done == [True]


def test_the_innermost_open_tick_has_the_block_whatever_the_order_of_ends(host: Host) -> None:
    outer, inner = host.begin(1), host.begin(2)
    with host.site(11):
        one = MALLOC["Mem"](1000)
    host.end(outer)
    with host.site(12):
        two = MALLOC["Mem"](1000)
    host.end(inner)
    assert [row.tick for site in (11, 12) for row in host.of_site(site)] == [2, 2]
    third = host.begin(3)
    fourth = host.begin(4)
    host.end(fourth)
    with host.site(13):
        three = MALLOC["Mem"](1000)
    host.end(third)
    assert [row.tick for row in host.of_site(13)] == [3]
    for block in (one, two, three):
        FREE["Mem"](block)


def test_a_tick_ended_by_another_thread_captures_no_more(host: Host) -> None:
    capture = host.begin()
    with host.site(21):
        block = MALLOC["Mem"](1000)
    thread = threading.Thread(target=host.end, args=(capture,))
    thread.start()
    thread.join()
    assert len(host.of_site(21)) == 1
    with host.site(22):
        other = MALLOC["Mem"](1000)
    assert object_stats().captured_count == 0
    FREE["Mem"](block)
    FREE["Mem"](other)


def test_a_tick_outlives_its_thread(host: Host) -> None:
    captures: list[int] = []
    blocks: list[int] = []

    def begin() -> None:
        captures.append(host.begin(7))
        blocks.append(MALLOC["Mem"](1000))
        captures.append(host.begin(8))

    for _ in range(3):
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    for block in blocks:
        assert bytes_at(block, 1)
        FREE["Mem"](block)
    for capture in captures:
        host.end(capture)


def test_what_the_host_allocates_to_find_a_site_stays_outside(host: Host) -> None:
    pointer = ctypes.c_void_p
    allocate = pointer.in_dll(host.lib, "allocate")
    release = pointer.in_dll(host.lib, "release")
    release.value = ctypes.cast(ctypes.pythonapi.PyObject_Free, pointer).value
    with host.tick():
        asked = host.value("sites_asked")
        before = asked.value
        allocate.value = ctypes.cast(ctypes.pythonapi.PyObject_Malloc, pointer).value
        block = MALLOC["Object"](1000)
        allocate.value = None
        assert asked.value == before + 1
        FREE["Object"](block)


def test_a_sub_interpreter_in_the_thread_of_a_tick_is_not_captured() -> None:
    code = """
try:
    import _interpreters as sub
    inner = sub.create("legacy")
except ImportError:
    import _xxsubinterpreters as sub
    inner = sub.create(isolated=False)
with host.tick():
    before = object_stats().captured
    sub.run_string(inner, "kept = [bytes(1000) for _ in range(1000)]")
    assert object_stats().captured < before + 100_000
    mine = bytes(100_000)
    assert object_stats().captured >= before + 100_000
sub.destroy(inner)
print("fine")
"""
    done = run(CHILD + code)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_address_sanitizer_stops_a_read_of_a_freed_block() -> None:
    if "ASAN_OPTIONS" not in os.environ:
        pytest.skip("tests/asan builds for it")
    code = """
with host.tick():
    block = MALLOC["Mem"](1000)
    print(len(ctypes.string_at(block, 1000)), flush=True)
    {}
"""
    for misuse in (
        'FREE["Mem"](block); ctypes.string_at(block, 8)',
        "ctypes.string_at(block, 1001)",
    ):
        done = run(CHILD + code.format(misuse), ASAN_OPTIONS="detect_leaks=0")
        assert done.stdout == "1000\n", done.stderr
        assert "use-after-poison" in done.stderr


# ---------------------------------------------------------------- what escapes


@pytest.mark.parametrize("size", SIZES)
def test_what_is_alive_at_the_end_has_escaped_until_it_is_freed(host: Host, size: int) -> None:
    before = object_stats()
    capture = host.begin(99)
    with host.site(31):
        kept, dropped, other = (MALLOC["Mem"](size) for _ in range(3))
    FREE["Mem"](dropped)
    fill(kept, size, 1)
    fill(other, size, 2)
    assert host.end(capture) >= 2
    rows = host.of_site(31)
    assert [(row.tick, row.size) for row in rows] == [(99, size)] * 2
    stats = object_stats()
    assert stats.escaped - before.escaped >= 2 * size
    assert bytes_at(kept, size) == b"\1" * size
    FREE["Mem"](kept)
    assert len(host.of_site(31)) == 1
    assert bytes_at(other, size) == b"\2" * size
    FREE["Mem"](other)
    assert host.of_site(31) == []


def test_nothing_escapes_of_a_tick_whose_objects_are_all_dead(host: Host) -> None:
    text = json.dumps([{"name": "x" * 900, "list": list(range(200))}] * 30)
    capture = host.begin()
    with host.site(32):
        document = json.loads(text)
        del document
    host.end(capture)
    assert host.of_site(32) == []


def test_garbage_in_a_cycle_has_escaped_until_it_is_collected(host: Host) -> None:
    gc.disable()
    capture = host.begin()
    with host.site(33):
        loop: list[object] = [None] * 500
        loop[0] = loop
        del loop
    host.end(capture)
    assert [row.size for row in host.of_site(33)] == [4000]
    gc.collect()
    gc.enable()
    assert host.of_site(33) == []


def test_escaped_blocks_of_one_tick_lie_between_those_of_the_last(host: Host) -> None:
    spans = object_stats().spans
    kept: list[int] = []
    for _ in range(200):
        with host.tick():
            blocks = [MALLOC["Object"](1000) for _ in range(300)]
            kept.append(blocks.pop(150))
            for block in blocks:
                FREE["Object"](block)
    # 200 blocks fit 4 spans. One tick's garbage, 300 blocks, is what they may lie apart.
    assert object_stats().spans - spans <= (4 + 6) * 65536
    for block in kept:
        FREE["Object"](block)
    del kept, blocks  # lists that grew in ticks
    assert object_stats().spans == spans


def test_there_may_be_no_memory_for_a_row(host: Host) -> None:
    left = host.value("rows_left")
    before, left.value = left.value, 0
    with host.tick():
        blocks = [MALLOC["Mem"](1000), MALLOC["Mem"](100_000)]
    left.value = before
    blocks = [REALLOC["Mem"](block, 1008) for block in blocks]
    for block in blocks:
        FREE["Mem"](block)


def examples_of(host: Host, make: Callable[[], object]) -> tuple[list[str], object]:
    with host.tick(), host.site(41):
        kept = make()
    return [row.text for row in host.of_site(41)], kept


@pytest.mark.parametrize(  # int(): so that the compiler does not make them
    ("make", "text"),
    [
        (lambda: "ab'\n\0" * int("300"), r"str 'ab\\'\\n\?ab\\'\\n\?ab.*…', 1,5\d\d bytes"),
        (lambda: "é" * int("1000"), "str '" + "é" * 40 + r"…', 1,0\d\d bytes"),
        (lambda: "√" * int("1000"), "str '" + "√" * 40 + r"…', 2,0\d\d bytes"),
        (lambda: "😀" * int("1000"), "str '" + "😀" * 40 + r"…', 4,0\d\d bytes"),
        (lambda: b"raw " * int("300"), r"bytes b'(raw ){10}…', 1,2\d\d bytes"),
        (lambda: tuple([None] * 100), r"tuple with 100 items, 8\d\d bytes"),
        (lambda: 1 << 10_000, r"int, 1,\d\d\d bytes"),
        (lambda: [None] * 100, r"800 bytes \(a list's or dict's table, or a buffer\)"),
        (lambda: bytearray(1_234_567), r"1,234,\d\d\d bytes \(a list's .*\)"),
    ],
)
def test_an_example_shows_what_escaped(host: Host, make: Callable[[], object], text: str) -> None:
    found, kept = examples_of(host, make)
    assert kept is not None
    assert any(re.fullmatch(text, one) for one in found), found


def test_a_forged_object_is_read_within_its_block_alone(host: Host) -> None:
    def header_of(thing: object, size: int) -> bytes:
        return bytes_at(id(thing), size)

    genuine = "x" * 600
    length_at = 16
    for thing in (genuine, "é" * 600, "√" * 600, b"y" * 600, (None,) * 100, 1 << 9000):
        for lie in (2**62, 2**63 - 1, 2**64 - 1, 100_000, 500):
            head = bytearray(header_of(thing, 80))
            head[length_at : length_at + 8] = lie.to_bytes(8, "little")
            for shift in (0, 16):
                capture = host.begin()
                with host.site(42):
                    block = MALLOC["Mem"](600)
                fill(block, 600, 0x78)
                ctypes.memmove(block + shift, bytes(head), len(head))
                host.end(capture)
                (row,) = host.of_site(42)
                if lie != 500 and not isinstance(thing, int):
                    assert row.text == "600 bytes (a list's or dict's table, or a buffer)"
                FREE["Mem"](block)


# ---------------------------------------------------------------- realloc


@pytest.mark.parametrize("before", [513, 5000, 40_000, 3 * MIB])
@pytest.mark.parametrize("after", [0, 1, 512, 513, 600, 4999, 5001, 39_000, 70_000, 9 * MIB])
@pytest.mark.parametrize("when", ["inside", "after", "in the next tick"])
def test_realloc_keeps_the_bytes(host: Host, before: int, after: int, when: str) -> None:
    kind = "Mem" if when == "inside" else "Object"
    pattern = bytes(range(1, 252)) * (max(before, after) // 251 + 1)
    capture = host.begin(1)
    with host.site(51):
        block = MALLOC[kind](before)
        blocker = MALLOC[kind](before)  # what grows in place has to look first
    ctypes.memmove(block, pattern, before)
    if when != "inside":
        host.end(capture)
    if when == "in the next tick":
        capture = host.begin(2)
    with host.site(52):
        block = REALLOC[kind](block, after)
    assert bytes_at(block, min(before, after)) == pattern[: min(before, after)]
    if after:
        fill(block + min(before, after), after - min(before, after), 0xEE)
    if when != "after":
        host.end(capture)
    FREE[kind](blocker)
    rows = host.of_site(51) + host.of_site(52)
    if after <= 512:
        assert rows == []  # small survivors hold nothing
    elif when == "inside":
        assert [(row.tick, row.size, row.site) for row in rows] == [(1, after, 51)]
    elif rows:  # where it was, or in the tick that made it larger; else outside
        assert [row.size for row in rows] == [after]
    FREE[kind](block)
    assert host.of_site(51) + host.of_site(52) == []


def test_what_shrinks_much_moves_to_where_it_fits(host: Host) -> None:
    with host.tick(), host.site(53):
        block = MALLOC["Mem"](30_000)
        assert REALLOC["Mem"](block, 20_000) == block
        moved = REALLOC["Mem"](block, 2000)
        assert moved != block
        large = MALLOC["Mem"](MIB)
        spans = object_stats().spans
        assert REALLOC["Mem"](large, 70_000) == large
        assert object_stats().spans == spans - MIB + 131_072
        FREE["Mem"](moved)
        FREE["Mem"](large)


def test_a_growing_thing_stays_in_the_tick_that_made_it(host: Host) -> None:
    outer = host.begin(1)
    with host.site(54):
        block = MALLOC["Mem"](1000)
    inner = host.begin(2)
    with host.site(55):
        block = REALLOC["Mem"](block, 50_000)
    host.end(inner)
    assert host.of_site(54) + host.of_site(55) == []
    host.end(outer)
    assert [(row.tick, row.size) for row in host.of_site(54)] == [(1, 50_000)]
    FREE["Mem"](block)


def test_a_list_that_grows_out_of_the_small_blocks_is_captured(host: Host) -> None:
    with host.tick(), host.site(56):
        before = object_stats().captured
        grown: list[int] = []
        for _ in range(1000):
            grown.append(1)
        assert object_stats().captured - before >= 8000
        table = bytearray()
        for _ in range(3000):
            table += b"x"
        assert object_stats().captured - before >= 11_000
    assert sum(grown) == 1000
    assert table == b"x" * 3000
    assert len(host.of_site(56)) == 2


def test_what_was_large_before_the_tick_stays_outside_when_it_grows(host: Host) -> None:
    block = MALLOC["Mem"](5000)
    fill(block, 5000, 3)
    with host.tick(), host.site(57):
        block = REALLOC["Mem"](block, 50_000)
        assert bytes_at(block, 5000) == b"\3" * 5000
    assert host.of_site(57) == []
    FREE["Mem"](block)


# ---------------------------------------------------------------- threads, processes, exit


def test_blocks_are_freed_by_any_thread_at_any_time(host: Host) -> None:
    with host.tick():
        with host.site(61):
            early, late = MALLOC["Object"](1000), MALLOC["Object"](100_000)
        thread = threading.Thread(target=FREE["Object"], args=(early,))
        thread.start()
        thread.join()
    assert [row.size for row in host.of_site(61)] == [100_000]
    thread = threading.Thread(target=FREE["Object"], args=(late,))
    thread.start()
    thread.join()
    assert host.of_site(61) == []


def test_threads_with_ticks_of_their_own_do_not_disturb_each_other(host: Host) -> None:
    text = json.dumps([{"name": "x" * 900, "list": list(range(300))}] * 20)
    expected = json.loads(text)
    wrong: list[object] = []

    def churn(seed: int) -> None:
        kept: list[object] = []
        for turn in range(30):
            with host.tick(seed):
                document = json.loads(text)
                if turn % 3 == 0:
                    kept.append(document[turn % 20])
                if document != expected or json.dumps(document) != text:
                    wrong.append(document)
            if len(kept) > 5:
                kept.pop(0)
            if any(entry != expected[0] for entry in kept):
                wrong.append(kept)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


CHILD = """
import ctypes, gc, json, os, threading
from objects_host import FREE, MALLOC, Host
from arena.objects import object_stats
host = Host()
text = json.dumps([{"name": "x" * 900, "list": list(range(200))}] * 30)
"""


def test_a_fork_has_all_of_it() -> None:
    code = """
kept = []
with host.tick():
    kept.append(json.loads(text))
outer = host.begin()
here = json.loads(text)
if (child := os.fork()) == 0:
    assert json.dumps(kept[0]) == json.dumps(here) == text
    kept.clear()
    more = json.loads(text)
    assert host.end(outer) > 60
    del here
    with host.tick():
        more = json.loads(text)
    os._exit(0 if json.dumps(more) == text else 1)
assert os.waitpid(child, 0)[1] == 0
assert json.dumps(kept[0]) == json.dumps(here) == text
host.end(outer)
print("fine")
"""
    done = run(CHILD + code)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_in_a_fork_the_ticks_of_other_threads_do_not_count() -> None:
    code = """
begun, done = threading.Event(), threading.Event()
captures = []
def other():
    captures.append(host.begin())
    captures.append(json.loads(text))
    begun.set()
    done.wait()
thread = threading.Thread(target=other)
thread.start()
begun.wait()
mine = host.begin()
assert object_stats().open_count == 2
if (child := os.fork()) == 0:
    assert object_stats().open_count == 1
    assert json.dumps(captures.pop()) == text
    host.end(mine)
    assert object_stats().open_count == 0
    host.end(captures.pop())  # as when its object is collected
    assert object_stats().open_count == 0 and object_stats().captured == 0
    with host.tick():
        assert object_stats().open_count == 1
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
done.set()
thread.join()
print("fine")
"""
    done = run(CHILD + code)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


def test_locked_memory_that_cannot_go_back_is_not_taken_for_zeros() -> None:
    code = """
from objects_host import CALLOC
from arena import objects
if ctypes.CDLL(None).mlockall(2) != 0:  # MCL_FUTURE
    print("fine"); os._exit(0)
with host.tick():
    for size in (1000, 100_000, 5_000_000):
        block = MALLOC["Mem"](size)
        ctypes.memset(block, 1, size)
        FREE["Mem"](block)
        objects.give_back()
        block = CALLOC["Mem"](size, 1)
        assert ctypes.string_at(block, size) == bytes(size)
        FREE["Mem"](block)
print("fine")
"""
    done = run(CHILD + code)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


@pytest.mark.parametrize("how", ["end", "sys.exit(0)", "raise SystemExit", "os._exit(0)"])
def test_exit_with_open_ticks_and_live_blocks_is_quiet(how: str) -> None:
    code = f"""
class Late:
    def __del__(self, loads=json.loads, text=text):
        self.made = loads(text)  # allocates while the interpreter ends
import builtins
builtins.late = Late()
with host.tick():
    builtins.kept = json.loads(text)
capture = host.begin()
builtins.open_kept = json.loads(text)
def linger():
    host.begin()
    mine = json.loads(text)
    threading.Event().wait()
threading.Thread(target=linger, daemon=True).start()
import atexit
atexit.register(lambda: print("fine", flush=True))
if {how!r} == "os._exit(0)":
    print("fine", flush=True)
{how if how != "end" else ""}
"""
    done = run(CHILD + code)
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)


# ---------------------------------------------------------------- other hooks


def test_tracemalloc_may_start_and_stop_on_top(host: Host) -> None:
    text = json.dumps([{"name": "x" * 900, "list": list(range(200))}] * 30)
    with host.tick():
        before = json.loads(text)
        tracemalloc.start()
        during = json.loads(text)
        traced = tracemalloc.get_traced_memory()[0]
        with host.tick(), host.site(71):
            inner = MALLOC["Object"](1000)
        assert traced > 30 * 900
    tracemalloc.stop()
    assert [row.size for row in host.of_site(71)] == [1000]
    FREE["Object"](inner)
    assert host.of_site(71) == []
    with host.tick(), host.site(72):
        after = MALLOC["Object"](1000)
    assert len(host.of_site(72)) == 1
    FREE["Object"](after)
    assert json.dumps(before) == json.dumps(during) == text


@pytest.mark.as_ever
def test_under_tracemalloc_the_first_tick_is_refused_and_later_ones_are_not() -> None:
    code = """
import tracemalloc
from arena.objects import connect
import arena
tracemalloc.start()
try:
    connect(0)
except arena.ArenaError as error:
    print(error)
tracemalloc.stop()
print(connect(0) != 0)
tracemalloc.start()
print(connect(0) != 0)
"""
    done = run(code)
    told, first, second = done.stdout.splitlines()
    assert "Start tracemalloc after the first tick with objects=True" in told
    assert (first, second, done.stderr) == ("True", "True", "")
    assert (
        "Start tracemalloc after"
        in run("from arena.objects import connect; connect(0)", PYTHONTRACEMALLOC="1").stderr
    )


@pytest.mark.parametrize("kind", KINDS)
def test_another_tool_may_hook_over_ours_and_leave(kind: str) -> None:
    code = f"""
host.hook({kind!r})
with host.tick():
    document = json.loads(text)
    assert object_stats().captured > 30 * 900
    block = MALLOC[{kind!r}](1000)
assert host.lib.watched_blocks() > 0
host.unhook({kind!r})
assert json.dumps(document) == text
FREE[{kind!r}](block)
del document
gc.collect()
assert object_stats().escaped < 30 * 900
with host.tick():
    document = json.loads(text)
    assert object_stats().captured > 30 * 900
print("fine")
"""
    done = run(CHILD + code)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_another_tool_took_out_are_put_in_again(kind: str) -> None:
    code = f"""
from objects_host import build
early = build()
early_hook = Host.hook
class Early(Host):
    def __init__(self):
        self.lib = early
Host.hook(Early(), {kind!r})
host = Host()
with host.tick():
    block = MALLOC[{kind!r}](1000)
    assert object_stats().captured >= 1000
    FREE[{kind!r}](block)
gc.collect()
assert object_stats().escaped_count == 0
Host.unhook(Early(), {kind!r})
for turn in range(20):
    with host.tick():
        block = MALLOC[{kind!r}](1000)
        assert object_stats().captured >= 1000
        block = REALLOC[{kind!r}](block, 100)
        FREE[{kind!r}](block)
print("fine")
"""
    done = run(CHILD.replace("host = Host()\n", "").replace("MALLOC", "MALLOC, REALLOC") + code)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


# ---------------------------------------------------------------- NumPy


def test_the_data_of_arrays_is_captured_and_may_escape(host: Host) -> None:
    np = pytest.importorskip("numpy")
    before = object_stats()
    capture = host.begin(5)
    with host.site(81):
        kept = np.arange(10_000)
        small = np.arange(10)
        zeros = np.zeros(10**7)
        assert object_stats().captured - before.captured >= 80_000 + 8 * 10**7
        assert float(zeros.sum()) == 0
        dead = kept * 2
        del zeros, dead
    host.end(capture)
    assert [(row.tick, row.size) for row in host.of_site(81)] == [(5, 80_000)]
    assert int(kept.sum()) == 49_995_000
    assert int(small.sum()) == 45
    kept.resize(20_000, refcheck=False)  # by realloc, with no tick open
    assert int(kept.sum()) == 49_995_000
    del kept
    assert host.of_site(81) == []
    with host.site(82):
        outside = np.arange(10_000)
    assert object_stats().captured_count == 0
    assert outside.size == 10_000


def test_arrays_outlive_ticks_in_any_thread_and_context(host: Host) -> None:
    np = pytest.importorskip("numpy")
    made: list[object] = []

    def work(number: int) -> None:
        for _ in range(20):
            with host.tick(number):
                made.append(np.full(1000, number))
                scratch = np.concatenate([np.ones(500)] * 4)
                assert float(scratch.sum()) == 2000

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(array.sum()) for array in made) == sorted(  # type: ignore[attr-defined]
        number * 1000 for number in range(4) for _ in range(20)
    )
    made.clear()


def test_a_handler_that_numpy_had_goes_on_behind_ours(host: Host) -> None:
    pytest.importorskip("numpy")
    code = """
import asyncio, contextvars
import numpy as np
try:
    from numpy._core.multiarray import get_handler_name
except ImportError:
    from numpy.core.multiarray import get_handler_name
first = get_handler_name()
def in_a_context():
    with host.tick():
        assert get_handler_name() == "arena"
    array = np.ones(1000)
    assert get_handler_name(array) == "arena"  # which passes it on
    return array
array = contextvars.copy_context().run(in_a_context)
assert get_handler_name() == first
assert float(array.sum()) == 1000 and object_stats().escaped < 8000
async def task(n):
    with host.tick():
        mine = np.full(5000, n)
        await asyncio.sleep(0)
        assert float(mine.sum()) == 5000 * n
    return mine
async def main():
    return await asyncio.gather(*map(task, range(20)))
assert [int(a[0]) for a in asyncio.run(main())] == list(range(20))
print("fine")
"""
    done = run(CHILD + code)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


# ---------------------------------------------------------------- memory


def spike() -> None:
    """Use and free 20 MB."""
    for block in [MALLOC["Mem"](10_000) for _ in range(2000)]:
        fill(block, 10_000, 1)
        FREE["Mem"](block)


def test_a_block_that_glibc_would_always_map_goes_back_when_it_is_freed(host: Host) -> None:
    objects.give_back()
    for size, kept in ((31 * MIB, True), (33 * MIB, False)):
        around = host.begin()  # while it is open nothing goes back for any other reason
        with host.tick():
            block = MALLOC["Mem"](size)
            fill(block, size, 1)
            FREE["Mem"](block)
            assert (object_stats().cached >= 31 * MIB) == kept
            block = MALLOC["Mem"](size)  # and may be had again
            fill(block, size, 2)
            FREE["Mem"](block)
        host.end(around)
        objects.give_back()


def test_a_spike_is_forgotten_within_32_ticks_while_another_is_open(host: Host) -> None:
    around = host.begin()
    with host.tick():
        spike()
    assert object_stats().cached >= 18 * MIB
    for _ in range(31):
        with host.tick():
            FREE["Mem"](MALLOC["Mem"](10_000))
    assert object_stats().cached <= MIB
    host.end(around)


def test_a_spike_is_forgotten_when_no_tick_is_open_and_time_has_passed(host: Host) -> None:
    objects.give_back()
    with host.tick():
        time.sleep(1)  # pays for 60 MB
        spike()
    assert object_stats().cached <= MIB
    waited = time.perf_counter()
    for _ in range(10):  # 200 MB, and no time to pay for them: most is kept for the next
        given = object_stats().given_back
        with host.tick():
            spike()
        if object_stats().given_back - given < 10 * MIB:
            break
    else:
        assert time.perf_counter() - waited > 1


def test_what_had_escaped_goes_back_when_it_dies_with_no_tick_open(host: Host) -> None:
    with host.tick():
        blocks = [MALLOC["Mem"](30_000) for _ in range(1000)]
        for block in blocks:
            fill(block, 30_000, 1)
    before = object_stats()
    for block in blocks:
        FREE["Mem"](block)
    after = object_stats()
    assert after.spans <= before.spans - 30_000_000
    assert after.cached <= before.cached + 3 * MIB


def test_small_ticks_make_no_system_call_to_give_memory_back() -> None:
    """In a process of its own: holes between what earlier tests left behind do go back."""
    code = """
import arena
def turn():
    with arena.tick(objects=True):
        blocks = [bytes(size) for size in (600, 5000, 100_000) for _ in range(5)]
        del blocks
for _ in range(40):
    turn()
before = arena.object_stats()
for _ in range(200):
    turn()
after = arena.object_stats()
held = after.spans + after.cached - before.spans - before.cached
print(after.given_back - before.given_back, held)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0 0\n", "")


def test_trim_gives_back_all_that_holds_no_block(host: Host) -> None:
    with host.tick():
        blocks = [MALLOC["Mem"](1000) for _ in range(10_000)]
        for block in blocks:
            fill(block, 1000, 7)
    kept = blocks[::64]
    for number, block in enumerate(blocks):
        if number % 64:
            FREE["Mem"](block)
    before = object_stats().given_back
    given = objects.give_back()
    assert object_stats().given_back - before == given
    assert given >= 8 * MIB
    assert object_stats().cached == 0
    with host.tick():  # what was given back is used again
        again = [CALLOC["Mem"](1, 1000) for _ in range(10_000)]
        assert all(bytes_at(block, 1000) == bytes(1000) for block in again)
        for block in again:
            fill(block, 1000, 8)
            FREE["Mem"](block)
    assert all(bytes_at(block, 1000) == b"\7" * 1000 for block in kept)
    for block in kept:
        FREE["Mem"](block)


def test_a_small_limit_of_addresses_is_a_memory_error_and_a_larger_one_is_kept() -> None:
    code = """
import resource
import arena
from objects_host import Host
from arena.objects import object_stats
host = Host()
resource.setrlimit(resource.RLIMIT_AS, (%d << 20, -1))
try:
    capture = host.begin()
except MemoryError as error:
    print(error)
else:
    kept = [bytes(1000) for _ in range(100_000)]
    print(object_stats().reserved <= %d << 18, object_stats().captured > 10**7)
    host.end(capture)
"""
    assert "limit of this process (ulimit -v)" in run(code % (32, 32)).stdout
    assert run(code % (1024, 1024)).stdout == "True True\n"


# ---------------------------------------------------------------- the module


def test_the_figures_are_those_of_the_header() -> None:
    header = (ROOT / "csrc/objects/register.h").read_text()
    names = re.findall(r"uint64_t (\w+);", header)
    assert list(objects.ObjectStats.__dataclass_fields__) == names


@pytest.mark.parametrize("without", ["", "1"])
def test_a_wheel_is_for_one_cpython_unless_it_is_built_without_objects(
    tmp_path: Path, without: str
) -> None:
    for name in ("arena", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))
        else:
            shutil.copy(source, tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=tmp_path,
        env={**os.environ, "ARENA_NO_OBJECTS": without, "ARENA_CFLAGS": "-O0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    modules = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    here = f"cp3{sys.version_info.minor}"
    if without:
        assert "-cp311-abi3-" in wheel.name
        assert modules == ["arena/_native.abi3.so"]
    else:
        assert f"-{here}-{here}-" in wheel.name
        assert sorted(name.partition(".")[0] for name in modules) == [
            "arena/_native",
            "arena/_objects",
        ]


def test_calls_through_lib_keep_the_gil() -> None:
    assert _objects.lib.arena_objects_gil_held() == 1


def test_a_host_of_another_version_is_refused(host: Host) -> None:
    stale = ctypes.addressof(ctypes.c_char.in_dll(host.lib, "stale_host"))
    with pytest.raises(ImportError, match="not of the same build"):
        connect(stale)


def test_another_host_hears_nothing_of_what_escaped_before(host: Host) -> None:
    with host.tick(), host.site(91):
        kept = [MALLOC["Mem"](1000), MALLOC["Mem"](100_000)]
    capture = host.begin()
    with pytest.raises(arena.ArenaError, match="of the host before"):
        connect(0)
    host.end(capture)
    connect(0)
    FREE["Mem"](kept.pop())
    with host.tick(), host.site(92):
        kept.append(MALLOC["Mem"](1000))
    connect(host.address)
    for block in kept:
        FREE["Mem"](block)
    assert len(host.of_site(91)) == 2  # it never heard of their end
    assert host.of_site(92) == []


@pytest.mark.as_ever
@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        ("sys.modules['arena._objects'] = None", "ARENA_NO_OBJECTS"),
        ("import arena.objects as o; o.__version__ = '0.0.9'", "its Python files are 0.0.9"),
        (
            "import sysconfig; sysconfig.get_config_var = lambda name: 1\n"
            "sys.modules['arena._objects'] = None",
            "does not work without the GIL",
        ),
    ],
)
def test_a_missing_or_stale_module_is_an_import_error_of_one_line(break_it: str, told: str) -> None:
    done = run(
        f"{break_it}\nfrom arena.objects import connect, object_stats\n"
        "print(object_stats().open_count)\nconnect(0)"
    )
    assert done.stdout == "0\n"
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert told in done.stderr.splitlines()[-1]

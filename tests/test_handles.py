"""Handles: Block and Str, views that pin, stale handles, and the persist variants."""

from __future__ import annotations

import copy
import ctypes
import gc
import operator
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

import arena

MAKERS: dict[str, Callable[[arena.Tick], arena.Block | arena.Str | arena.StrBuf]] = {
    "Block": lambda t: t.alloc(12),
    "Str": lambda t: t.strdup("twelve bytes"),
    "StrBuf": lambda t: t.strbuf("twelve bytes"),
}

USES: dict[str, Callable[..., object]] = {
    "str": str,
    "bytes": bytes,
    "len": len,
    "bool": bool,
    "memoryview": memoryview,
    "==": lambda h: h == "x",
    "!=": lambda h: h != b"x",
    "in": lambda h: "x" in h,
    "in as a byte": lambda h: 65 in h,
    "<": lambda h: h < "x",
    ">=": lambda h: h >= h,
    "iter": iter,
    "list": list,
    "reversed": lambda h: next(reversed(h)),
    "sorted": sorted,
    "[0]": lambda h: h[0],
    "[-1]": lambda h: h[-1],
    "[::2]": lambda h: h[::2],
    "[0] by its name": lambda h: type(h).__getitem__(h, 0),
    "[1:2]": lambda h: h[1:2],
    "persist": lambda h: h.persist(),
    "arena.persist": arena.persist,
    "free": lambda h: h.free(),
    "pickle": pickle.dumps,
    "pickle 0": lambda h: pickle.dumps(h, 0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "numpy": np.frombuffer,
    "append": lambda h: arena.strbuf_persist().append(h),
    "strdup": arena.strdup_persist,
    "format": format,
    "f-string": lambda h: f"{h}",
    "writelines": lambda h: arena.strbuf_persist().extend([h]),
    "slice assignment": lambda h: operator.setitem(bytearray(4), slice(0, 1), h),
    "struct": lambda h: struct.unpack_from("B", h),
    "bytearray": bytearray,
    "store": lambda h: arena.Store(key=h),
    "ctypes": lambda h: (ctypes.c_char * 1).from_buffer_copy(h),
}

ONLY: dict[str, dict[str, Callable[..., object]]] = {
    "Str": {"hash": hash},
    "Block": {"set": lambda h: h.__setitem__(0, 1)},
    "StrBuf": {
        "append": lambda h: h.append("x"),
        "write": lambda h: h.write("x"),
        "extend": lambda h: h.extend(["x"]),
        "extend with nothing": lambda h: h.extend([]),
        "extend with an empty piece": lambda h: h.extend([""]),
        "writelines with nothing": lambda h: h.writelines(iter(())),
        "join nothing": lambda h: h.join("", ()),
        "writelines": lambda h: h.writelines(["x"]),
        "join": lambda h: h.join(",", ["x"]),
        "+=": lambda h: h.__iadd__("x"),
        "clear": lambda h: h.clear(),
        "truncate": lambda h: h.truncate(1),
        "tell": lambda h: h.tell(),
        "flush": lambda h: h.flush(),
        "writable": lambda h: h.writable(),
        "readable": lambda h: h.readable(),
        "seekable": lambda h: h.seekable(),
        "isatty": lambda h: h.isatty(),
        "getvalue": lambda h: h.getvalue(),
        "getbuffer": lambda h: h.getbuffer(),
        "set": lambda h: h.__setitem__(0, 1),
        "set slice": lambda h: h.__setitem__(slice(0, 1), b"x"),
    },
}

CASES = [(kind, use) for kind in MAKERS for use in [*USES, *ONLY[kind]]]


def use_of(kind: str, use: str) -> Callable[..., object]:
    return {**USES, **ONLY[kind]}[use]


@pytest.mark.ends
@pytest.mark.parametrize(("kind", "use"), CASES)
def test_every_use_of_a_stale_handle_is_a_stale_error_that_names_the_tick(
    kind: str, use: str
) -> None:
    with arena.tick("over") as t:
        handle = MAKERS[kind](t)
    with pytest.raises(arena.StaleError) as caught:
        use_of(kind, use)(handle)
    assert f"this {kind} of 12 bytes belonged to tick 'over' (number {t.number})" in str(
        caught.value
    )
    assert isinstance(caught.value, ReferenceError)


@pytest.mark.parametrize(("kind", "use"), CASES)
def test_every_use_of_a_freed_handle_is_a_stale_error(kind: str, use: str) -> None:
    with arena.tick() as t:
        handle = MAKERS[kind](t).persist()
    handle.free()
    with pytest.raises(arena.StaleError, match=f"this {kind} of 12 bytes was freed"):
        use_of(kind, use)(handle)


@pytest.mark.ends
@pytest.mark.parametrize("kind", MAKERS)
def test_a_stale_handle_still_tells_what_it_was(kind: str) -> None:
    with arena.tick("over") as t:
        handle = MAKERS[kind](t)
        assert repr(handle).startswith(f"<arena.{kind} ")
        assert (handle.stale, handle.persisted, handle.nbytes) == (False, False, 12)
    assert repr(handle) == (
        f"<arena.{kind} of 12 bytes, stale: tick 'over' (number {t.number}) has ended>"
    )
    assert (handle.stale, handle.persisted, handle.nbytes) == (True, False, 12)


@pytest.mark.ends
@pytest.mark.parametrize("kind", MAKERS)
def test_an_iteration_yields_bytes_until_the_tick_ends(kind: str) -> None:
    with arena.tick() as t:
        handle = MAKERS[kind](t)
        assert list(handle) == list(bytes(handle))
        assert list(reversed(handle)) == list(reversed(bytes(handle)))
        iterator = iter(handle)
        assert next(iterator) == handle[0]
    with pytest.raises(arena.StaleError):
        next(iterator)


@pytest.mark.parametrize("kind", MAKERS)
def test_handles_are_made_by_ticks_only_and_cannot_be_subclassed(kind: str) -> None:
    cls = getattr(arena, kind)
    with pytest.raises(TypeError):
        cls()
    with pytest.raises(TypeError):
        object.__new__(cls)
    with pytest.raises(TypeError):
        type("Sub", (cls,), {})
    with pytest.raises(TypeError):
        cls.append = None


@pytest.mark.parametrize("kind", MAKERS)
def test_a_persisted_copy_outlives_the_tick_and_crosses_threads(kind: str) -> None:
    with arena.tick() as t:
        handle = MAKERS[kind](t)
        kept = handle.persist()
        again = arena.persist(kept)
        content = bytes(handle)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend([bytes(kept), kept == content]))
    thread.start()
    thread.join()
    assert seen == [content, True]
    assert type(kept) is type(handle)
    assert kept.persisted
    kept.free()
    assert bytes(again) == content


@pytest.mark.parametrize("kind", MAKERS)
def test_scratch_is_not_freed_by_hand(kind: str) -> None:
    with arena.tick("owner") as t:
        handle = MAKERS[kind](t)
        with pytest.raises(arena.TickError, match="goes when tick 'owner'"):
            handle.free()
        assert len(handle) == 12


@pytest.mark.parametrize("kind", MAKERS)
def test_persisted_memory_is_not_freed_while_a_view_lives(kind: str) -> None:
    with arena.tick() as t:
        handle = MAKERS[kind](t).persist()
    view = memoryview(handle)
    part = view[3:]
    view.release()
    with pytest.raises(BufferError, match="1 live view"):
        handle.free()
    content = bytes(part)
    part.release()
    assert content == bytes(handle)[3:]
    handle.free()


def test_persisted_memory_is_freed_when_its_handle_is_collected() -> None:
    before = arena.stats()
    handles = [arena.alloc_persist(1000), arena.strdup_persist("x" * 10), arena.strbuf_persist("y")]
    during = arena.stats()
    assert during.persisted_count == before.persisted_count + 3
    assert during.persisted >= before.persisted + 1011
    handles.clear()
    after = arena.stats()
    assert (after.persisted, after.persisted_count) == (before.persisted, before.persisted_count)


def test_persist_takes_text_and_bytes_too() -> None:
    assert arena.persist("é") == "é"
    assert bytes(arena.persist(b"\0\xff")) == b"\0\xff"
    with pytest.raises(TypeError):
        arena.persist(3)  # type: ignore[call-overload]


def test_a_block_is_zeroed_also_where_memory_is_used_again() -> None:
    for size in (1, 100, 5000, 40_000, 100_000, 5_000_000):
        for _ in range(3):
            with arena.tick() as t:
                block = t.alloc(size)
                assert not np.frombuffer(block, np.uint8).any()
                with memoryview(block) as view:
                    view[:] = b"\xff" * size
                buf = t.strbuf("z" * size)
                buf.truncate(0)


@pytest.mark.parametrize("alloc", [arena.alloc, arena.alloc_persist])
def test_impossible_sizes_are_clear_errors(alloc: Callable[[object], object]) -> None:
    with arena.tick() as t:
        for wrong in (-1, -(2**63), 2**63, 2**200):
            with pytest.raises(ValueError, match=r"size of a block is from 0 to \d+ bytes, not"):
                alloc(wrong)
        for huge in (2**62, 2**63 - 1, 2**63 - 64, 2**48):
            with pytest.raises(MemoryError):
                alloc(huge)
        for wrong_type in (1.5, "12", None, b"1"):
            with pytest.raises(TypeError, match="whole number of bytes"):
                alloc(wrong_type)
        assert len(alloc(0)) == 0  # type: ignore[arg-type]
        assert t.used == 0
        assert len(t.alloc(np.int64(3))) == 3


@pytest.mark.ends
def test_a_size_whose_index_method_ends_the_tick_is_an_error_and_no_crash() -> None:
    class Ends:
        def __index__(self) -> int:
            t.end()
            return 8

    t = arena.begin()
    with pytest.raises(arena.TickError, match="has ended already"):
        t.alloc(Ends())
    t = arena.begin()
    block = t.alloc(8)
    with pytest.raises(arena.StaleError):
        block[Ends()]
    t = arena.begin()
    block = t.alloc(8)
    with pytest.raises(arena.StaleError):
        block[0] = Ends()
    t = arena.begin()
    block = t.alloc(8)
    with pytest.raises(arena.StaleError):
        block[Ends() : 4]


def test_an_index_that_shrinks_the_buffer_is_an_index_error_and_no_crash() -> None:
    class Shrinks:
        def __index__(self) -> int:
            buf.clear()
            return 7

    with arena.tick() as t:
        buf = t.strbuf("content!")
        with pytest.raises(IndexError):
            buf[Shrinks()]
        buf.append("content!")
        with pytest.raises(IndexError):
            buf[Shrinks()] = 1
        buf.append("content!")
        assert buf[: Shrinks()] == b""


def test_flushing_a_stale_buffer_is_an_error_that_logging_forgives_at_the_exit() -> None:
    code = """
import arena, logging
with arena.tick() as t:
    logging.getLogger().addHandler(logging.StreamHandler(t.strbuf()))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    with arena.tick() as t:
        buf = t.strbuf()
    with pytest.raises(ValueError, match="has ended"):
        buf.flush()


def test_a_str_is_read_only_text_that_works_as_a_key() -> None:
    with arena.tick() as t:
        s = t.strdup("clé")
        assert (str(s), len(s), s[0], s[1:], "l" in s) == ("clé", 4, 99, "lé".encode(), True)
        assert {"clé": 1}[s] == 1  # type: ignore[index]
        assert s == t.strdup(b"cl\xc3\xa9")
        assert s != t.strdup("cle")
        raw = t.strdup(b"\xff\0")
        assert hash(raw) == hash(b"\xff\0")
        with pytest.raises(UnicodeDecodeError):
            str(raw)
        with pytest.raises(TypeError, match="read-only"):
            memoryview(s)[0] = 1
        with pytest.raises(TypeError):
            s[0] = 1  # type: ignore[index]


@pytest.mark.ends
@pytest.mark.parametrize("kind", MAKERS)
def test_views_keep_their_bytes_after_the_end_until_the_last_of_them_dies(kind: str) -> None:
    before = arena.stats()
    with arena.tick() as t:
        handle = MAKERS[kind](t)
        content = bytes(handle)
        view = memoryview(handle)
        part, cast = view[2:6], view.cast("I")
        array = np.frombuffer(handle, np.uint8)
        derived = array[4:].reshape(2, 4)
        view.release()
    for _ in range(20):  # whoever gets the next chunks writes over them
        with arena.tick() as t:
            memoryview(t.alloc(60_000))[:] = b"\xee" * 60_000
    during = arena.stats()
    assert (during.pinned_count, during.pinned) == (before.pinned_count + 1, 65536)
    assert bytes(part) == content[2:6]
    assert cast.tobytes() == content
    assert derived.tobytes() == content[4:]
    del part, cast, array
    assert arena.stats().pinned_count == before.pinned_count + 1
    assert derived.tobytes() == content[4:]
    del derived
    gc.collect()
    assert arena.stats().pinned_count == before.pinned_count
    assert handle.stale


@pytest.mark.ends
def test_ctypes_views_pin_too() -> None:
    with arena.tick() as t:
        array = (ctypes.c_char * 8).from_buffer(t.alloc(8))
        array[0:3] = b"abc"
    assert array.raw == b"abc\0\0\0\0\0"
    assert arena.stats().pinned_count == 1
    del array
    gc.collect()


@pytest.mark.ends
def test_a_view_in_a_cycle_pins_until_the_collector_finds_it() -> None:
    with arena.tick() as t:
        cycle: list[object] = [memoryview(t.strdup("cycle"))]
        cycle.append(cycle)
    assert arena.stats().pinned_count == 1
    del cycle
    gc.collect()
    assert arena.stats().pinned_count == 0


@pytest.mark.ends
def test_a_view_may_cross_threads_and_outlive_the_one_that_made_it() -> None:
    views: list[memoryview] = []

    def work() -> None:
        with arena.tick() as t:
            views.append(memoryview(t.strdup("from another thread")))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert bytes(views[0]) == b"from another thread"
    assert arena.stats().pinned_count == 1
    views.clear()
    assert arena.stats().pinned_count == 0


@pytest.mark.ends
def test_a_view_of_an_oversize_block_pins_just_that_mapping() -> None:
    with arena.tick() as t:
        t.alloc(100)
        view = memoryview(t.alloc(8 << 20))
    pinned = arena.stats().pinned
    assert 8 << 20 <= pinned <= (8 << 20) + 8192
    view.release()
    assert arena.stats().pinned == 0


def test_memory_that_cannot_be_had_is_a_memory_error_that_leaves_all_as_it_was() -> None:
    with arena.tick() as t:
        buf = t.strbuf("content")
        other = t.strdup("other")
        used = t.used
        for huge in (2**47, 2**62):
            with pytest.raises(MemoryError):
                t.alloc(huge)
        assert (t.used, str(buf), str(other)) == (used, "content", "other")
        buf.append(" goes on")
        assert buf == "content goes on"


def test_memory_that_is_not_to_be_had_says_how_much_was_asked_for() -> None:
    with arena.tick() as t, pytest.raises(MemoryError, match=f"{2**62} bytes requested"):
        t.alloc(2**62)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda h: h["x"], TypeError, "an index is a whole number or a slice, not str"),
        (lambda h: h[1.0], TypeError, "an index is a whole number or a slice, not float"),
        (lambda h: h.__setitem__(0, "x"), TypeError, "a byte is a whole number from 0 to 255, not"),
        (lambda h: h.__setitem__("x", 1), TypeError, "an index is a whole number or a slice"),
        (lambda h: h.__delitem__(0), TypeError, r"a StrBuf is cut by truncate\(\)"),
        (lambda h: 2**64 in h, ValueError, "a byte is from 0 to 255"),
        (lambda h: -1 in h, ValueError, "a byte is from 0 to 255"),
    ],
)
def test_a_wrong_index_or_byte_says_what_is_expected(
    use: Callable[[object], object], error: type[Exception], message: str
) -> None:
    with arena.tick() as t, pytest.raises(error, match=message):
        use(t.alloc(4))

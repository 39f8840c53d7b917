"""What is left of memory that ended: zeros, or what the debug dial shows to who kept a pointer."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

import arena

SECRET = b"a secret that must not stay"


@pytest.fixture(autouse=True)
def dial_is_off() -> Iterator[None]:
    yield
    arena.debug(fill=False, noreuse=False, guard=False)


def address_of(handle: arena.Block | arena.StrBuf) -> int:
    """Return where the bytes lie: what a C library keeps that should not."""
    with memoryview(handle) as view:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))


def checked() -> bool:
    """Whether a memory checker forbids to look at ended memory, as the tests here do."""
    return "libasan" in os.environ.get("LD_PRELOAD", "") or "valgrind" in os.environ.get(
        "LD_PRELOAD", ""
    )


looks_at_ended_memory = pytest.mark.skipif(checked(), reason="a memory checker runs this process")


@looks_at_ended_memory
@pytest.mark.parametrize("wipe", [True, False])
def test_a_wiped_tick_leaves_zeros(wipe: bool) -> None:
    arena.debug(noreuse=True)  # what is looked at below stays mapped, whatever ran before
    with arena.tick(wipe=wipe) as t:
        assert t.wipe is wipe
        block = t.alloc(1000)
        block[100 : 100 + len(SECRET)] = SECRET
        buf = t.strbuf()
        moved = []
        for _ in range(200):
            buf.append(SECRET)
            t.alloc(16)  # in the way: the buffer moves and leaves copies
            moved.append(address_of(buf))
        at = address_of(block)
    arena.debug(noreuse=False)
    left = [ctypes.string_at(at + 100, len(SECRET))]
    left += [ctypes.string_at(where, len(SECRET)) for where in set(moved)]
    assert len(left) > 3
    if wipe:
        assert set(left) == {bytes(len(SECRET))}
    else:
        assert SECRET in left


@looks_at_ended_memory
def test_a_pinned_chunk_is_wiped_when_its_last_view_dies_and_not_before() -> None:
    arena.debug(noreuse=True)  # so that there is something to look at
    with arena.tick(wipe=True) as t:
        buf = t.strbuf(SECRET)
        first, second = memoryview(buf), memoryview(buf)[2:8]
        at = address_of(buf)
    first.release()
    assert bytes(second) == SECRET[2:8]
    assert ctypes.string_at(at, len(SECRET)) == SECRET
    second.release()
    assert ctypes.string_at(at, len(SECRET)) == bytes(len(SECRET))


def test_wipe_is_an_option_of_every_form_of_a_tick() -> None:
    seen: list[bool] = []

    @arena.tick("f", wipe=True)
    def wiped() -> None:
        current = arena.current()
        assert current is not None
        seen.append(current.wipe)

    wiped()
    t = arena.begin(wipe=True)
    seen.append(t.wipe)
    t.end()
    seen.extend(t.wipe for t in arena.ticks(0, wipe=True, count=1))
    seen.append(arena.tick().wipe)
    assert seen == [True, True, True, False]
    for wrong in (1, "yes", None):
        with pytest.raises(TypeError, match="wipe is True or False"):
            arena.tick(wipe=wrong)  # type: ignore[call-overload]


@pytest.mark.ends
@looks_at_ended_memory
def test_fill_overwrites_what_has_ended() -> None:
    assert arena.debug(fill=True) == arena.Debug(fill=True, noreuse=False, guard=False)
    with arena.tick() as t:
        at = address_of(t.strbuf(SECRET))
    assert ctypes.string_at(at, len(SECRET)) == b"\xdd" * len(SECRET)
    with arena.tick() as t:
        assert bytes(t.alloc(100)) == bytes(100)  # and yet a block is zeroed
    arena.debug(fill=False)
    with arena.tick() as t:
        at = address_of(t.strbuf(SECRET))
    assert ctypes.string_at(at, len(SECRET)) == SECRET


@pytest.mark.ends
@looks_at_ended_memory
def test_noreuse_keeps_ended_memory_as_it_was_for_good() -> None:
    arena.debug(noreuse=True)
    before = arena.stats()
    kept = []
    for i in range(50):
        with arena.tick() as t:
            kept.append((address_of(t.strbuf(SECRET + b"%d" % i)), SECRET + b"%d" % i))
    assert all(ctypes.string_at(at, len(text)) == text for at, text in kept)
    now = arena.stats()
    assert now.retired - before.retired == 50 * 65536
    assert (now.cached, now.chunks) == (0, before.chunks)


def run(code: str, dial: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env={**os.environ, "ARENA_DEBUG": dial},
        capture_output=True,
        text=True,
        timeout=60,
    )


TOUCH = """
import ctypes, arena
with arena.tick("touched") as t:
    block = t.alloc({size})
    with memoryview(block) as view:
        at = ctypes.addressof(ctypes.c_char.from_buffer(view))
    ctypes.memset(at, 1, {size})
    print("alive", flush=True)
    {inside}
def culprit():
    ctypes.memset(at + {offset}, 1, 1)
{after}
print("unharmed")
"""


@pytest.mark.ends
@pytest.mark.parametrize(
    ("size", "offset", "inside", "after", "dial"),
    [
        (100, 50, "pass", "culprit()", "guard"),
        (100, 50, "pass", "culprit()", "fill,noreuse,guard"),
        (5_000_000, 2_000_000, "pass", "culprit()", "guard"),
        (
            5_000_000,
            0,
            "ctypes.memset(at + 5_000_000 + 15, 1, 1)",
            "pass",
            "guard",
        ),
    ],
)
def test_a_guard_stops_c_code_at_the_culprit_and_faulthandler_names_the_line(
    size: int, offset: int, inside: str, after: str, dial: str
) -> None:
    code = TOUCH.format(size=size, offset=offset, inside=inside, after=after)
    done = run(code, dial)
    assert done.stdout == "alive\n"
    assert done.returncode == -signal.SIGSEGV
    line = 1 + code.splitlines().index(
        "    ctypes.memset(at + 5_000_000 + 15, 1, 1)"
        if after == "pass"
        else f"    ctypes.memset(at + {offset}, 1, 1)"
    )
    assert f'File "<string>", line {line} in' in done.stderr
    if size == 100 or after == "pass":  # ended oversize memory is gone without a guard, too
        assert run(code.replace("+ 15, 1, 1)", "- 15, 1, 1)"), "").stdout.endswith("unharmed\n")


@pytest.mark.ends
def test_under_a_guard_handles_raise_and_views_stay_readable_as_ever() -> None:
    arena.debug(guard=True)
    views = []
    for size in (10, 70_000, 3_000_000, 9_000_000):
        with arena.tick() as t:
            block, buf = t.alloc(size), t.strbuf(b"x" * size)
            block[size - 1] = 7
            views += [(memoryview(block), 7), (memoryview(buf), ord("x"))]
            buf = t.strbuf()
            for _ in range(30):
                buf.append(b"y" * (size // 10))
            assert len(buf) == size // 10 * 30
        with pytest.raises(arena.StaleError):
            bytes(block)
        assert all(view[-1] == last for view, last in views)
    for view, _ in views:
        view.release()
    assert arena.stats().pinned == 0


def test_the_dial_reports_turns_and_refuses() -> None:
    off = arena.Debug(fill=False, noreuse=False, guard=False)
    assert arena.debug() == off
    assert arena.debug(fill=True, guard=True) == arena.Debug(fill=True, noreuse=False, guard=True)
    assert arena.debug(guard=False) == arena.Debug(fill=True, noreuse=False, guard=False)
    for wrong in (1, "on", []):
        with pytest.raises(TypeError, match="fill is True, False or None"):
            arena.debug(fill=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        arena.debug(True)  # type: ignore[misc]
    assert arena.debug() == arena.Debug(fill=True, noreuse=False, guard=False)
    assert arena.debug(fill=False) == off


@pytest.mark.parametrize(
    "words", ["f", "fill guard", "fill,", "fill, ", "sites=", "sites=x", "a=1", "\udcff"]
)
def test_words_in_the_environment_that_make_no_sense_are_an_import_error_of_one_line(
    words: str,
) -> None:
    done = run("import arena", words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ARENA_DEBUG=")
    assert "it takes fill, noreuse and guard" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "arena", "demo"],
        env={**os.environ, "ARENA_DEBUG": words},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "ARENA_DEBUG" in done.stderr


def test_the_environment_sets_the_start() -> None:
    for words, expected in (
        ("fill,noreuse", "True True False"),
        (" fill , noreuse ", "True True False"),
        ("guard", "False False True"),
        ("", "False False False"),
    ):
        code = "import arena; d = arena.debug(); print(d.fill, d.noreuse, d.guard)"
        assert run(code, words).stdout.strip() == expected


@looks_at_ended_memory
def test_ticks_begun_in_a_wiped_one_are_wiped_too() -> None:
    with arena.tick(wipe=True) as outer, arena.tick() as inner:
        assert (outer.wipe, inner.wipe) == (True, True)
        at = address_of(inner.strbuf(SECRET))
    assert ctypes.string_at(at, len(SECRET)) == bytes(len(SECRET))
    with arena.tick() as after:
        assert not after.wipe


def test_sites_in_the_dial_are_the_depth_of_a_trace() -> None:
    code = (
        "import arena; d = arena.debug(); "
        "print(d.fill, d.noreuse, d.guard, arena._native.lib.arena_tracing())"
    )
    done = run(code, "fill,noreuse,guard,sites=8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True True 8\n", "")

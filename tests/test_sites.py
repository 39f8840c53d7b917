"""Where memory comes from, what a stale handle says, and the rows that the native module records.

The places are looked up by their text: ``line("text")`` is the number of the line of this file that
ends in the comment ``# text``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import arena
from arena import _decorate, _native
from arena._native import lib

pytestmark = pytest.mark.as_ever  # each test says itself what is recorded
HERE = __file__
ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def line(text: str) -> int:
    """Return the line of this file that ends in ``# text``."""
    found = [
        number
        for number, content in enumerate(linecache.getlines(HERE), 1)
        if content.rstrip().endswith("# " + text)
    ]
    assert len(found) == 1, (text, found)
    return found[0]


def rows(kind: str, at: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a kind, from that line of this file."""
    return [
        row
        for row in _native._rows()
        if row["kind"] == kind
        and (at is None or (row["site"] and row["site"][0][0] == HERE and row["site"][0][2] == at))
    ]


def one(kind: str, at: int) -> dict[str, Any]:
    """Return the only row of a kind from that line."""
    (row,) = rows(kind, at)
    return row


@pytest.fixture(autouse=True)
def no_audit_unless_asked_for() -> Iterator[None]:
    """Start each test with nothing recorded."""
    with arena.audit(None), arena.trace(0):
        yield


# ---- Stale errors --------------------------------------------------------------------------------


def test_a_stale_error_says_where_it_was_allocated_and_where_its_tick_began_and_ended() -> None:
    with arena.trace():
        t = arena.begin("mind")  # began here
        text = t.strdup("x")  # allocated here
        t.end()  # ended here
        with arena.tick():
            pass
        with pytest.raises(arena.StaleError) as caught:
            bytes(text)
    said = str(caught.value)
    name = "test_a_stale_error_says_where_it_was_allocated_and_where_its_tick_began_and_ended"
    assert "belonged to tick 'mind'" in said
    assert "has ended, 1 tick ago" in said
    assert f"allocated at {HERE}:{line('allocated here')} in {name}" in said
    assert f"began at {HERE}:{line('began here')} in {name}" in said
    assert f"ended at {HERE}:{line('ended here')} in {name}" in said


def test_a_stale_error_says_how_many_ticks_ago_also_when_nothing_is_recorded() -> None:
    with arena.tick() as t:
        text = t.strdup("x")
    for _ in range(3):
        with arena.tick():
            pass
    with pytest.raises(arena.StaleError, match="3 ticks ago") as caught:
        bytes(text)
    assert "allocated at" not in str(caught.value)


def deep(t: arena.Tick, levels: int) -> arena.Str:
    """Allocate some calls further down."""
    return t.strdup("deep") if not levels else deep(t, levels - 1)


@pytest.mark.parametrize("depth", [1, 2, 8, 32])
def test_a_site_has_as_many_frames_as_asked_for(depth: int) -> None:
    with arena.tick(trace=depth) as t:
        text = deep(t, 40)
    with pytest.raises(arena.StaleError) as caught:
        str(text)
    allocated = str(caught.value).partition("allocated at")[2].partition("its tick began")[0]
    assert allocated.count(" in deep") == depth
    assert allocated.count("called from") == depth - 1
    assert arena.stats().ticks_open == 0


def test_own_files_are_no_sites_but_who_called_them_is() -> None:
    store = arena.Store()
    with arena.trace():
        with arena.tick("t"):
            store["key"] = "value"  # put here
        for tick in arena.ticks(0, "loop", count=1):  # the loop
            text = tick.strdup("x")
    (row,) = rows("persist", line("put here"))
    assert row["count"] == 1
    with pytest.raises(arena.StaleError, match=rf"began at {HERE}:{line('the loop')} in"):
        str(text)


@pytest.mark.parametrize("depth", range(1, 12))
def test_a_stack_may_be_shorter_than_the_depth_and_end_in_own_frames(depth: int) -> None:
    """In a thread of its own the stack is short; `ticks` is arena's own and in the middle of it."""
    kept: list[arena.Str] = []

    def turn() -> None:
        kept.append(arena.strdup_persist("x"))  # a short stack

    def run() -> None:
        _decorate.decorate(turn, "short", {"trace": depth})()

    before = sum(row["count"] for row in rows("persist", line("a short stack")))
    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    found = rows("persist", line("a short stack"))
    assert sum(row["count"] for row in found) == before + 1
    assert all("arena/_decorate" not in frame[0] for row in found for frame in row["site"])
    assert max(len(row["site"]) for row in found) <= 11
    kept.clear()


def test_sites_in_a_task_a_thread_a_generator_and_a_comprehension() -> None:
    kept: list[arena.Str] = []

    def generator(t: arena.Tick) -> Iterator[arena.Str]:
        yield t.strdup("x")  # in a generator

    async def task() -> None:
        with arena.tick("task") as t:
            await asyncio.sleep(0)
            kept.append(t.strdup("x"))  # in a task

    def thread() -> None:
        with arena.tick("thread") as t:
            kept.extend(t.strdup("x") for _ in range(1))  # in a comprehension

    with arena.trace():
        asyncio.run(task())
        worker = threading.Thread(target=thread)
        worker.start()
        worker.join()
        with arena.tick("generator") as t:
            kept.extend(generator(t))
        for place in ("in a task", "in a comprehension", "in a generator"):
            assert one("stale", line(place))["count"] == 1, place


# ---- Rows ----------------------------------------------------------------------------------------


def test_off_records_nothing() -> None:
    with arena.tick() as t:
        kept = [t.strdup("x"), arena.strdup_persist("x")]  # not recorded
    assert not rows("stale", line("not recorded"))
    assert not rows("persist", line("not recorded"))
    del kept


def test_persisted_rows_are_exact_and_return_to_zero() -> None:
    with arena.trace(), arena.tick("name"):
        kept = [arena.strdup_persist("x" * n) for n in (10, 20)]  # two
        block = arena.alloc_persist(100)  # a block
        buf = arena.strbuf_persist("abc")  # a buffer
        copies = [arena.tick for _ in ()]
    assert copies == []
    row = one("persist", line("two"))
    assert (row["count"], row["bytes"], row["count_ever"], row["bytes_ever"]) == (2, 30, 2, 30)
    assert row["tick"] == "name"
    assert row["first"] == row["last"] > 0
    assert row["age"] > 0
    assert row["example"] == "<arena.Str 'xxxxxxxxxx' of 10 bytes, persisted>"
    assert one("persist", line("a block"))["bytes"] == 100
    before = one("persist", line("a buffer"))
    assert before["count"] == 1
    buf.extend(["y" * 10_000])  # grows where nothing is recorded any more
    after = one("persist", line("a buffer"))
    assert after["bytes"] >= 10_003 > before["bytes"] >= 3
    kept[0].free()
    assert one("persist", line("two"))["bytes"] == 20
    del kept, block, buf
    for place in ("two", "a block", "a buffer"):
        row = one("persist", line(place))
        assert (row["count"], row["bytes"], row["age"]) == (0, 0, 0.0)
        assert row["count_ever"] > 0


def test_a_persist_call_and_what_a_handle_persists_are_told_apart() -> None:
    with arena.trace(), arena.tick() as t:
        a = t.strdup("abc").persist()  # the method
        b = arena.persist(t.strbuf("abcd"))  # the function
        c = arena.persist("abcde")  # of text
    assert [
        one("persist", line(at))["count"] for at in ("the method", "the function", "of text")
    ] == [
        1,
        1,
        1,
    ]
    del a, b, c


def test_a_pin_is_the_line_that_took_the_view() -> None:
    with arena.trace(), arena.tick("pins") as t:
        block = t.alloc(100)  # not the pin
        first = memoryview(block)  # first view
        second = memoryview(block)  # second view
        gone = memoryview(block)  # released in time
        gone.release()
    chunk = one("pin", line("first view"))
    assert (chunk["count"], chunk["bytes"]) == (1, arena.stats().pinned)
    assert (one("pin", line("second view"))["bytes"], rows("pin", line("released in time"))) == (
        0,
        [],
    )
    first.release()
    assert one("pin", line("first view"))["count"] == 0
    assert one("pin", line("second view"))["bytes"] == arena.stats().pinned > 0
    second.release()
    assert one("pin", line("second view"))["bytes"] == 0
    assert one("stale", line("not the pin"))["count"] == 1  # now nothing but the variable holds it
    del block
    assert one("stale", line("not the pin"))["count"] == 0


def test_a_handle_that_only_its_view_holds_is_a_pin_and_no_stale_handle() -> None:
    with arena.trace(), arena.tick() as t:
        view = memoryview(t.alloc(10))  # held by its view
    assert one("pin", line("held by its view"))["count"] == 1
    assert not rows("stale", line("held by its view"))
    view.release()
    assert not rows("stale", line("held by its view"))


def test_a_loop_variable_is_no_escape_and_a_growing_list_is() -> None:
    kept = []
    with arena.trace():
        for _ in range(20):
            with arena.tick("loop") as t:
                text = t.strdup("variable")  # loop variable
                kept.append(t.strdup("kept"))  # growing list
        del text
    grown = one("stale", line("growing list"))
    assert (grown["count"], grown["bytes"]) == (20, 80)
    lows = [low for _, low in grown["history"]]
    assert lows == sorted(lows)
    assert not rows("stale", line("loop variable"))
    kept.clear()
    assert one("stale", line("growing list"))["count"] == 0


def test_stale_uses_are_counted_with_both_places() -> None:
    with arena.trace(), arena.tick("used") as t:
        buf = t.strbuf("x")  # made here
    with arena.trace():
        for use in (str, bytes, len, lambda b: b.append("y"), memoryview):
            with pytest.raises(arena.StaleError):
                use(buf)  # used here
    row = one("stale", line("made here"))
    assert row["uses"] == 5
    assert row["used"][0][0] == HERE
    assert row["tick"] == "used"
    del buf
    assert one("stale", line("made here"))["count"] == 0
    assert one("stale", line("made here"))["uses"] == 5


def test_strays_of_cffi_users_have_the_line_of_the_call() -> None:
    with arena.trace():
        stray = lib.arena_strdup(_native.ffi.NULL, b"stray")  # a stray
        kept = lib.arena_strdup_persist(b"kept")  # by cffi
    assert one("stray", line("a stray"))["bytes"] == 6
    assert one("persist", line("by cffi"))["bytes"] == 5
    lib.arena_free_persist(stray)
    lib.arena_free_persist(kept)
    assert one("stray", line("a stray"))["bytes"] == 0


def test_a_secret_is_not_shown() -> None:
    with arena.trace(), arena.tick(wipe=True) as t:
        secret = t.strdup("swordfish")  # secret
        kept = secret.persist()  # kept secret
    shown = [row["example"] for at in ("secret", "kept secret") for row in rows("stale", line(at))]
    shown += [row["example"] for row in rows("persist", line("kept secret"))]
    assert len(shown) == 2
    assert not [text for text in shown if "swordfish" in text]
    del secret, kept


def test_threads_record_at_once_and_the_counts_are_exact() -> None:
    kept: list[list[arena.Str]] = [[] for _ in range(8)]

    def work(mine: list[arena.Str]) -> None:
        for _ in range(200):
            with arena.tick("many"):
                mine.append(arena.strdup_persist("12345"))  # by threads

    with arena.trace(4):
        threads = [threading.Thread(target=work, args=(mine,)) for mine in kept]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = rows("persist", line("by threads"))
    assert sum(row["count"] for row in found) == 1600
    assert sum(row["bytes"] for row in found) == 8000
    kept.clear()
    gc.collect()
    assert sum(row["bytes"] for row in rows("persist", line("by threads"))) == 0


def test_many_lines_are_as_many_sites() -> None:
    """More than the recorder remembers at once, so that some of them share a place there."""
    count = 3000
    source = "\n".join(["def many(keep, copy):", *["    keep(copy('x'))"] * count])
    names: dict[str, Any] = {}
    exec(compile(source, "many.py", "exec"), names)
    kept: list[arena.Str] = []
    with arena.trace():
        for _ in range(2):
            names["many"](kept.append, arena.strdup_persist)
    found = {
        row["site"][0][2]: row["count"]
        for row in _native._rows()
        if row["kind"] == "persist" and row["site"] and row["site"][0][0] == "many.py"
    }
    assert found == dict.fromkeys(range(2, count + 2), 2)


def test_code_that_is_made_for_ever_ends_in_rows_without_a_site() -> None:
    code = textwrap.dedent(
        """
        import arena
        from arena import _decorate, _native
        arena.trace()
        kept = []
        for n in range(17_000):
            exec(compile("kept.append(arena.strdup_persist('x'))", f"made-{n}", "exec"))
        rows = [row for row in _native._rows() if row["kind"] == "persist"]
        assert sum(row["count"] for row in rows) == 17_000
        unknown = [row for row in rows if not row["site"]]
        print(len(unknown), unknown[0]["count"] > 0, len(rows) < 8200)
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 True True\n", "")


def test_a_child_goes_on_with_the_rows_of_its_parent() -> None:
    with arena.trace(), arena.tick("forks"):
        kept = arena.strdup_persist("x")  # before the fork
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                kept.free()
                mine = arena.strdup_persist("xy")  # in the child
                assert one("persist", line("before the fork"))["count"] == 0
                assert one("persist", line("in the child"))["bytes"] == 2
                mine.free()
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert one("persist", line("before the fork"))["count"] == 1
    kept.free()


# ---- Switches ------------------------------------------------------------------------------------


def test_trace_is_a_switch_and_a_context_manager() -> None:
    assert lib.arena_tracing() == 0
    with arena.trace(3) as outer:
        assert (outer.depth, lib.arena_tracing()) == (3, 3)
        with arena.trace(0):
            assert lib.arena_tracing() == 0
        assert lib.arena_tracing() == 3
    assert lib.arena_tracing() == 0
    assert repr(arena.trace(0)) == "<arena.trace: off>"


@pytest.mark.parametrize("depth", [-1, 33, 10**30])
def test_a_depth_out_of_range_is_a_value_error(depth: int) -> None:
    for call in (lambda: arena.trace(depth), lambda: arena.tick(trace=depth)):
        with pytest.raises(ValueError, match="frames from 0 to 32"):
            call()
    assert lib.arena_tracing() == 0


@pytest.mark.parametrize("depth", ["1", 1.0, None, True])
def test_a_depth_of_the_wrong_type_is_a_type_error(depth: Any) -> None:
    for call in (lambda: arena.trace(depth), lambda: arena.tick(trace=depth)):
        with pytest.raises(TypeError, match="frames from 0 to 32"):
            call()


def test_a_tick_that_records_by_itself_leaves_the_others_alone() -> None:
    with arena.tick("alone", trace=2) as t:
        assert t.trace == 2
        mine = t.strdup("x")  # in the tick that records
        with arena.tick("inner") as inner:
            assert inner.trace == 0
            other = inner.strdup("x")  # in one that does not
        kept = arena.strdup_persist("x")  # persisted in it
    assert one("stale", line("in the tick that records"))["count"] == 1
    assert one("persist", line("persisted in it"))["count"] == 1
    assert not rows("stale", line("in one that does not"))
    before = sum(row["count_ever"] for row in _native._rows())
    with arena.tick():
        late = arena.strdup_persist("x")
    assert sum(row["count_ever"] for row in _native._rows()) == before
    del mine, other, kept, late


def test_the_options_go_through_decorators_and_loops() -> None:
    @arena.tick("decorated", trace=2)
    def decorated() -> int:
        current = arena.current()
        assert current is not None
        return current.trace

    assert decorated() == 2
    assert [t.trace for t in arena.ticks(0, count=2, trace=5)] == [5, 5]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ARENA_TRACE", "many", "a number of frames from 0 to 32"),
        ("ARENA_TRACE", "33", "a number of frames from 0 to 32"),
        ("ARENA_AUDIT", "yes", "1 \\(256 MiB\\), 0, or a number of bytes"),
        ("ARENA_AUDIT", "-1", "1 \\(256 MiB\\), 0, or a number of bytes"),
        ("ARENA_OBJECTS", "2", "it takes 0 or 1"),
        ("ARENA_DEBUG", "sites=99", "sites=DEPTH"),
    ],
)
def test_an_environment_that_makes_no_sense_is_an_import_error(
    name: str, value: str, says: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import arena"],
        env={**os.environ, name: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(last)


# ---- Audit ---------------------------------------------------------------------------------------


def test_under_an_audit_stale_handles_work_and_are_recorded() -> None:
    with arena.audit():
        assert lib.arena_tracing() == 1
        with arena.tick("audited") as t:
            block = t.alloc(4)  # audited block
            text = t.strdup("text")  # audited text
            buf = t.strbuf("buf")  # audited buffer
        assert (block.stale, text.stale, buf.stale) == (True, True, True)
        block[0] = 1
        assert bytes(block) == b"\1\0\0\0"  # read late
        assert (str(text), hash(text), text == "text", text[1:3]) == (
            "text",
            hash("text"),
            True,
            b"ex",
        )
        used = t.used
        buf += "fer"
        buf.extend(["x" * 200_000])
        assert t.used == used  # it counts for nobody any more
        assert buf.tell() == 200_006
        assert "buffer" in str(buf)
        assert repr(text) == "<arena.Str 'text' of 4 bytes, " + repr(text).partition("bytes, ")[2]
        assert "stale" in repr(text)
        assert arena.stats().quarantined > 200_000
        assert arena.stats().scratch == 0
    assert one("stale", line("audited block"))["used"][0][2] == line("read late")
    assert one("stale", line("audited block"))["uses"] == 2
    assert one("stale", line("audited text"))["uses"] >= 4
    assert one("stale", line("audited buffer"))["uses"] >= 4
    # It is over with the block: what was kept has gone.
    assert arena.stats().quarantined == 0
    with pytest.raises(arena.StaleError):
        bytes(block)


def test_past_the_budget_a_stale_handle_is_an_error_as_ever_oldest_first() -> None:
    kept = []
    with arena.audit("1 MiB"):
        for n in range(40):
            with arena.tick() as t:
                kept.append(t.strdup(f"{n}" + "x" * 50_000))
        assert arena.stats().quarantined <= 1 << 20
        with pytest.raises(arena.StaleError):
            str(kept[0])
        assert str(kept[-1]).startswith("39x")
        gone = [n for n, text in enumerate(kept) if not _readable(text)]
        assert gone == list(range(len(gone)))
        assert 0 < len(gone) < 40
        kept.clear()
        assert arena.stats().quarantined <= 65_536  # what the context variable holds


def _readable(text: arena.Str) -> bool:
    try:
        bytes(text)
    except arena.StaleError:
        return False
    return True


def test_what_no_handle_reaches_is_not_kept() -> None:
    with arena.audit():
        for _ in range(100):
            with arena.tick() as t:
                t.alloc(60_000)
        assert arena.stats().quarantined <= 65_536


def test_an_audit_keeps_no_secret() -> None:
    with arena.audit():
        with arena.tick(wipe=True) as t:
            secret = t.strdup("swordfish")
        assert arena.stats().quarantined == 0
        with pytest.raises(arena.StaleError):
            str(secret)


def test_views_of_what_an_audit_keeps_pin_it_when_it_goes() -> None:
    with arena.audit():
        with arena.tick("kept") as t:
            text = t.strdup("text")  # viewed late
        view = memoryview(text)  # late view
        assert bytes(view) == b"text"
        assert arena.stats().pinned == 0
    assert bytes(view) == b"text"
    assert arena.stats().pinned == one("pin", line("late view"))["bytes"] > 0
    view.release()
    assert arena.stats().pinned == one("pin", line("late view"))["bytes"] == 0


def test_a_tick_that_has_ended_takes_no_allocations_under_an_audit_either() -> None:
    with arena.audit():
        with arena.tick("over") as t:
            t.strdup("x")
        for call in (t.strbuf, lambda: t.alloc(1), t.end):
            with pytest.raises(arena.TickError, match="ended"):
                call()
        assert arena.current() is None


def test_escapes_are_errors_under_an_audit_too() -> None:
    with arena.audit(), pytest.raises(arena.EscapeError), arena.tick(escapes="raise") as t:
        view = memoryview(t.alloc(1))
    view.release()


def test_another_thread_may_use_what_an_audit_keeps() -> None:
    read = []
    with arena.audit():
        with arena.tick() as t:
            text = t.strdup("text")
        worker = threading.Thread(target=lambda: read.append(str(text)))
        worker.start()
        worker.join()
    assert read == ["text"]


def test_limits_hold_around_what_an_audit_keeps() -> None:
    with arena.audit(), arena.tick("outer", limit=1000) as outer:
        with arena.tick("middle") as middle:
            kept = middle.strdup("x" * 400)
            inner = arena.begin("inner")
        inner.alloc(900)
        with pytest.raises(arena.LimitError):
            inner.alloc(101)
        inner.end()
        outer.alloc(1000)
        assert str(kept) == "x" * 400


def test_a_wrapped_loop_runs_unharmed_while_the_map_fills() -> None:
    history: list[arena.StrBuf] = []
    with arena.audit():
        for n in range(10):
            with arena.tick("turn") as t:
                log = t.strbuf()  # the log
                log.append(f"turn {n}")
                history.append(log)
                # What the code did before it was wrapped: it goes on with what is over.
                said = "; ".join(str(one) for one in history)
        assert said == "; ".join(f"turn {n}" for n in range(10))
        row = one("stale", line("the log"))
        assert (row["count"], row["uses"]) == (10, 45)


@pytest.mark.parametrize(
    ("budget", "error"), [(-1, ValueError), ("x", ValueError), (1.5, TypeError)]
)
def test_a_budget_that_is_none_is_an_error(budget: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        arena.audit(budget)
    assert lib.arena_audit_now() == 0


# ---- What fits no more, and what is at the edge --------------------------------------------------


def test_places_beyond_the_table_are_counted_together_and_those_that_emptied_make_room() -> None:
    code = textwrap.dedent(
        """
        import arena
        arena.trace()
        kept = []
        body = "".join(f"    keep(t.strdup('a').persist())\\n" for _ in range(12))
        names = {"keep": kept.append}
        exec(compile("def fill(t):\\n" + body, "filled", "exec"), names)
        for n in range(1000):
            with arena.tick(f"request {n}") as t:
                names["fill"](t)
        rows = [row for row in arena.escapes() if row.kind == "persist"]
        assert sum(row.count for row in rows) == len(kept) == 12_000
        assert [row.count > 0 for row in rows if row.tick == "(others)" and not row.site] == [True]
        kept.clear()
        assert sum(row.count + row.bytes for row in arena.escapes()) == 0
        with arena.tick("late") as t:
            kept.append(t.strdup("late").persist())
        (row,) = [row for row in arena.escapes() if row.count]
        assert (row.tick, row.site[0].file) == ("late", "<string>"), row
        try:
            arena.assert_no_growth(lambda: kept.append(arena.strdup("leak").persist()))
        except arena.GrowthError:
            print("fine")
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_the_budget_holds_for_what_a_stale_buffer_grows_by() -> None:
    with arena.audit("1 MiB"):
        with arena.tick() as t:
            buf = t.strbuf("x")
        with pytest.raises(arena.StaleError):
            for _ in range(100):
                buf.append("y" * 100_000)
        assert arena.stats().quarantined <= 1 << 20


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS"])
def test_a_signal_that_somebody_sent_ends_the_process_under_an_audit_too(name: str) -> None:
    code = f"import arena, os, signal; arena.audit(); os.kill(os.getpid(), signal.{name}); print(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-getattr(signal, name), "")


def test_c_ticks_that_an_audit_kept_are_counted_as_unmapped() -> None:
    null = _native.ffi.NULL
    with arena.audit("1 MiB"):
        lib.arena_trim(0)
        before = arena.stats()
        for _ in range(100):
            tick = lib.arena_begin(null)
            lib.arena_alloc(tick, 10)
            lib.arena_end(tick)
    lib.arena_trim(0)
    after = arena.stats()
    assert after.maps - before.maps == after.unmaps - before.unmaps == 100


def test_names_with_a_nul_or_a_surrogate_are_told_apart() -> None:
    names = ["nul \0 a", "nul \0 b", "half \ud800", "nul "]
    with arena.trace():
        for name in names:
            with arena.tick(name):
                kept = arena.strdup_persist("x")  # named oddly
    found = {row["tick"] for row in rows("persist", line("named oddly"))}
    assert found == {"nul \\x00 a", "nul \\x00 b", "half \\ud800", "nul "}
    del kept


def test_the_first_handles_of_a_process_are_no_blocks_of_a_tick_that_captures() -> None:
    pytest.importorskip("arena._objects")
    code = textwrap.dedent(
        """
        import arena
        for n in (1, 1000):
            with arena.tick(objects=True) as t:
                for _ in range(n):
                    t.alloc(10)
            assert arena.object_stats().escaped == 0, arena.object_stats()
        with arena.tick(objects=True):
            arena.escapes()
        assert not [row for row in arena.escapes() if row.count], str(arena.escapes())
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_even_leak_has_an_even_slope() -> None:
    kept = []
    with arena.trace():
        for _ in range(20):
            with arena.tick("even"):
                kept.append(arena.strdup_persist("x" * 100))  # even
        (row,) = [row for row in arena.escapes() if row.tick == "even"]
    assert row.slope == pytest.approx(100)
    assert kept


@pytest.mark.parametrize("path", [1, True, b"x\0", 2.5])
def test_a_map_is_written_to_paths_only(path: Any) -> None:
    for write in (arena.escapes().to_json, arena.escapes().to_html):
        with pytest.raises((TypeError, ValueError)):
            write(path)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: _native._own_folder("x"), TypeError),
        (lambda: _native._own_folder(1, "x"), TypeError),
        (lambda: _native._own_folder("x", 1), TypeError),
        (lambda: _native._objects_always(1), TypeError),
        (lambda: _native._objects_connected("x"), TypeError),
        (lambda: _native._objects_connected(0), ImportError),
        (lambda: _native._walker("x"), TypeError),
    ],
)
def test_what_the_package_hands_over_is_checked(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_a_tick_tells_its_options_before_and_while_it_is_open() -> None:
    assert (arena.tick(trace=3).trace, arena.tick().objects) == (3, False)
    with arena.tick(trace=3) as t:
        assert t.trace == 3

    @arena.tick("all", escapes="raise", wipe=True, trace=1)
    def fn() -> tuple[bool, int]:
        current = arena.current()
        assert current is not None
        return current.wipe, current.trace

    assert fn() == (True, 1)

"""Limits of ticks inside of ticks and of the process: exact to the byte, and clear when met."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

import arena


@pytest.fixture(autouse=True)
def no_limit_stays() -> Iterator[None]:
    yield
    arena.set_limit(None)


def held() -> int:
    now = arena.stats()
    return now.scratch + now.persisted + now.strays


def test_what_an_inner_tick_holds_counts_for_the_limit_around_it() -> None:
    with arena.tick("outer", limit=1000) as outer:
        outer.alloc(100)
        with arena.tick("middle"), arena.tick("inner") as inner:
            inner.alloc(800)
            with pytest.raises(arena.LimitError) as caught:
                inner.alloc(101)
            assert str(caught.value) == (
                f"tick 'outer' (number {outer.number}) would pass its limit: 101 bytes requested "
                f"by tick 'inner' (number {inner.number}), 900 used, 1000 allowed"
            )
            with pytest.raises(arena.LimitError, match=r"'outer'.*: 101 bytes requested, 900 used"):
                outer.alloc(101)
            assert (outer.used, inner.used) == (100, 800)
            buf = outer.strbuf("x" * 99)
            buf.append("y")
            with pytest.raises(arena.LimitError):
                inner.strdup("z")
            buf.truncate(50)
            assert inner.strdup("z" * 50) == "z" * 50
            with pytest.raises(arena.LimitError):
                buf.append("!")
        outer.alloc(850)  # the inner tick's memory is back, to the byte
        with pytest.raises(arena.LimitError):
            outer.alloc(1)


def test_the_tightest_limit_wins_whichever_tick_it_is_of() -> None:
    with arena.tick("a", limit=100), arena.tick("b", limit=60), arena.tick("c", limit=80) as c:
        with pytest.raises(arena.LimitError, match=r"^tick 'b'.* 61 bytes requested by tick 'c'"):
            c.alloc(61)
        with pytest.raises(arena.LimitError, match=r"^tick 'c'.* 81 bytes requested, 0 used"):
            c.alloc(81)
        c.alloc(60)


def test_ticks_that_end_in_any_order_give_back_what_they_counted_for() -> None:
    with arena.tick("outer", limit=1000) as outer:
        first = arena.begin("first")
        first.alloc(300)
        second = arena.begin("second")
        second.alloc(300)
        third = arena.begin("third")
        third.alloc(300)
        first.end()
        with pytest.raises(arena.LimitError, match="'outer'"):
            third.alloc(401)
        third.alloc(400)
        third.end()
        outer.alloc(700)
        with pytest.raises(arena.LimitError, match="'outer'"):
            second.alloc(1)
        second.end()
        outer.alloc(300)


def test_many_ticks_that_overlap_under_a_limit_keep_nothing_of_those_before_them() -> None:
    with arena.tick("outer", limit=1000) as outer:
        last = arena.begin()
        for _ in range(5000):
            following = arena.begin()
            following.alloc(400)
            last.end()
            last = following
        last.end()
        outer.alloc(1000)


def test_tasks_share_the_limit_of_the_tick_that_they_were_started_in() -> None:
    refused: list[int] = []

    async def work(size: int) -> None:
        with arena.tick() as t:
            try:
                t.alloc(size)
            except arena.LimitError:
                refused.append(size)
            await asyncio.sleep(0)

    async def main() -> None:
        with arena.tick("request", limit=1000) as outer:
            await asyncio.gather(*(asyncio.create_task(work(300)) for _ in range(5)))
            assert refused == [300, 300]
            outer.alloc(1000)

    asyncio.run(main())


def test_the_limit_of_another_threads_tick_does_not_follow_its_context() -> None:
    import contextvars

    done: list[bool] = []

    def work() -> None:
        with arena.tick("of the thread") as t:
            t.alloc(5000)
            done.append(True)

    with arena.tick("outer", limit=100) as outer:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        thread.join()
        outer.alloc(100)
    assert done == [True]


CALLS: dict[str, Callable[[arena.Tick, int], object]] = {
    "alloc": lambda t, n: t.alloc(n),
    "strdup": lambda t, n: t.strdup("x" * n),
    "strbuf": lambda t, n: t.strbuf(b"x" * n),
    "append": lambda t, n: t.strbuf().append("x" * n),
    "alloc_persist": lambda t, n: arena.alloc_persist(n),
    "strdup_persist": lambda t, n: arena.strdup_persist("x" * n),
    "persist": lambda t, n: arena.persist(b"x" * n),
    "store": lambda t, n: arena.Store(key="x" * n),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_limit_of_the_process_is_exact_for_every_call(call: str) -> None:
    with arena.tick("t") as t:
        before = held()
        assert arena.set_limit(before + 100) is None
        assert arena.stats().limit == before + 100
        with pytest.raises(arena.LimitError) as caught:
            CALLS[call](t, 101)
        scratch = call in ("alloc", "strdup", "strbuf", "append")
        who = f"tick 't' (number {t.number})" if scratch else "a persist call"
        assert str(caught.value) == (
            f"the process would pass its limit (arena.set_limit()): 101 bytes requested by {who}, "
            f"{before} used, {before + 100} allowed"
        )
        assert held() == before
        kept = CALLS[call](t, 100)
        assert held() == before + (100 if kept is not None or call == "append" else 0)
        if call == "append":
            t.alloc(0)
        del kept


def test_the_limit_counts_what_was_there_before_it_was_set() -> None:
    kept = arena.strdup_persist("kept")
    early = arena.begin("early")
    early.alloc(1000)
    late = arena.begin("late")  # holds nothing yet
    before = held()
    with pytest.raises(ValueError, match=rf"cannot be {before - 1} bytes: .* 1000 of scratch"):
        arena.set_limit(before - 1)
    assert arena.stats().limit is None
    arena.set_limit(before + 10)
    with pytest.raises(arena.LimitError, match="the process"):
        early.alloc(11)
    late.alloc(10)
    with pytest.raises(arena.LimitError, match="the process"):
        early.alloc(1)
    early.end()
    late.alloc(1000)
    late.end()
    kept.free()
    assert arena.set_limit(None) == before + 10
    assert arena.set_limit("1 GiB") is None
    assert arena.set_limit(2**62) == 1 << 30  # as good as none
    assert arena.set_limit(None) is None


def test_persisted_memory_counts_until_it_is_freed_or_collected() -> None:
    arena.set_limit(held() + 1000)
    store = arena.Store(a="x" * 400)
    with pytest.raises(arena.LimitError):
        store["b"] = "x" * 601
    with pytest.raises(arena.LimitError):  # the new value is there before the old one goes
        store["a"] = "x" * 601
    assert store["a"] == "x" * 400
    store["b"] = "x" * 600
    del store["a"]
    buf = arena.strbuf_persist()
    while True:
        try:
            buf.append("0123456789")
        except arena.LimitError:
            break
    assert len(buf) >= 390 - 10  # it takes what there is, and not only what doubling leaves
    assert buf == "0123456789" * (len(buf) // 10)
    del buf
    arena.alloc_persist(400).free()


def test_threads_together_do_not_pass_the_limit() -> None:
    arena.set_limit(held() + 64_000)
    limit = arena.stats().limit
    over: list[int] = []
    met: list[int] = []

    def work() -> None:
        for size in range(1, 400):
            with arena.tick() as t:
                try:
                    for _ in range(40):
                        t.alloc(size * 7)
                except arena.LimitError:
                    met.append(size)
                now = held()
                if limit is None or now > limit:
                    over.append(now)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met
    assert not over


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        (-1, ValueError),
        ("a lot", ValueError),
        (1.5, TypeError),
        (b"1", TypeError),
        (2**64, ValueError),
    ],
)
def test_a_limit_of_the_process_that_makes_no_sense_is_an_error(
    limit: object, error: type[Exception]
) -> None:
    arena.set_limit("1 GiB")
    with pytest.raises(error):
        arena.set_limit(limit)  # type: ignore[arg-type]
    assert arena.stats().limit == 1 << 30


def test_a_persisted_buffer_is_counted_with_its_nul_and_the_error_says_so() -> None:
    before = held()
    arena.set_limit(before + 10)
    with pytest.raises(arena.LimitError, match=rf"11 bytes requested.*, {before} used"):
        arena.strbuf_persist("x" * 10)
    assert arena.strbuf_persist("x" * 9) == "x" * 9

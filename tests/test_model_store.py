"""The model of arena.Store against a dict of bytes, with the handles and views that it gave out."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import CHUNK, ascii_of, data_of, piece_sizes, seeds, small_sizes, wide_of

import arena

KEYS = ["a", "b", "c", "", "key \0 é", "d"]


def held() -> tuple[int, int]:
    """Persisted allocations now, and their bytes."""
    now = arena.stats()
    return now.persisted_count, now.persisted


@dataclass(eq=False)
class Kept:
    """A value: its handle, what it must hold, and the live views of it."""

    handle: Any
    content: bytearray
    views: list[memoryview]


class StoreMachine(RuleBasedStateMachine):
    """Every call of a mapping, in and out of ticks, with handles and views kept meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.baseline = held()
        self.store = arena.Store()
        self.model: dict[str, Kept] = {}
        self.gone: list[Kept] = []  # replaced, deleted or cleared: stale
        self.ours: list[Kept] = []  # popped: they live on, and are ours

    keys = st.sampled_from(KEYS)
    kinds = st.sampled_from(
        ["bytes", "text", "wide", "bytearray", "view", "Str", "Block", "StrBuf"]
    )

    def value(self, kind: str, size: int, seed: int) -> tuple[Any, bytes, arena.Tick | None]:
        """A value to put in, its bytes, and the tick to end after it was put in."""
        data = data_of(seed, size)
        if kind == "text":
            return (text := ascii_of(seed, size)), text.encode(), None
        if kind == "wide":
            return (text := wide_of(seed, size)), text.encode(), None
        if kind == "bytearray":
            return bytearray(data), data, None
        if kind == "view":
            return memoryview(data)[::-1], data[::-1], None
        if kind == "bytes":
            return data, data, None
        tick = arena.begin("scratch")
        if kind == "Str":
            return tick.strdup(data), data, tick
        if kind == "StrBuf":
            return tick.strbuf(data), data, tick
        block = tick.alloc(size)
        block[:] = data
        return block, data, tick

    def took(self, key: str, content: bytes, kind: str) -> None:
        """The store has a new value: what was there is stale."""
        self.lost(key)
        handle = self.store[key]
        assert handle is self.store[key]  # reading copies nothing
        assert type(handle).__name__ == (kind if kind in ("Block", "StrBuf") else "Str")
        assert handle.persisted
        # A replaced key keeps its place in the order, as in a dict.
        old = self.model.get(key)
        if old is not None:
            old.handle, old.content, old.views = handle, bytearray(content), []
        else:
            self.model[key] = Kept(handle, bytearray(content), [])

    def lost(self, key: str) -> None:
        if key in self.model:
            old = self.model[key]
            self.gone.append(Kept(old.handle, old.content, old.views))

    @rule(key=keys, kind=kinds, size=piece_sizes, seed=seeds)
    def put(self, key: str, kind: str, size: int, seed: int) -> None:
        value, content, tick = self.value(kind, size, seed)
        self.store[key] = value
        if tick is not None:
            tick.end()
        self.took(key, content, kind)

    @rule(key=keys, kind=kinds, size=small_sizes, seed=seeds)
    def set_if_missing(self, key: str, kind: str, size: int, seed: int) -> None:
        value, content, tick = self.value(kind, size, seed)
        missing = key not in self.model
        self.store.setdefault(key, value)
        if tick is not None:
            tick.end()
        if missing:
            self.took(key, content, kind)

    @rule(
        drawn=st.dictionaries(keys, st.tuples(small_sizes, seeds), max_size=4),
        how=st.sampled_from(["mapping", "pairs", "store"]),
    )
    def update(self, drawn: dict[str, tuple[int, int]], how: str) -> None:
        values = {key: data_of(seed, size) for key, (size, seed) in drawn.items()}
        if how == "mapping":
            self.store.update(values)
        elif how == "pairs":
            self.store.update(iter(values.items()))
        else:
            other = arena.Store(values)
            self.store.update(other)
            other.clear()
        for key, content in values.items():
            self.took(key, content, "Str")

    @precondition(lambda self: self.model)
    @rule(key=keys, source=keys)
    def put_a_value_of_its_own(self, key: str, source: str) -> None:
        """A value that is put where it is already stays: it was changed in place."""
        if source in self.model:
            kept = self.model[source]
            self.store[key] = kept.handle
            if key == source:
                assert self.store[key] is kept.handle
                return
            self.took(key, bytes(kept.content), type(kept.handle).__name__)

    @rule(
        key=keys,
        bad=st.sampled_from(["number", "none", "list", "surrogate", "stale", "freed"]),
        how=st.sampled_from(["set", "setdefault", "update"]),
    )
    def put_what_does_not_go_in(self, key: str, bad: str, how: str) -> None:
        with arena.tick() as tick:
            stale = tick.strdup("stale")
        freed = arena.strdup_persist("freed")
        freed.free()
        value: Any
        value, error = {
            "number": (1, TypeError),
            "none": (None, TypeError),
            "list": (["x"], TypeError),
            "surrogate": ("\udc80", UnicodeEncodeError),
            "stale": (stale, arena.StaleError),
            "freed": (freed, arena.StaleError),
        }[bad]
        before = held()
        if how == "setdefault" and key in self.model:
            assert self.store.setdefault(key, value) is self.model[key].handle
            return
        call: Callable[[], object] = {
            "set": lambda: self.store.__setitem__(key, value),
            "setdefault": lambda: self.store.setdefault(key, value),
            "update": lambda: self.store.update({key: value}),
        }[how]
        with pytest.raises(error):
            call()
        assert held() == before

    @rule(key=st.sampled_from([1, None, b"a", ("a",)]))
    def use_a_key_that_is_no_text(self, key: Any) -> None:
        with pytest.raises(TypeError):
            self.store[key] = "x"
        with pytest.raises(KeyError):
            self.store[key]
        assert key not in self.store

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if key in self.model:
            del self.store[key]
            self.lost(key)
            del self.model[key]
        else:
            with pytest.raises(KeyError):
                del self.store[key]

    @rule(key=keys, default=st.booleans())
    def pop(self, key: str, default: bool) -> None:
        if key in self.model:
            kept = self.model.pop(key)
            assert self.store.pop(key, *[None] * default) is kept.handle
            self.ours.append(kept)
        elif default:
            assert self.store.pop(key, "nothing") == "nothing"
        else:
            with pytest.raises(KeyError):
                self.store.pop(key)

    @rule()
    def popitem(self) -> None:
        if self.model:
            key, kept = self.model.popitem()
            assert self.store.popitem() == (key, kept.handle)
            self.ours.append(kept)
        else:
            with pytest.raises(KeyError):
                self.store.popitem()

    @rule()
    def clear(self) -> None:
        self.store.clear()
        for key in self.model:
            self.lost(key)
        self.model.clear()

    @precondition(lambda self: self.model)
    @rule(key=keys, size=small_sizes, seed=seeds)
    def change_a_value_in_place(self, key: str, size: int, seed: int) -> None:
        """A StrBuf in a store grows, a Block takes bytes: the store shows it."""
        kept = self.model.get(key)
        if kept is None:
            return
        if isinstance(kept.handle, arena.StrBuf):
            if kept.views:
                with pytest.raises(BufferError):
                    kept.handle.append("x")
            else:
                kept.handle.append(data_of(seed, size))
                kept.content += data_of(seed, size)
        elif isinstance(kept.handle, arena.Block):
            data = data_of(seed, min(size, len(kept.content)))
            kept.handle[: len(data)] = data
            kept.content[: len(data)] = data

    @precondition(lambda self: self.model or self.ours)
    @rule(which=st.integers(0, 9))
    def take_a_view(self, which: int) -> None:
        values = [*self.model.values(), *self.ours]
        kept = values[which % len(values)]
        kept.views.append(memoryview(kept.handle))

    def with_views(self) -> list[Kept]:
        return [kept for kept in (*self.model.values(), *self.ours, *self.gone) if kept.views]

    @precondition(lambda self: self.with_views())
    @rule(which=st.integers(0, 9))
    def drop_a_view(self, which: int) -> None:
        kept = self.with_views()
        kept[which % len(kept)].views.pop().release()

    @precondition(lambda self: self.ours)
    @rule(which=st.integers(0, 9), by=st.sampled_from(["free", "forget"]))
    def free_what_was_popped(self, which: int, by: str) -> None:
        kept = self.ours[which % len(self.ours)]
        if not kept.views:
            self.ours.remove(kept)
            if by == "free":
                kept.handle.free()
                self.gone.append(kept)

    @invariant()
    def the_store_is_the_dict(self) -> None:
        assert list(self.store) == list(self.model)
        assert len(self.store) == len(self.model)
        assert self.store.nbytes == sum(len(kept.content) for kept in self.model.values())
        for key, kept in self.model.items():
            assert key in self.store
            assert self.store[key] is kept.handle
            assert self.store.get(key) is kept.handle
            assert bytes(kept.handle) == kept.content
        assert self.store == {key: bytes(kept.content) for key, kept in self.model.items()}
        assert self.store.get("missing") is None
        assert str(len(self.model)) in repr(self.store)

    @invariant()
    def what_was_popped_lives_and_what_was_replaced_is_stale(self) -> None:
        for kept in self.ours:
            assert bytes(kept.handle) == kept.content
        for kept in self.gone:
            assert kept.handle.stale
            with pytest.raises(arena.StaleError):
                bytes(kept.handle)

    @invariant()
    def a_view_keeps_its_bytes_whatever_became_of_the_value(self) -> None:
        for kept in self.with_views():
            assert all(view == kept.content for view in kept.views)

    @invariant()
    def the_counters_are_exact(self) -> None:
        alive = [
            *self.model.values(),
            *self.ours,
            *(kept for kept in self.gone if kept.views),
        ]
        count, size = held()
        assert count - self.baseline[0] == len(alive)
        growing = [kept for kept in alive if isinstance(kept.handle, arena.StrBuf)]
        exact = sum(len(kept.content) for kept in alive)
        if growing:
            assert size - self.baseline[1] >= exact
        else:
            assert size - self.baseline[1] == exact

    def teardown(self) -> None:
        for view in [view for kept in self.with_views() for view in kept.views]:
            view.release()
        self.ours.clear()
        self.gone.clear()
        self.model.clear()
        del self.store  # what it holds goes with it
        gc.collect()
        assert held() == self.baseline


@pytest.mark.ends
@pytest.mark.timeout(7200)  # the long profile
def test_a_store_is_a_dict_whose_values_are_persisted_and_freed_when_replaced() -> None:
    examples = settings().max_examples // 2  # it has less to find than the model of ticks
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=examples))


# Single rules, each on its own.


def test_an_update_with_a_bad_value_changes_nothing() -> None:
    store = arena.Store(a="1", b="2", c="3")
    second = store["b"]
    before = held()
    for bad in (1, None, "\udc80"):
        with pytest.raises((TypeError, UnicodeEncodeError)):
            store.update([("a", "4"), ("b", bad), ("c", "late")])  # type: ignore[list-item]
        assert store == {"a": "1", "b": "2", "c": "3"}
        assert store["b"] is second
        assert held() == before
    with pytest.raises(ValueError, match="length"):
        store.update([("a", "new"), "no pair"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        store.update(a="4", b=None)  # type: ignore[arg-type]
    assert store == {"a": "1", "b": "2", "c": "3"}


def test_setdefault_gives_the_persisted_handle_as_reading_does() -> None:
    store = arena.Store()
    value: Any = store.setdefault("key", "text")
    assert value is store["key"]
    assert store.setdefault("key", "other") is value


def test_a_store_made_with_a_bad_value_keeps_nothing() -> None:
    before = held()
    with pytest.raises(TypeError):
        arena.Store({"a": "fine", "b": 1})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        arena.Store(a="fine", b=None)  # type: ignore[arg-type]
    assert held() == before


@pytest.mark.parametrize(
    "change", [lambda s: s.update(a="second"), lambda s: s.__delitem__("a"), lambda s: s.clear()]
)
def test_a_value_that_goes_is_freed_at_once_and_under_a_view_when_that_dies(
    change: Callable[[arena.Store], object],
) -> None:
    before = arena.stats().persisted
    for viewed in (False, True):
        store = arena.Store(a="first")
        held = store["a"]
        view = memoryview(held) if viewed else memoryview(b"first")
        change(store)
        assert (held.stale, bytes(view)) == (True, b"first")
        assert arena.stats().persisted - before == store.nbytes + 5 * viewed
        view.release()
        assert arena.stats().persisted - before == store.nbytes
        store.clear()


def test_a_value_may_be_replaced_by_a_view_of_itself() -> None:
    store = arena.Store(key=data_of(1, CHUNK))
    handle = store["key"]
    with memoryview(handle) as view:
        store["key"] = view[:1000]
        assert store["key"] == data_of(1, 1000)
        assert view == data_of(1, CHUNK)
        with pytest.raises(arena.StaleError):
            bytes(handle)
    del store["key"]


def test_a_store_outlives_the_tick_that_filled_it() -> None:
    store = arena.Store()
    for turn in range(50):
        with arena.tick("awareness") as tick:
            text = tick.strbuf()
            for piece in range(turn):
                text.append(f"{piece} ")
            store["state"] = text
            scratch = store["scratch"] = tick.strdup(f"turn {turn}")
            assert store["scratch"] is not scratch
        assert isinstance(store["state"], arena.StrBuf)
        assert store["state"] == "".join(f"{piece} " for piece in range(turn))
        assert store["scratch"] == f"turn {turn}"
    assert store.nbytes == len(store["state"]) + len(store["scratch"])


def test_threads_that_replace_the_same_values_free_each_one_once() -> None:
    store = arena.Store()
    before = held()
    wrong: list[BaseException] = []
    together = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            together.wait()
            for turn in range(300):
                key = KEYS[turn % 3]
                store[key] = data_of(number, 100 + turn)
                store.pop(KEYS[(turn + number) % 3], None)
                if turn % 50 == 0:
                    store.clear()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert held()[0] - before[0] == len(store)
    store.clear()
    assert held() == before


def test_a_value_that_was_popped_is_never_freed_by_a_set_in_another_thread() -> None:
    store = arena.Store()
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(act: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                act()
        except BaseException as error:
            failures.append(error)

    def take() -> None:
        value = store.pop("key", None)
        if value is not None:
            assert bytes(value) == b"value"

    def put() -> None:
        store["key"] = "value"

    acts = [take, put, put, lambda: store.setdefault("key", "value"), store.clear]
    threads = [threading.Thread(target=work, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    store.clear()
    assert failures == []


def test_a_store_cannot_be_copied_and_adding_to_a_value_changes_it_in_place() -> None:
    store = arena.Store()
    with arena.tick() as t:
        store["log"] = t.strbuf("first")
    handle = store["log"]
    store["log"] += " second"  # type: ignore[operator]
    assert store["log"] is handle
    assert handle == "first second"
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copier(store)
    store.clear()

"""What is kept of ended ticks: the policies of the process and of a name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import arena

pytestmark = pytest.mark.ends
SIZE = 300_000


@pytest.fixture(autouse=True)
def adaptive_again() -> Iterator[None]:
    arena.trim()
    yield
    arena.set_retention("adaptive")
    for row in arena.stats().retention[1:]:
        arena.set_retention(None, name=row.name)
    arena.trim()


def tick(name: str | None = None, size: int = SIZE) -> None:
    with arena.tick(name) as t:
        t.alloc(size)


def row(name: str | None = None) -> arena.Retention:
    return next(one for one in arena.stats().retention if one.name == name)


def test_the_process_is_adaptive_until_somebody_says_otherwise() -> None:
    assert row().policy == "adaptive"
    assert len(arena.stats().retention) == 1
    tick()
    assert row().cached == arena.stats().cached >= SIZE
    for _ in range(32):
        tick(size=1)
    assert row().cached < SIZE


def test_all_is_kept_until_a_trim() -> None:
    assert arena.set_retention("all") == "adaptive"
    tick()
    for _ in range(100):
        tick(size=1)
    assert row() == arena.Retention(None, "all", row().cached, row().needed)
    assert row().cached > SIZE
    assert arena.trim().chunks > SIZE
    assert row().cached == 0


def test_none_gives_back_at_each_end() -> None:
    tick()
    assert arena.set_retention("none") == "adaptive"
    assert row().cached == 0
    tick()
    assert row().cached == 0
    assert arena.set_retention("adaptive") == "none"


@pytest.mark.parametrize(("policy", "most"), [(131_072, 131_072), ("1 MiB", 1 << 20), (0, 0)])
def test_bytes_are_the_most_that_is_kept(policy: int | str, most: int) -> None:
    arena.set_retention(policy)
    with arena.tick() as t:
        for _ in range(40):
            t.alloc(60_000)
    assert row().policy == most
    assert row().cached <= most
    assert row().cached > most - 1_000_000
    for _ in range(50):
        tick(size=1)
    assert row().cached <= most
    assert arena.set_retention("adaptive") == most


@pytest.mark.parametrize(
    "name", ["awareness", "ein Täglein " * 9, "\ud800 lone", "with\0NUL", "🦜" * 20]
)
def test_ticks_of_a_name_are_kept_apart(name: str) -> None:
    assert arena.set_retention("all", name=name) is None
    tick(name)
    (_, named) = arena.stats().retention
    assert named.cached >= SIZE
    assert named.policy == "all"
    assert row().cached == 0
    tick("another")
    assert row().cached >= SIZE
    assert arena.set_retention("none", name=name) == "all"
    assert arena.stats().retention[1].cached == 0
    assert arena.set_retention(None, name=name) == "none"
    assert len(arena.stats().retention) == 1
    tick(name)
    assert row().cached >= SIZE


def test_an_inner_tick_has_the_policy_of_its_own_name() -> None:
    arena.set_retention("none", name="outer")
    with arena.tick("outer") as t:
        t.alloc(SIZE)
        tick("inner")
        inner = row().cached
        assert inner >= SIZE
    assert row().cached == inner


def test_a_decorated_function_is_a_tick_of_its_name() -> None:
    arena.set_retention("all", name="handler")

    @arena.tick("handler")
    def handle() -> None:
        arena.alloc(SIZE)

    handle()
    assert row("handler").cached >= SIZE


def test_the_sixteenth_name_gets_an_error_and_the_others_keep_theirs() -> None:
    with pytest.raises(arena.ArenaError, match="15 names have a policy"):
        for number in range(20):
            arena.set_retention("all", name=f"name {number}")
    named = arena.stats().retention[1:]
    assert named
    for one in named:
        assert arena.set_retention("none", name=one.name) == "all"


@pytest.mark.parametrize(
    ("policy", "name", "error", "words"),
    [
        ("lots", None, ValueError, 'retention is "adaptive", "all", "none", or bytes'),
        ("12 potatoes", None, ValueError, "12 potatoes"),
        (-1, None, ValueError, "-1"),
        (2**70, None, ValueError, "retention is"),
        (True, None, TypeError, "True"),
        (1.5, None, TypeError, "1.5"),
        (None, None, TypeError, "not None"),
        (b"all", None, TypeError, "b'all'"),
        ("all", 3, TypeError, "the name of a tick is a str"),
        ("all", "", ValueError, "an empty name"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(
    policy: object, name: object, error: type[Exception], words: str
) -> None:
    before = arena.stats().retention
    with pytest.raises(error) as caught:
        arena.set_retention(policy, name)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [one.policy for one in arena.stats().retention] == [one.policy for one in before]

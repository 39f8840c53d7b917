"""How long a walk of the heap will take, from numbers alone."""

from __future__ import annotations

import pytest

from arena._stall import Look, Stall

MB = 10**6


@pytest.mark.parametrize(
    ("free", "pieces", "took"),
    [  # as measured on glibc 2.36: bytes free, pieces, milliseconds of malloc_trim
        (240 * MB, 246, 15.18),
        (240 * MB, 3_908, 25.33),
        (192 * MB, 15_626, 32.64),
        (240 * MB, 31_251, 70.03),
        (937 * MB, 122_072, 197.9),
    ],
)
def test_it_foretells_what_was_measured_to_within_a_factor_of_two(
    free: int, pieces: int, took: float
) -> None:
    predicted = Stall().walk(Look(free, pieces))
    assert took / 2 < predicted < took * 2


def test_small_pieces_are_never_thought_cheaper_than_they_are() -> None:
    assert Stall().walk(Look(192 * MB, 124_999)) > 4.0
    assert Stall().walk(Look(500 * MB, 976_556)) > 14.4


def test_a_slow_walk_counts_at_once_and_a_fast_one_slowly() -> None:
    stall, seen = Stall(), Look(100 * MB, 100)
    before = stall.walk(seen)
    stall.walked(seen, before * 4)
    assert stall.walk(seen) == pytest.approx(before * 4)
    stall.walked(seen, before)
    assert before * 2 < stall.walk(seen) < before * 4
    for _ in range(50):
        stall.walked(seen, before)
    assert stall.walk(seen) == pytest.approx(before, rel=0.01)


def test_one_lucky_walk_promises_nothing() -> None:
    stall, seen = Stall(), Look(1000 * MB, 1000)
    before = stall.walk(seen)
    for _ in range(100):
        stall.walked(seen, 0.001)
    assert stall.walk(seen) >= before / 4 * 0.99


def test_what_was_too_short_to_measure_teaches_nothing() -> None:
    stall, seen = Stall(), Look(1000, 1)
    stall.walked(seen, 0.9)
    assert stall.ms_per_mb == Stall().ms_per_mb


def test_a_look_is_cheap_where_it_was_and_dear_for_what_came_since() -> None:
    stall = Stall()
    unknown = stall.look(1000 * MB)
    assert unknown == pytest.approx(15.0)
    stall.looked(1000 * MB, 0.5)
    assert stall.look(1000 * MB) == pytest.approx(0.5)
    assert stall.look(500 * MB) == pytest.approx(0.25)
    assert stall.look(2000 * MB) == pytest.approx(15.5)
    stall.looked(1000 * MB, 30.0)
    assert stall.look(1000 * MB) >= 15.0

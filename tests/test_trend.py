"""The slope detector: what it calls growth, what not, and what must make no difference."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena._trend import Trend, trend

COUNT = 400
XS = [10.0 * n for n in range(COUNT)]
END = XS[-1]
MB = 1e6


def judged(shape: Callable[[float], float], noise: float = 0.02, seed: int = 1) -> Trend:
    """The verdict on a series about 100 MB: ``shape`` in MB over 0 to 1, and noise in MB."""
    draw = random.Random(seed)
    return trend(XS, [MB * (100 + shape(x / END) + draw.gauss(0, noise)) for x in XS])


def saw(teeth: float, height: float = 10.0, phase: float = 0.3) -> Callable[[float], float]:
    return lambda x: height * ((x * teeth + phase) % 1)


def steps(*at: float) -> Callable[[float], float]:
    return lambda x: 5.0 * sum(x >= one for one in at)


LEVEL: dict[str, Callable[[float], float]] = {
    "level": lambda x: 0,
    "one step": steps(0.4),
    "four steps": steps(0.1, 0.3, 0.45, 0.6),
    "a saw": saw(20),
    "a saw of three teeth": saw(3),
    "a warm-up": lambda x: 50 * (1 - math.exp(-x * 8)),
    "a long warm-up": lambda x: 50 * (1 - math.exp(-x * 2.5)),
    "a logarithm": lambda x: 10 * math.log1p(x * 100),
    "growth that stopped": lambda x: 20 * min(x, 0.6),
    "a wave": lambda x: 20 * math.sin(x * 20),
    "a wave of one and a half periods": lambda x: 20 * math.sin(x * 3 * math.pi),
    "down, and up again": lambda x: 20 * max(0.5 - x, (x - 0.5)),
    "spikes": lambda x: 40.0 if int(x * END) % 170 == 0 else 0.0,
}
GROWS: dict[str, Callable[[float], float]] = {
    "a line": lambda x: 4 * x,
    "ten steps": lambda x: 2.0 * int(x * 10),
    "a saw whose lows rise": lambda x: 4 * x + saw(20)(x),
    "a warm-up before": lambda x: 4 * x + 50 * (1 - math.exp(-x * 30)),
    "growth that began late": lambda x: 20 * max(0.0, x - 0.5),
    "growth and one jump": lambda x: 4 * x + 20 * (x > 0.6),
    "growth and spikes": lambda x: 4 * x + (40.0 if int(x * END) % 170 == 0 else 0.0),
    "growth and a wave": lambda x: 8 * x + math.sin(x * 40),
    "growth that gains speed": lambda x: 20 * x * x,
}


@pytest.mark.parametrize("name", LEVEL)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_what_comes_and_goes_or_comes_to_an_end_is_no_growth(name: str, noise: float) -> None:
    for seed in range(5):
        assert judged(LEVEL[name], noise, seed).state in ("flat", "not yet")


@pytest.mark.parametrize("name", ["level", "one step", "a saw", "a warm-up", "growth that stopped"])
def test_what_is_level_at_the_end_is_called_flat_there(name: str) -> None:
    found = judged(LEVEL[name])
    assert found.state == "flat"
    assert found.low <= 0 <= found.high
    assert found.level == pytest.approx(MB * (100 + LEVEL[name](1.0)), rel=0.1)


@pytest.mark.parametrize("name", GROWS)
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_what_rises_throughout_is_growth(name: str, noise: float) -> None:
    for seed in range(5):
        assert judged(GROWS[name], noise, seed).state == "growing"


@pytest.mark.parametrize("name", GROWS)
def test_what_is_mirrored_shrinks_as_fast_as_it_grew(name: str) -> None:
    grows = judged(GROWS[name], 0)
    falls = judged(lambda x: -GROWS[name](x), 0)
    assert falls.state == "shrinking"
    assert falls.slope == pytest.approx(-grows.slope)
    assert (falls.low, falls.high) == pytest.approx((-grows.high, -grows.low))


def test_a_kilobyte_a_tick_is_found_in_megabytes_of_noise_within_4000_ticks() -> None:
    found = [judged(lambda x: 4 * x, noise=1.5, seed=seed) for seed in range(40)]
    assert [one.state for one in found].count("growing") >= 39
    assert sum(one.low <= 1000 <= one.high for one in found) >= 38


def test_megabytes_of_noise_alone_are_no_growth_and_hold_zero_in_the_interval() -> None:
    found = [judged(lambda x: 0, noise=1.5, seed=seed) for seed in range(40)]
    assert "growing" not in [one.state for one in found]
    assert sum(one.low <= 0 <= one.high for one in found) >= 37


def test_the_interval_widens_where_neighbours_are_alike_and_still_holds_the_slope() -> None:
    def alike(seed: int) -> Trend:
        draw, value, values = random.Random(seed), 0.0, []
        for x in XS:
            value = 0.9 * value + draw.gauss(0, 0.436)
            values.append(2e-3 * x + value)
        return trend(XS, values)

    def apart(seed: int) -> Trend:
        draw = random.Random(seed)
        return trend(XS, [2e-3 * x + draw.gauss(0, 1) for x in XS])

    wide, narrow = [alike(seed) for seed in range(40)], [apart(seed) for seed in range(40)]
    assert sum(one.low <= 2e-3 <= one.high for one in wide) >= 36
    assert sum(one.high - one.low for one in wide) > 2 * sum(one.high - one.low for one in narrow)


def test_the_slope_of_a_straight_line_is_exact() -> None:
    times = [n / 10 for n in range(100)]
    straight = trend(times, [3 + 2 * time for time in times])
    assert straight.slope == pytest.approx(2)
    assert straight.high - straight.low < 1e-6
    stairs = trend(times, [2.0 * int(time) for time in times])
    assert stairs.low < 2 < stairs.high
    flat = trend(times, [7.0] * 100)
    assert (flat.state, flat.low, flat.slope, flat.high, flat.level) == ("flat", 0, 0, 0, 7)


def test_a_warm_up_is_left_out_of_the_slope() -> None:
    found = judged(lambda x: 4 * x + 100 * (1 - math.exp(-x * 60)), 0)
    assert found.start > 0
    assert found.slope == pytest.approx(4 * MB / END, rel=0.05)


def test_few_points_or_points_in_one_place_tell_nothing_yet() -> None:
    for xs in (XS[:0], XS[:7], [3.0] * 50, [0.0] * 25 + [1.0] * 25):
        found = trend(xs, [MB * n for n in range(len(xs))])
        assert found.state == "not yet"
        assert not found.known
        assert (found.low, found.high) == (-math.inf, math.inf)
        assert found.points == len(xs)


@pytest.mark.parametrize("count", [8, 12, 20])
def test_few_points_of_noise_are_called_neither_growing_nor_flat(count: int) -> None:
    states = []
    for seed in range(50):
        draw = random.Random(seed)
        states.append(trend(XS[:count], [draw.gauss(0, 1) for _ in range(count)]).state)
    assert states.count("not yet") >= 45


def test_what_was_level_for_a_short_time_is_not_called_flat() -> None:
    assert trend(XS[:20], [7.0] * 20).state == "not yet"
    assert trend(XS[:40], [7.0] * 40).state == "flat"


def test_a_leak_that_noise_hides_for_now_is_not_called_flat_for_the_level_of_its_end() -> None:
    states = []
    for seed in range(100):
        draw = random.Random(seed)
        states.append(trend(XS[:40], [5 * n / 40 + draw.gauss(0, 1) for n in range(40)]).state)
    assert states.count("not yet") > 50
    assert states.count("flat") <= 5


def test_long_series_are_thinned_and_judged_alike() -> None:
    xs = list(range(50_000))
    draw = random.Random(1)
    ys = [draw.random() for _ in xs]
    long, thin = trend(xs, ys), trend(xs[::13], ys[::13])
    assert (long.slope, long.low, long.high) == (thin.slope, thin.low, thin.high)
    assert long.points == 50_000
    assert trend(xs, [100 * x + 3_000_000 * (x % 997 == 0) for x in xs]).slope == pytest.approx(100)
    assert trend(xs, [x % 997 for x in xs]).state == "flat"


@pytest.mark.parametrize(
    ("xs", "ys", "message"),
    [
        ([0.0, 1.0], [1.0], "2 xs and 1 ys"),
        ([0.0, 2.0, 1.0], [1.0, 1.0, 1.0], "must not decrease"),
        ([0.0, 1.0], [1.0, math.nan], "finite"),
        ([0.0, math.inf], [1.0, 1.0], "finite"),
    ],
)
def test_what_is_no_series_is_an_error(
    xs: Sequence[float], ys: Sequence[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trend(xs, ys)


series = st.lists(st.integers(0, 2**30), min_size=8, max_size=120)


@given(series, st.integers(-(2**40), 2**40), st.integers(0, 20), st.integers(0, 20))
def test_the_verdict_does_not_depend_on_units_and_zero_points(
    values: list[int], shift: int, up: int, along: int
) -> None:
    plain = trend(range(len(values)), values)
    moved = trend(
        [(x + 64) * 2.0**along for x in range(len(values))], [(y + shift) * 2**up for y in values]
    )
    assert moved.state == plain.state
    scale = 2.0**up / 2.0**along
    tiny = 1e-6 * (abs(plain.low) + abs(plain.high)) + 1e-3
    assert moved.slope / scale == pytest.approx(plain.slope, rel=1e-6, abs=tiny)
    assert moved.low / scale == pytest.approx(plain.low, rel=1e-6, abs=tiny)


@given(series)
def test_the_verdict_on_the_negative_is_the_opposite(values: list[int]) -> None:
    opposite = {"growing": "shrinking", "shrinking": "growing"}
    plain = trend(range(len(values)), values).state
    assert trend(range(len(values)), [-y for y in values]).state in (
        opposite.get(plain, plain),
        "flat" if plain == "not yet" else "not yet",
    )


@given(series, st.randoms(use_true_random=False))
def test_a_series_that_never_falls_is_not_shrinking_and_the_interval_holds_the_slope(
    values: list[int], draw: random.Random
) -> None:
    values.sort()
    found = trend(range(len(values)), values)
    assert found.state != "shrinking"
    assert found.low <= found.slope <= found.high
    draw.shuffle(values)
    shuffled = trend(range(len(values)), values)
    assert shuffled.low <= shuffled.slope <= shuffled.high

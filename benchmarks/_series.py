"""Made-up series of resident memory, of which it is known whether they grow.

Each is drawn from a seed: 200 to 1,600 samples over 4,000 ticks, in whole pages. A leak is of 1 kB
a tick unless its kind says more. The constants of `arena._trend` were chosen by looking at seeds
below 600; those from 1,000 on were not looked at.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ["CHOSEN_BELOW", "HELD_OUT_FROM", "KINDS", "TICKS", "Kind"]

CHOSEN_BELOW = 600
HELD_OUT_FROM = 1_000
TICKS = 4_000.0
MB = 1e6

Shape: TypeAlias = Callable[[random.Random, Sequence[float]], Sequence[float]]
"""Bytes over a level, at the ticks that are given."""


def _alike(draw: random.Random, count: int, height: float, correlation: float) -> list[float]:
    """Noise, each value alike to the one before."""
    value = draw.gauss(0, 1)
    fresh = math.sqrt(1 - correlation * correlation)
    values = []
    for _ in range(count):
        value = correlation * value + fresh * draw.gauss(0, 1)
        values.append(height * value)
    return values


def _saw(draw: random.Random, xs: Sequence[float], teeth: float, height: float) -> list[float]:
    phase = draw.random()
    return [height * ((x * teeth / TICKS + phase) % 1) for x in xs]


def _noise(draw: random.Random, xs: Sequence[float]) -> list[float]:
    """Megabytes of one of the noises that processes make."""
    count = len(xs)
    kind = draw.choice(("independent", "a little alike", "alike", "saw", "spikes", "churn"))
    if kind == "independent":
        return _alike(draw, count, draw.uniform(0.3, 2) * MB, 0)
    if kind == "a little alike":
        return _alike(draw, count, draw.uniform(0.3, 2) * MB, 0.5)
    if kind == "alike":
        return _alike(draw, count, draw.uniform(0.3, 1) * MB, 0.9)
    if kind == "saw":
        teeth = _saw(draw, xs, draw.uniform(6, 60), draw.uniform(1, 6) * MB)
        return [tooth + draw.gauss(0, 0.05 * MB) for tooth in teeth]
    if kind == "spikes":
        return [
            draw.uniform(5, 60) * MB if draw.random() < 0.04 else abs(draw.gauss(0, 0.1 * MB))
            for _ in xs
        ]
    return [draw.choice((0, 0, 1, 2, 3, 4)) * draw.uniform(0.8, 1) * MB for _ in xs]


def _little(draw: random.Random, xs: Sequence[float]) -> list[float]:
    """None, or some hundred kilobytes at the most."""
    height = draw.choice((0, 0.02, 0.3)) * MB
    return [draw.gauss(0, height) for _ in xs]


def _plus(*parts: Sequence[float]) -> list[float]:
    return [sum(values) for values in zip(*parts, strict=True)]


def _leak(xs: Sequence[float], slope: float = 1_000) -> list[float]:
    return [slope * x for x in xs]


def _filling(xs: Sequence[float], height: float, after: float) -> list[float]:
    return [height * (1 - math.exp(-x / after)) for x in xs]


def _level(draw: random.Random, xs: Sequence[float]) -> list[float]:
    return [0.0] * len(xs)


def _far_alike(draw: random.Random, xs: Sequence[float]) -> list[float]:
    return _alike(draw, len(xs), 2 * MB, 0.97)


def _few_steps(draw: random.Random, xs: Sequence[float]) -> list[float]:
    steps = [
        (draw.uniform(0, 0.9) * TICKS, draw.uniform(1, 20) * MB) for _ in range(draw.randint(1, 4))
    ]
    return _plus([sum(up for at, up in steps if x >= at) for x in xs], _little(draw, xs))


def _one_saw(draw: random.Random, xs: Sequence[float]) -> list[float]:
    height = draw.uniform(1, 50) * MB
    teeth = _saw(draw, xs, draw.uniform(1.5, 60), height)
    return [tooth + draw.gauss(0, 0.02 * height) for tooth in teeth]


def _warm_up(draw: random.Random, xs: Sequence[float]) -> list[float]:
    after = TICKS / draw.uniform(2.2, 20)
    return _plus(_filling(xs, draw.uniform(3, 200) * MB, after), _little(draw, xs))


def _logarithm(draw: random.Random, xs: Sequence[float]) -> list[float]:
    after = TICKS / draw.uniform(20, 1000)
    scale = draw.uniform(3, 50) * MB / math.log1p(TICKS / after)
    return _plus([scale * math.log1p(x / after) for x in xs], _little(draw, xs))


def _stops(draw: random.Random, xs: Sequence[float]) -> list[float]:
    end, slope = draw.uniform(0.2, 0.65) * TICKS, draw.uniform(1_000, 20_000)
    return _plus([slope * min(x, end) for x in xs], _little(draw, xs))


def _waves(draw: random.Random, xs: Sequence[float]) -> list[float]:
    periods, height = draw.uniform(1, 12), draw.uniform(1, 50) * MB
    phase = draw.uniform(0, 2 * math.pi)
    return [
        height * (math.sin(2 * math.pi * periods * x / TICKS + phase) + draw.gauss(0, 0.05))
        for x in xs
    ]


def _regular_steps(draw: random.Random, xs: Sequence[float]) -> list[float]:
    every, phase = TICKS / draw.uniform(7, 30), draw.random()
    up = draw.uniform(0.3, 4) * MB
    return _plus([up * math.floor(x / every + phase) for x in xs], _little(draw, xs))


def _leak_in_lumps(draw: random.Random, xs: Sequence[float]) -> list[float]:
    lump = draw.choice((4_096, 16_384, 65_536, 262_144))
    return [math.floor(y / lump) * lump for y in _leak(xs)]


def _leak_in_noise(draw: random.Random, xs: Sequence[float]) -> list[float]:
    return _plus(_leak(xs), _noise(draw, xs))


def _large_leak_in_noise(draw: random.Random, xs: Sequence[float]) -> list[float]:
    return _plus(_leak(xs, 10 ** draw.uniform(3.3, 5)), _noise(draw, xs))


def _leak_after_warm_up(draw: random.Random, xs: Sequence[float]) -> list[float]:
    warm = _filling(xs, draw.uniform(3, 50) * MB, TICKS / draw.uniform(15, 50))
    return _plus(warm, _leak(xs, draw.uniform(1_000, 5_000)), _little(draw, xs))


def _late_leak(draw: random.Random, xs: Sequence[float]) -> list[float]:
    begin, slope = draw.uniform(0.2, 0.55) * TICKS, draw.uniform(2_000, 20_000)
    return _plus([slope * max(0.0, x - begin) for x in xs], _little(draw, xs))


def _leak_in_waves(draw: random.Random, xs: Sequence[float]) -> list[float]:
    periods, height = draw.uniform(3, 12), draw.uniform(0.5, 2) * MB
    waves = [height * math.sin(2 * math.pi * periods * x / TICKS) for x in xs]
    return _plus(waves, _leak(xs, 2_000), _little(draw, xs))


def _leak_and_a_jump(draw: random.Random, xs: Sequence[float]) -> list[float]:
    at, up = draw.uniform(0.1, 0.9) * TICKS, draw.uniform(2, 30) * MB
    jump = [up if x > at else 0.0 for x in xs]
    return _plus(jump, _leak(xs, draw.uniform(1_000, 4_000)), _little(draw, xs))


def _leak_under_a_saw(draw: random.Random, xs: Sequence[float]) -> list[float]:
    teeth = _saw(draw, xs, draw.uniform(5, 60), draw.uniform(1, 30) * MB)
    return _plus(teeth, _leak(xs, draw.uniform(1_000, 4_000)))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of series."""

    name: str
    grows: bool
    shape: Shape

    def series(self, seed: int) -> tuple[list[float], list[float]]:
        """Ticks, and bytes of resident memory at each."""
        draw = random.Random(f"{self.name} {seed}")
        count = draw.choice((200, 400, 800, 1600))
        xs = [TICKS * (n + 0.5 + draw.uniform(-0.3, 0.3)) / count for n in range(count)]
        base = draw.uniform(20, 500) * MB
        return xs, [math.floor((base + y) / 4096) * 4096 for y in self.shape(draw, xs)]


KINDS = (
    Kind("level", False, _level),
    Kind("noise", False, _noise),
    Kind("noise, far alike", False, _far_alike),
    Kind("few steps", False, _few_steps),
    Kind("saw", False, _one_saw),
    Kind("warm-up", False, _warm_up),
    Kind("logarithm", False, _logarithm),
    Kind("leak that stopped", False, _stops),
    Kind("waves", False, _waves),
    Kind("leak, in lumps", True, _leak_in_lumps),
    Kind("leak, in noise", True, _leak_in_noise),
    Kind("large leak, in noise", True, _large_leak_in_noise),
    Kind("regular steps", True, _regular_steps),
    Kind("leak after warm-up", True, _leak_after_warm_up),
    Kind("leak that began late", True, _late_leak),
    Kind("leak, in waves", True, _leak_in_waves),
    Kind("leak and a jump", True, _leak_and_a_jump),
    Kind("leak under a saw", True, _leak_under_a_saw),
)

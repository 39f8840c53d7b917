"""Tells a series that grows from a level one, or says "not yet"; numbers in, a verdict out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Literal

__all__ = ["Trend", "trend"]

_LEAST = 8  # points
_LEAST_FLAT = 32  # points: what is level for so short a time may be about to grow
_MOST = 4096  # points that are looked at: a longer series is thinned
_BINS = 32

# The lows of bins, of two bins together and of four: whichever gives the tightest interval. What
# saws more slowly than a bin is wide is level only in the wider ones, and noise in the narrow ones.
_LOWS = {1: 0.25, 2: 0.15, 4: 0.1}

_EARLY = (0, 4, 8)  # bins that may be a warm-up
_LATE = (12, 16, 20, 24)  # bins that may have been something else, before it began or stopped

# Chosen by series of benchmarks/_series.py with seeds below 600 and 50 runs of a real process, and
# judged by others: `python -m benchmarks slope`.
_WIDER = 1.3  # times the interval that theory gives: it then holds 95 % where neighbours are alike
_SURE = 1.35  # times the interval away from 0: one series is looked at from several starts
_SURE_LATE = 2.0
_AGREED = 0.5  # of the slope that the widest bins must show, too
_STRAIGHT = 0.67  # the slope late in the line, at least, in parts of that early in it
_BENT = -2.3  # standard errors
_STEPS = 4
_BETTER = 4.0  # times the squares that few steps may leave of those of the line
_LARGE = 4.0  # times the usual change between bins: a jump
_TIGHT = 0.75  # of all that was seen, the most that may hide in what is called flat
_SLOWER = 0.5  # of the slope before


@dataclasses.dataclass(frozen=True)
class Trend:
    """A verdict, and the slope with an interval that holds it in 95 % of cases.

    Slopes are in the unit of ys per unit of xs. While nothing is known the interval is infinite.
    """

    state: Literal["not yet", "flat", "growing", "shrinking"]
    slope: float
    low: float
    high: float
    level: float
    """The median of the last bin: where the series is now."""
    points: int
    start: float
    """The x from which on slope and interval are taken: what was before is a warm-up, or over."""

    @property
    def known(self) -> bool:
        """Whether there were enough points for an interval."""
        return math.isfinite(self.high)


def trend(xs: Sequence[float], ys: Sequence[float]) -> Trend:
    """Judge whether ys grow, as a leak does: by a slope that stays, from the lows up.

    xs (seconds, ticks) must not decrease. Takes some 4 ms for 2,000 points, 10 at the most. Raises
    ValueError for what is no series.

    The series is cut into 32 parts of the same length in x; of each only a low counts, so what
    comes and goes (spikes, garbage until it is collected, caches until they are emptied) does not.
    The slope is the median of those between all pairs of lows (Theil and Sen). Its interval is that
    of a line through n (1 - r) / (1 + r) points, r being the correlation of neighbouring rests
    (Santer et al. 2000, J. Geophys. Res. 105), corrected for its bias, and a third wider than that.

    It is growing when that interval is well away from zero, and

    - it rises as fast late as early: what slows down is a warm-up, or a cache that fills;
    - no four steps tell the same as well: what is allocated four times is not allocated always;
      up to two jumps are left out, if what is left grows by itself;
    - it goes above what it had been before, if it was level first and began late.

    A warm-up of up to a quarter is cut off. It is flat when, from some point on, the interval holds
    zero and is too narrow to hide growth. It is shrinking when its negative is growing. All else is
    "not yet": more points may tell.

    What it cannot tell: growth that ends after the last point, such as a warm-up or a cache of
    which less than about twice its time constant was seen; a wave or a saw of which less than one
    and a half periods were seen; five or more steps in equal distances from growth; within some 200
    points a leak that adds up to less than three times the noise of a point. What grows like the
    logarithm is not growing, nor is what grows by doubling fewer than five times. Noise whose
    neighbours are alike over a fifth of the series looks like growth once in some 30 series.
    """
    _check(xs, ys)
    count = len(xs)
    if count < _LEAST or xs[0] == xs[-1]:
        start, level = (xs[0], ys[-1]) if count else (0.0, 0.0)
        return Trend("not yet", 0.0, -math.inf, math.inf, level, count, start)
    if count > _MOST:
        stride = -(-count // _MOST)
        xs, ys = xs[::stride], ys[::stride]
    binned = _Binned(xs, ys)

    def verdict(
        state: Literal["not yet", "flat", "growing", "shrinking"],
        line: _Line,
        start: float,
        sign: int = 1,
    ) -> Trend:
        slope, ends = sign * line.slope, (sign * line.low, sign * line.high)
        return Trend(state, slope, min(ends), max(ends), binned.medians[-1], count, start)

    whole = binned.line(0)
    if whole is None:  # all points are in a few places
        return Trend("not yet", 0.0, -math.inf, math.inf, ys[-1], count, xs[0])
    rising = _rising(binned, xs, ys)
    if rising is not None:
        return verdict("growing", *rising)
    negative = [-y for y in ys]
    falling = _rising(_Binned(xs, negative), xs, negative)
    if falling is not None:
        return verdict("shrinking", *falling, sign=-1)
    flat = _flat(binned) if count >= _LEAST_FLAT else None
    if flat is not None:
        return verdict("flat", *flat)
    return verdict("not yet", whole, xs[0])


def _check(xs: Sequence[float], ys: Sequence[float]) -> None:
    if len(xs) != len(ys):
        raise ValueError(f"{len(xs)} xs and {len(ys)} ys are no series")
    if not (math.isfinite(math.fsum(xs)) and math.isfinite(math.fsum(ys))):
        raise ValueError("a series must be of finite numbers")
    if any(after < before for before, after in pairwise(xs)):
        raise ValueError("xs must not decrease")


@dataclasses.dataclass(frozen=True)
class _Line:
    slope: float
    margin: float
    bend: float
    """The quadratic term, in standard errors: below zero where the slope decreases."""
    kept: float
    """The slope at three quarters of the line in parts of that at one quarter."""

    @property
    def low(self) -> float:
        return self.slope - self.margin

    @property
    def high(self) -> float:
        return self.slope + self.margin

    @property
    def slows_down(self) -> bool:
        return self.bend < _BENT and self.kept < _STRAIGHT


class _Binned:
    """A series by parts of the same length; those without points are left out."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        wanted = min(_BINS, max(_LEAST, len(xs) // 4))
        first, scale = xs[0], wanted / (xs[-1] - xs[0])
        parts: list[tuple[list[float], list[float]]] = [([], []) for _ in range(wanted)]
        for x, y in zip(xs, ys, strict=True):
            at, of = parts[min(wanted - 1, int((x - first) * scale))]
            at.append(x)
            of.append(y)
        parts = [part for part in parts if part[0]]
        self.count = len(parts)
        self.medians = [_quantile(sorted(of), 0.5) for _, of in parts]
        self.xs = [math.fsum(at) / len(at) for at, _ in parts]
        # Lows are taken from what is over a rough line: in a steep series they would all be the
        # first of their bin.
        middles = [_quantile(at, 0.5) for at, _ in parts]
        self.rough = _theil_sen(middles, self.medians) if len(parts) > 1 else 0.0
        self._over = [
            sorted(y - self.rough * x for x, y in zip(at, of, strict=True)) for at, of in parts
        ]
        self._lows = {width: self._lows_of(width) for width in _LOWS}
        self.lows = self._lows[1][1]
        self._lines: dict[int, list[_Line]] = {}

    def _lows_of(self, width: int) -> tuple[list[float], list[float]]:
        """The low of each ``width`` bins together, from the last ones backwards."""
        xs, lows = [], []
        for end in range(self.count, width - 1, -width):
            together = range(end - width, end)
            over = self._over[end - 1]
            if width > 1:
                over = sorted(chain.from_iterable(self._over[end - width : end]))
            x = math.fsum(self.xs[index] for index in together) / width
            xs.append(x)
            lows.append(_quantile(over, _LOWS[width]) + self.rough * x)
        return xs[::-1], lows[::-1]

    def lines(self, start: int) -> list[_Line]:
        """A line for each width, from bin ``start`` on, where there are lows enough."""
        if start not in self._lines:
            counts = {width: (self.count - start) // width for width in _LOWS}
            self._lines[start] = [
                _fitted(xs[-counts[width] :], lows[-counts[width] :])
                for width, (xs, lows) in self._lows.items()
                if counts[width] >= 5
            ]
        return self._lines[start]

    def line(self, start: int) -> _Line | None:
        """The line with the tightest interval."""
        return min(self.lines(start), key=lambda line: line.margin, default=None)

    def starts(self, bins: Sequence[int]) -> list[int]:
        """Numbers of bins of 32, as bins of this series."""
        return [round(number * self.count / _BINS) for number in bins]


def _rising(
    binned: _Binned, xs: Sequence[float], ys: Sequence[float]
) -> tuple[_Line, float] | None:
    """The line by which the series rises and the x where it starts; None where it does not."""
    unsure = 0.0
    for _ in range(3):
        found = _rising_as_it_is(binned)
        if found is not None:
            line, start = found
            return found if line.slope * (binned.xs[-1] - start) >= unsure else None
        # What is left out is known only to within the noise, and must not be what rises.
        changes = [after - before for before, after in pairwise(binned.medians)]
        usual = _median(changes)
        unsure += 8 * _median([abs(change - usual) for change in changes])
        rest = _without_jump(binned, changes, usual, xs, ys)
        if rest is None:
            return None
        xs, ys = rest
        binned = _Binned(xs, ys)
    return None


def _rising_as_it_is(binned: _Binned) -> tuple[_Line, float] | None:
    whole = binned.line(0)
    assert whole is not None
    early = binned.starts(_EARLY)
    for start in (*early, *binned.starts(_LATE)):
        line = binned.line(start)
        if line is None:
            return None
        sure = _SURE if start in early else _SURE_LATE
        if line.slope <= sure * line.margin or binned.lines(start)[-1].slope < _AGREED * line.slope:
            continue
        began = whole.slope >= line.slope / 2 if start in early else _began(binned, start, line)
        if began and not line.slows_down and not _few_steps(binned, start, line):
            return line, binned.xs[start]
    return None


def _began(binned: _Binned, start: int, line: _Line) -> bool:
    """Whether growth began here: it was slower before, and has gone beyond what was before."""
    before = _theil_sen(binned.xs[: start + 1], binned.lows[: start + 1])
    rise = line.slope * (binned.xs[-1] - binned.xs[start])
    beyond = binned.medians[-1] - max(binned.medians[:start])
    return before <= line.slope / 2 and beyond >= rise / 2


def _few_steps(binned: _Binned, start: int, line: _Line) -> bool:
    """Whether four steps describe what is from this bin on much better than the line does."""
    lows = binned.lows[start:]
    rests = [y - line.slope * x for x, y in zip(binned.xs[start:], lows, strict=True)]
    base, tiny = min(lows), 1e-9 * max(map(abs, lows))
    left = _squares(rests)
    return left > tiny * tiny and left > _BETTER * _stairs([low - base for low in lows], _STEPS)


def _without_jump(
    binned: _Binned,
    changes: Sequence[float],
    usual: float,
    xs: Sequence[float],
    ys: Sequence[float],
) -> tuple[list[float], list[float]] | None:
    """The series without its largest jump up; None where there is none that stands out.

    Not one in the first quarter, where jumps are those of a warm-up. Not one down: without these a
    saw would grow.
    """
    quarter = binned.count // 4
    jumps = [
        (before + after - 2 * usual, index)
        for index, (before, after) in enumerate(pairwise(changes), 1)
        if index >= quarter
    ]
    if len(jumps) < _LEAST:
        return None
    jump, index = max(jumps)
    spread = sorted(abs(change - usual) for change in changes)
    seen = max(binned.medians) - min(binned.medians)
    if jump < _LARGE * spread[len(spread) * 3 // 4] or jump < seen / 5:
        return None
    before, after = binned.xs[index - 1], binned.xs[index + 1]
    rest = [
        (x, y if x < before else y - jump)
        for x, y in zip(xs, ys, strict=True)
        if not before <= x < after
    ]
    return [x for x, _ in rest], [y for _, y in rest]


def _flat(binned: _Binned) -> tuple[_Line, float] | None:
    """The line on which the series is flat and the x where it starts; None where it is not."""
    seen = max(binned.medians) - min(binned.medians)
    for start in binned.starts((*_EARLY, *_LATE)):
        line = binned.line(start)
        if line is None:
            break
        hidden = line.margin * (binned.xs[-1] - binned.xs[start])
        if line.low <= 0 <= line.high and hidden <= _TIGHT * seen:
            if start == 0:
                return line, binned.xs[0]
            before = (binned.medians[start] - binned.medians[0]) / (binned.xs[start] - binned.xs[0])
            if max(line.high, -line.low) < _SLOWER * abs(before):
                return line, binned.xs[start]
    return None


def _fitted(xs: Sequence[float], ys: Sequence[float]) -> _Line:
    """The line of Theil and Sen through these points, how sure it is, and how it bends."""
    count = len(xs)
    slope = _theil_sen(xs, ys)
    middle = math.fsum(xs) / count
    away = [x - middle for x in xs]
    rests = _centred([y - slope * x for x, y in zip(away, ys, strict=True)])
    tiny = count * (1e-12 * max(map(abs, ys))) ** 2  # what rounding leaves of a straight line
    squares = _squares(rests)
    if squares <= tiny:
        return _Line(slope, 0.0, 0.0, 1.0)
    spread = _squares(away)
    freedom = _effective(rests, squares) - 2
    margin = _WIDER * _t(freedom) * math.sqrt(squares / freedom / spread)

    bow = _centred([x * x for x in away])
    skew = math.fsum(b * x for b, x in zip(bow, away, strict=True)) / spread
    bow = [b - skew * x for b, x in zip(bow, away, strict=True)]
    bow_spread = _squares(bow)
    bend = math.fsum(b * rest for b, rest in zip(bow, rests, strict=True)) / bow_spread
    rests = _centred([rest - bend * b for rest, b in zip(rests, bow, strict=True)])
    squares = max(_squares(rests), tiny)
    error = math.sqrt(squares / (_effective(rests, squares) - 3) / bow_spread)
    change = bend * (xs[-1] - xs[0]) / 2  # of the slope, from the middle to a quarter
    kept = (slope + change) / (slope - change) if slope > change else math.inf
    return _Line(slope, margin, bend / error if error else math.copysign(math.inf, bend), kept)


def _effective(rests: Sequence[float], squares: float) -> float:
    """How many independent points these rests are worth; at least 5."""
    count = len(rests)
    correlation = math.fsum(a * b for a, b in pairwise(rests)) / squares if squares else 0.0
    correlation += (2 + 4 * correlation) / count  # what the fit has taken from it
    correlation = min(0.97, max(0.0, correlation))
    return max(5.0, count * (1 - correlation) / (1 + correlation))


def _theil_sen(xs: Sequence[float], ys: Sequence[float]) -> float:
    points = list(zip(xs, ys, strict=True))
    return _median(
        [
            (y - earlier) / (x - before)
            for index, (x, y) in enumerate(points)
            for before, earlier in points[:index]
        ]
    )


def _stairs(ys: Sequence[float], steps: int) -> float:
    """The least squares that up to so many steps leave: the best ones up to each point in turn."""
    count = len(ys)
    sums = list(accumulate(ys, initial=0.0))
    squares = list(accumulate((y * y for y in ys), initial=0.0))

    def left(start: int, end: int) -> float:
        over = squares[end] - squares[start] - (sums[end] - sums[start]) ** 2 / (end - start)
        return max(0.0, over)

    best = [0.0, *(left(0, end) for end in range(1, count + 1))]
    for _ in range(steps):
        best = [
            0.0,
            *(
                min([best[end], *(best[mid] + left(mid, end) for mid in range(1, end))])
                for end in range(1, count + 1)
            ),
        ]
    return best[count]


def _squares(values: Sequence[float]) -> float:
    """The sum of squares about the mean."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _median(values: Sequence[float]) -> float:
    return _quantile(sorted(values), 0.5)


def _quantile(ordered: Sequence[float], share: float) -> float:
    at = (len(ordered) - 1) * share
    below = int(at)
    rest = at - below
    if not rest:
        return ordered[below]
    return ordered[below] * (1 - rest) + ordered[below + 1] * rest


def _t(freedom: float) -> float:
    """The 97.5 % quantile of Student's t for ``freedom`` of 3 or more, which need not be whole.

    Good to 0.1 %. The Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).
    """
    z = 1.959963984540054
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))

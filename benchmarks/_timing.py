"""Times the contenders of one case against each other, on a machine that is not quiet.

All contenders of a case take turns in rounds, in an order that changes from round to round, so
that a slow second hits them alike. Ratios are taken within a round, and their median is what is
reported. Time is that of the process on the processor, user and system, so that another process
that takes a turn in between costs nobody anything. The garbage collector stays on, with its usual
thresholds, as in normal use.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any


class Kind(enum.Enum):
    """What a contender is there for."""

    ARENA = "arena"
    LIMIT = "limit"
    PEER = "peer"
    PART = "part"
    """A piece of the job, shown for what it costs alone: never the best peer."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to do the job of a case: a statement, as for timeit, and the names it uses.

    ``setup`` runs untimed before each sample; it finds the number of turns as ``number``.
    """

    name: str
    kind: Kind
    statement: str
    names: dict[str, Any]
    setup: str = "pass"


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A contender that measures itself: returns seconds for one turn."""

    name: str
    kind: Kind
    sample: Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: rounds, and seconds that each sample should take."""

    rounds: int
    seconds: float


FULL = Effort(rounds=81, seconds=0.005)
QUICK = Effort(rounds=5, seconds=0.0005)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass(frozen=True)
class Series:
    """What one contender took for one turn, in seconds, round by round."""

    name: str
    kind: Kind
    seconds: tuple[float, ...]

    def spread(self) -> Spread:
        """Return the median time and its quartiles."""
        return Spread.of(self.seconds)

    def over(self, other: Series) -> Spread:
        """Return the ratio to another series of the same rounds."""
        return Spread.of([a / b for a, b in zip(self.seconds, other.seconds, strict=True)])

    def minus(self, other: Series) -> Spread:
        """Return the difference to another series of the same rounds."""
        return Spread.of([a - b for a, b in zip(self.seconds, other.seconds, strict=True)])


def _sampler(contender: Contender, effort: Effort) -> Callable[[], float]:
    names = {**contender.names, "enable_gc": gc.enable, "number": 1}
    # timeit turns the collector off; its documentation names this as the way to have it on.
    setup = f"enable_gc()\n{contender.setup}"
    timer = timeit.Timer(contender.statement, setup, time.process_time, names)

    def turns(number: int) -> float:
        names["number"] = number
        return timer.timeit(number)

    number, taken = 1, turns(1)
    while taken < effort.seconds / 4:
        number *= 4
        taken = turns(number)
    number = max(1, round(number * effort.seconds / taken))
    return lambda: turns(number) / number


def race(contenders: Sequence[Contender | Sampler], effort: Effort) -> list[Series]:
    """Time the contenders against each other, and return their series in the same order."""
    samplers = [
        contender.sample if isinstance(contender, Sampler) else _sampler(contender, effort)
        for contender in contenders
    ]
    seconds: list[list[float]] = [[] for _ in samplers]
    for turn in range(effort.rounds):
        for step in range(len(samplers)):
            index = (turn + step) % len(samplers)
            seconds[index].append(samplers[index]())
    return [
        Series(contender.name, contender.kind, tuple(taken))
        for contender, taken in zip(contenders, seconds, strict=True)
    ]

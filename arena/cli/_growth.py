"""How fast resident memory grows: a least-squares line with an honest 95 % interval."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

__all__ = ["Growth", "growth"]


@dataclasses.dataclass(frozen=True)
class Growth:
    """A slope and its 95 % interval, in the unit of the samples per unit of time."""

    slope: float
    low: float
    high: float


def growth(times: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Fit a line; None when there are too few samples for an interval.

    Memory moves in steps, and a step stays: neighbouring residuals are alike, so n samples say less
    than n independent ones. As usual for such series (Santer et al. 2000, J. Geophys. Res. 105),
    the residuals' lag-1 correlation r gives the number that counts, n (1 - r) / (1 + r), which sets
    both the standard error and the degrees of freedom of t.
    """
    count = len(times)
    if count < 5 or times[0] == times[-1]:
        return None
    slope, intercept = statistics.linear_regression(times, values)
    residuals = [y - intercept - slope * x for x, y in zip(times, values, strict=True)]
    squares = math.fsum(residual * residual for residual in residuals)
    correlation = 0.0
    if squares > 0:
        lagged = math.fsum(a * b for a, b in itertools.pairwise(residuals))
        correlation = max(0.0, lagged / squares)
    # At least 5 that count: the fit takes two, and t below 3 degrees of freedom is meaningless.
    effective = max(5.0, count * (1 - correlation) / (1 + correlation))
    mean = statistics.fmean(times)
    spread = math.fsum((time - mean) ** 2 for time in times)
    error = math.sqrt(squares / (effective - 2) / spread)
    margin = _t(effective - 2) * error
    return Growth(slope, slope - margin, slope + margin)


def _t(freedom: float) -> float:
    """The 97.5 % quantile of Student's t for ``freedom`` of 3 or more, which need not be whole.

    Good to 0.1 %. The Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5): statistics has no t.
    """
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))

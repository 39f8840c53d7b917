"""What a watch found: slopes, verdict, the time that is left, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator

from arena import _cgroup
from arena._map_text import size
from arena._trend import Trend, trend
from arena.cli._watched import Sample, Samples, Watched

__all__ = ["Found", "Rate", "as_json", "found", "lines", "span", "state_line"]

_UNKNOWN = "not yet known"


@dataclasses.dataclass(frozen=True)
class Rate:
    """A slope that must not be exceeded, in bytes."""

    bytes: int
    per: str
    """"min" or "tick"."""

    def __str__(self) -> str:
        return f"{size(self.bytes)}/{self.per}"


@dataclasses.dataclass(frozen=True)
class Found:
    """All that can be said of the samples so far."""

    samples: Samples
    by_time: Trend
    """Bytes a minute."""
    by_tick: Trend | None
    """Bytes a tick; None: no ticks are counted."""
    ticks: int | None
    """How many have finished during the watch."""
    limit: int | None
    """Bytes: what was given, or that of the control group."""
    limit_source: str | None
    room: int | None
    """Bytes until the limit is reached."""
    cgroup: _cgroup.Cgroup | None
    oom_kills: int
    """During the watch, in the process's control group."""

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    @property
    def state(self) -> str:
        """Growing when it grows by time or by ticks; else what ticks say, if they say anything."""
        states = [one.state for one in (self.by_tick, self.by_time) if one is not None]
        if "growing" in states:
            return "growing"
        return next((state for state in states if state != "not yet"), "not yet")

    @property
    def to_limit(self) -> tuple[float, float, float] | None:
        """Minutes until the limit is reached: at the slope, at its high end, at its low end.

        None: there is no limit, or it is not known that it grows by time.
        """
        if self.room is None or self.by_time.state != "growing":
            return None
        slopes = (self.by_time.slope, self.by_time.high, self.by_time.low)
        fast, faster, slower = (self.room / slope if slope > 0 else math.inf for slope in slopes)
        return fast, faster, slower

    def over(self, rate: Rate) -> bool:
        """Whether it grows, and faster than this."""
        one = self.by_tick if rate.per == "tick" else self.by_time
        return one is not None and one.state == "growing" and one.slope > rate.bytes


def found(watched: Watched, limit: int | None) -> Found:
    """Judge the samples so far; there is one at least."""
    samples = watched.samples
    counted = [(one.ticks, one.resident) for one in samples if one.ticks is not None]
    # A program that replaces itself (exec) begins to count anew.
    begun = max((n for n in range(1, len(counted)) if counted[n][0] < counted[n - 1][0]), default=0)
    counted = counted[begun:]
    by_tick = ticks = None
    if counted:
        ticks = counted[-1][0] - counted[0][0]
        by_tick = trend([ticks for ticks, _ in counted], [resident for _, resident in counted])
    cgroup, first = watched.cgroup, watched.first_cgroup
    room = source = None
    if limit is not None:
        source, room = "--limit", limit - samples[-1].resident
    elif cgroup is not None and cgroup.limit is not None:
        limit, room = cgroup.limit, cgroup.room
        source = "control group"
    return Found(
        samples=samples,
        by_time=trend([one.seconds / 60 for one in samples], [one.resident for one in samples]),
        by_tick=by_tick,
        ticks=ticks,
        limit=limit,
        limit_source=source,
        room=None if room is None else max(0, room),
        cgroup=cgroup,
        oom_kills=cgroup.oom_kills - first.oom_kills if cgroup and first else 0,
    )


def span(seconds: float) -> str:
    """A length of time to read."""
    for limit, unit, name in (
        (120.0, 1.0, "s"),
        (7_200.0, 60.0, "minutes"),
        (172_800.0, 3_600.0, "hours"),
        (6.3e7, 86_400.0, "days"),
    ):
        if seconds < limit:
            digits = 1 if name != "s" and seconds / unit < 10 else 0
            return f"{seconds / unit:.{digits}f} {name}"
    return "years"


def slope(found_trend: Trend, per: str) -> str:
    """``+1.2 MiB/min (95 %: +1.0 to +1.4)``."""
    if not found_trend.known:
        return _UNKNOWN
    low, high = (size(end, "+") for end in (found_trend.low, found_trend.high))
    return f"{size(found_trend.slope, '+')}/{per} (95 %: {low} to {high})"


def left(one: Found) -> str:
    """The time until the limit is reached, in words."""
    if one.limit is None:
        return "no limit is known (give one with --limit)"
    what = f"{size(one.limit)} ({one.limit_source})"
    if not one.room:
        return f"{what}: reached"
    times = one.to_limit
    if times is None:
        never = "not at this slope" if one.by_time.state in ("flat", "shrinking") else _UNKNOWN
        return f"{what}: {never}"
    fast, faster, slower = (span(minutes * 60) for minutes in times)
    return f"{what}: in {fast} ({faster} to {slower})"


def faults(one: Found) -> str:
    """Page faults a second, over the watch."""
    first, last = one.samples[0], one.last
    seconds = last.seconds - first.seconds
    if seconds <= 0:
        return _UNKNOWN
    minor, major = last.minor - first.minor, last.major - first.major
    return f"{minor / seconds:,.1f} minor/s, {major / seconds:,.2f} major/s"


def state_line(one: Found) -> str:
    """Where it is now, in one line: what a watch prints now and then."""
    slopes = slope(one.by_time, "min")
    if one.by_tick is not None and one.by_tick.known:
        slopes += f", {slope(one.by_tick, 'tick')}"
    return f"{one.last.seconds:7.1f} s: {size(one.last.resident)} resident, {one.state}: {slopes}"


def lines(one: Found, watched: Watched) -> Iterator[tuple[str, str]]:
    """The report as pairs of a name and what is to be said of it."""
    first, last = one.samples[0], one.last
    yield (
        "resident",
        f"{size(last.resident)}, {size(last.resident - first.resident, '+')} in "
        f"{span(last.seconds - first.seconds)}; most {size(one.samples.peak)}",
    )
    yield "state", one.state
    yield "by time", slope(one.by_time, "min")
    if one.by_tick is not None:
        yield "by tick", f"{slope(one.by_tick, 'tick')}, {one.ticks:,} ticks"
    else:
        yield "by tick", f"not counted: {watched.no_ticks}"
    yield "limit", left(one)
    yield "page faults", faults(one)
    yield "swap, threads", f"{size(last.swap)}, {last.threads:,}"
    if last.children:
        counted = "counted in" if watched.tree else "not counted: --children counts them in"
        yield "children", f"{last.children:,}, {counted}"
    if one.cgroup is not None:
        kills = f", {one.oom_kills:,} killed for want of memory" if one.oom_kills else ""
        yield "control group", f"version {one.cgroup.version}, {size(one.cgroup.current)}{kills}"
    yield "cost", cost(one, watched)


def cost(one: Found, watched: Watched) -> str:
    """What the watch itself took."""
    each = watched.spent / max(1, one.samples.taken)
    text = f"{one.samples.taken:,} samples, {each * 1e3:.2f} ms each"
    seconds = one.last.seconds - one.samples[0].seconds
    return f"{text}, {watched.spent / seconds:.2%} of a core" if seconds > 1 else text


def as_json(
    one: Found | None,
    watched: Watched,
    *,
    command: list[str] | None,
    status: int | None,
    interrupted: bool,
    fail_above: Rate | None,
) -> str:
    """All of it for programs, in one line; ``null`` for what is not known. Sizes are bytes."""
    figures = {
        "pid": watched.pid,
        "name": watched.name,
        "command": command,
        "ended": watched.ended,
        "exit_status": status,
        "interrupted": interrupted,
        "state": "not yet" if one is None else one.state,
        "cost": {"samples": watched.samples.taken, "seconds": watched.spent},
    }
    if one is not None:
        figures |= _figures(one, watched, fail_above)
    return json.dumps(figures, allow_nan=False) + "\n"


def _figures(one: Found, watched: Watched, fail_above: Rate | None) -> dict[str, object]:
    first, last = one.samples[0], one.last
    times = one.to_limit
    return {
        "seconds": last.seconds - first.seconds,
        "resident": {"first": first.resident, "last": last.resident, "most": one.samples.peak},
        "per_minute": _trend(one.by_time),
        "per_tick": _trend(one.by_tick),
        "ticks": one.ticks,
        "ticks_unknown": watched.no_ticks,
        "limit": one.limit,
        "limit_source": one.limit_source,
        "seconds_to_limit": None if times is None else _known(times[0] * 60),
        "faults": {"minor": last.minor - first.minor, "major": last.major - first.major},
        "swap": last.swap,
        "threads": last.threads,
        "children": last.children,
        "children_counted": watched.tree,
        "cgroup": None if one.cgroup is None else dataclasses.asdict(one.cgroup),
        "oom_kills": one.oom_kills,
        "fail_above": None
        if fail_above is None
        else {"bytes": fail_above.bytes, "per": fail_above.per, "failed": one.over(fail_above)},
        "series": {
            field.name: [getattr(sample, field.name) for sample in one.samples]
            for field in dataclasses.fields(Sample)
        },
    }


def _trend(one: Trend | None) -> dict[str, object] | None:
    if one is None:
        return None
    return {key: _known(value) for key, value in dataclasses.asdict(one).items()}


def _known(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value

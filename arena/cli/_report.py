"""What the demo found out: the measured series, the table, the verdict and the JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.table import Table

from arena._trend import Trend, trend
from arena.cli._loop import Progress
from arena.cli._mind import EDGES, NODES

__all__ = ["LIMIT", "Series", "as_json", "projection", "table", "verdict"]

LIMIT = 1_500.0  # MB: at this the report's process was killed
_FLAT = 0.1  # MB/min: under it nobody will ever notice


@dataclasses.dataclass
class Series:
    """One run: its resident memory over time, and what the child told last."""

    name: str
    progress: Progress = dataclasses.field(default_factory=Progress)
    seconds: list[float] = dataclasses.field(default_factory=list)
    megabytes: list[float] = dataclasses.field(default_factory=list)

    @property
    def ticks(self) -> int:
        return self.progress.ticks

    @property
    def scratch_per_tick(self) -> int:
        """Bytes."""
        return round(self.progress.scratch / max(1, self.ticks))

    @property
    def scratch_per_minute(self) -> float:
        """MB."""
        return self.progress.scratch / 1e6 / max(self.seconds[-1], 1e-9) * 60

    @property
    def state_ok(self) -> bool:
        return self.ticks > 0 and self.progress.broken == 0

    @property
    def growth(self) -> Trend | None:
        """MB a minute; None where the samples are too few."""
        found = trend([second / 60 for second in self.seconds], self.megabytes)
        return found if found.known else None

    @property
    def flat(self) -> bool:
        """Whether no growth was found, or too little to matter."""
        grown = self.growth
        return grown is not None and (grown.low <= 0 or grown.slope < _FLAT)


def projection(series: Series) -> str:
    """The time from the end of the run until resident memory is at the limit."""
    grown = series.growth
    if grown is None:
        return "unknown"
    if series.megabytes[-1] >= LIMIT:
        return "reached"
    if series.flat or grown.slope <= 0:
        return "never (flat)"
    minutes = (LIMIT - series.megabytes[-1]) / grown.slope
    if minutes < 2:
        return f"{minutes * 60:.0f} seconds"
    return f"{minutes:,.0f} minutes" if minutes < 180 else f"{minutes / 60:,.1f} hours"


def table(runs: Sequence[Series]) -> Table:
    """The figures, one column for each run."""
    result = Table(title="Resident memory, measured from outside (MB = 10^6 bytes)")
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")

    def row(label: str, *cells: str) -> None:
        result.add_row(label, *cells)

    row("ticks", *(f"{run.ticks:,}" for run in runs))
    row("scratch per tick", *(f"{run.scratch_per_tick / 1e3:.1f} KB" for run in runs))
    row("scratch per minute", *(f"{run.scratch_per_minute:.1f} MB" for run in runs))
    row("resident at start", *(f"{run.megabytes[0]:.1f} MB" for run in runs))
    row("resident at end", *(f"{run.megabytes[-1]:.1f} MB" for run in runs))
    row("growth (regression)", *(_slope(run.growth) for run in runs))
    row("95 % interval", *(_interval(run.growth) for run in runs))
    row(f"time to {LIMIT / 1e3} GB", *(projection(run) for run in runs))
    row(f"state intact ({NODES} nodes, {EDGES:,} edges)", *(_state(run) for run in runs))
    return result


def _slope(grown: Trend | None) -> str:
    return f"{grown.slope:z.2f} MB/min" if grown else "unknown"


def _interval(grown: Trend | None) -> str:
    return f"{grown.low:z.2f} to {grown.high:z.2f}" if grown else "unknown"


def _state(run: Series) -> str:
    return "yes, every tick" if run.state_ok else f"NO: wrong in {run.progress.broken} ticks"


def verdict(unscoped: Series, ticked: Series) -> str:
    """What it comes to, in one sentence."""
    if not (unscoped.state_ok and ticked.state_ok):
        return "A run lost state: its figures mean nothing."
    if ticked.growth is None or unscoped.growth is None or unscoped.flat:
        return "The run was too short to tell growth from noise: give it more --seconds."
    lost = f"{unscoped.growth.slope:.1f} MB a minute"
    if not ticked.flat:
        return (
            f"The ticked loop grew too, by {ticked.growth.slope:.2f} MB a minute, "
            f"where the unscoped one grew by {lost}."
        )
    fate = projection(unscoped)
    limit = f"{LIMIT / 1e3} GB"
    end = f"has reached {limit}" if fate == "reached" else f"reaches {limit} in {fate}"
    return (
        f"Without ticks the loop loses {lost} and {end}; "
        f"with each tick in arena.tick() the same loop stays at {ticked.megabytes[-1]:.1f} MB."
    )


def as_json(runs: Sequence[Series]) -> str:
    """The figures for programs. ``null`` stands for a growth that was too short to measure."""
    return json.dumps({"runs": [_figures(run) for run in runs]}, indent=2) + "\n"


def _figures(run: Series) -> dict[str, object]:
    grown = run.growth
    return {
        "name": run.name,
        "ticks": run.ticks,
        "scratch_per_tick": run.scratch_per_tick,
        "rss_start_mb": round(run.megabytes[0], 3),
        "rss_end_mb": round(run.megabytes[-1], 3),
        "growth_mb_per_min": grown and round(grown.slope, 4),
        "ci95": grown and [round(grown.low, 4), round(grown.high, 4)],
        "state_ok": run.state_ok,
    }

"""Runs one variant: a model, a server and agents as processes, and reads from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import UnavailableError
from benchmarks._child import Child
from benchmarks.churn.variants import Variant

EACH = 0.1  # seconds between two looks at resident memory
SETTLED = 2.0  # seconds, before the base is read


@dataclasses.dataclass(frozen=True)
class Load:
    """What the agents do."""

    rollouts: int = 4
    turns: int = 45
    screenshot: int = 210 << 10  # characters of base64
    waves: int = 3
    rest: float = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class Wave:
    """What one wave showed."""

    peak: float
    resting: float
    cpu: float
    gap: float
    seconds: float


@dataclasses.dataclass
class Seen:
    """What one variant showed. Memory in MB, times in seconds, gaps in milliseconds."""

    base: float
    waves: list[Wave] = dataclasses.field(default_factory=list)
    series: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Seconds since the start of the first wave, and MB."""
    hung: int = 0
    requests: int = 0
    megabytes: float = 0.0
    failed: int = 0
    at_rest: dict[str, int] = dataclasses.field(default_factory=dict)
    trimmer: dict[str, Any] | None = None
    """What a Trimmer did, if there was one."""
    collected: float = 0.0
    """Resident memory after a gc.collect() when all was over."""

    @property
    def peak(self) -> float:
        """The most of all waves."""
        return max(wave.peak for wave in self.waves)

    @property
    def resting(self) -> float:
        """The most after a wave."""
        return max(wave.resting for wave in self.waves)

    @property
    def cpu(self) -> float:
        """Of the server, over all waves."""
        return sum(wave.cpu for wave in self.waves)

    @property
    def gap(self) -> float:
        """The worst of all waves."""
        return max(wave.gap for wave in self.waves)


class Sampler:
    """Reads a child's resident memory all the while, in a thread."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._start = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.series: list[tuple[float, float]] = []

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EACH):
            self.look()

    def look(self) -> float:
        """Read it now, in MB."""
        resident = self._child.resident() / 1e6
        self.series.append((time.monotonic() - self._start, resident))
        return resident


@dataclasses.dataclass(frozen=True)
class Site:
    """The three processes."""

    server: Child
    agent: Child

    def wave(self, name: str, load: Load) -> dict[str, int]:
        """Let the agents do their work once; return what they say."""
        done: dict[str, int] = self.agent.ask(
            f"wave {name} {load.rollouts} {load.turns} {load.screenshot}"
        )
        return done


@contextlib.contextmanager
def running(variant: Variant) -> Iterator[Site]:
    """Start them, and let a few small requests pass."""
    with Child("churn.model") as model:
        arguments = (variant.arguments[0], str(model.ask("port")), *variant.arguments[1:])
        with (
            Child("churn.server", *arguments, environment=variant.started_with()) as server,
            Child("churn.agent", str(server.ask("port"))) as agent,
        ):
            agent.ask("warm")
            yield Site(server, agent)


def measure(variant: Variant, load: Load) -> Seen:
    """Run a variant once."""
    with running(variant) as site:
        time.sleep(min(load.rest, SETTLED))
        server = site.server
        seen = Seen(server.resident() / 1e6)
        server.ask("gap")
        with Sampler(server) as sampler:
            for number in range(load.waves):
                wave(f"wave{number}", load, site, sampler, seen)
        seen.series = sampler.series
        seen.at_rest = server.ask("rest")
        seen.trimmer = server.ask("trimmer")
        server.ask("collect")
        seen.collected = server.resident() / 1e6
        figures = server.ask("figures")
        seen.hung = figures["hung"]
        if any(figures[what] for what in ("open", "bytes", "pinned", "handlers", "tasks")):
            raise UnavailableError(f"{variant.name}: something is still there: {figures}")
    return seen


def wave(name: str, load: Load, site: Site, sampler: Sampler, seen: Seen) -> None:
    """Run one wave, and let the server rest."""
    server, before, start = site.server, len(sampler.series), time.monotonic()
    cpu = server.cpu()
    done = site.wave(name, load)
    seconds = time.monotonic() - start
    seen.requests += done["requests"]
    seen.megabytes += done["bytes"] / 1e6
    seen.failed += sum(count for name, count in done.items() if name.startswith("failed"))
    time.sleep(load.rest)
    resting = sampler.look()
    peak = max(resident for _, resident in sampler.series[before:])
    seen.waves.append(Wave(peak, resting, server.cpu() - cpu, server.ask("gap"), seconds))


def race(variants: Sequence[Variant], load: Load, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each server has on the processor for a wave, round by round.

    They take turns, so that a bad minute of the machine is everybody's. The first wave of each,
    in which its heap grows, does not count.
    """
    taken: dict[str, list[float]] = {variant.name: [] for variant in variants}
    with contextlib.ExitStack() as stack:
        sites = {one.name: stack.enter_context(running(one)) for one in variants}
        for number in range(rounds + 1):
            for name, site in sites.items():
                before = site.server.cpu()
                site.wave(f"race{number}", load)
                if number:
                    taken[name].append(site.server.cpu() - before)
    return taken

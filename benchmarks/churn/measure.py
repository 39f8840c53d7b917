"""Runs one variant: a model, a server and agents as processes, and reads from outside."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from benchmarks import UnavailableError
from benchmarks._child import Child
from benchmarks.churn.variants import Variant

EACH = 0.1  # seconds between two looks at resident memory


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
    at_rest: dict[str, Any] = dataclasses.field(default_factory=dict)
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


def measure(variant: Variant, load: Load) -> Seen:
    """Run a variant once."""
    with Child("churn.model") as model:
        arguments = (variant.arguments[0], str(model.ask("port")), *variant.arguments[1:])
        with (
            Child("churn.server", *arguments, environment=variant.started_with()) as server,
            Child("churn.agent", str(server.ask("port"))) as agent,
        ):
            agent.ask("warm")
            time.sleep(min(load.rest, 2.0))
            seen = Seen(server.resident() / 1e6)
            server.ask("gap")
            with Sampler(server) as sampler:
                for number in range(load.waves):
                    wave(number, load, server, agent, sampler, seen)
            seen.series = sampler.series
            seen.at_rest = server.ask("rest")
            server.ask("collect")
            seen.collected = server.resident() / 1e6
            figures = server.ask("figures")
            seen.hung = figures["hung"]
            if figures["open"] or figures["bytes"] or figures["handlers"] or figures["tasks"]:
                raise UnavailableError(f"{variant.name}: something is still open: {figures}")
    return seen


def wave(
    number: int, load: Load, server: Child, agent: Child, sampler: Sampler, seen: Seen
) -> None:
    """Run one wave, and let the server rest."""
    before, cpu, start = len(sampler.series), server.cpu(), time.monotonic()
    done = agent.ask(f"wave wave{number} {load.rollouts} {load.turns} {load.screenshot}")
    seconds = time.monotonic() - start
    seen.requests += done["requests"]
    seen.megabytes += done["bytes"] / 1e6
    seen.failed += sum(count for name, count in done.items() if name.startswith("failed"))
    time.sleep(load.rest)
    resting = sampler.look()
    peak = max(resident for _, resident in sampler.series[before:])
    seen.waves.append(Wave(peak, resting, server.cpu() - cpu, server.ask("gap"), seconds))

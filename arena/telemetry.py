"""Arena's figures for those who watch services: Prometheus and OpenTelemetry. Import it by name.

With prometheus_client (``pip install 'tick-arena[prometheus]'``)::

    import arena.telemetry, prometheus_client

    prometheus_client.REGISTRY.register(arena.telemetry.Collector())
    prometheus_client.start_http_server(9000)

With OpenTelemetry, of which nothing is needed but the ``Meter`` that the program has::

    arena.telemetry.observe(opentelemetry.metrics.get_meter("arena"))

A scrape reads counters and /proc/self/statm, some 0.1 ms in all. It never walks the C heap, so it
neither waits for a trim nor stops anybody. All figures are of this process: prometheus_client's
multiprocess mode gathers no collector of this kind, so each worker is scraped by itself.

Log records go to one logger, "arena"; nothing is printed unless the program configures it:

DEBUG    each trim: why, bytes, milliseconds, what was skipped
INFO     a ``Trimmer``, once each: the heap was not walked, with the figures ("stall", "unseen");
         what came back was faulted in again; three trims in a row returned next to nothing. And
         that no thread is started, with the reason
WARNING  each request that ``Requests.sweep()`` ended: its key, group, age and bytes
ERROR    a trim failed, with the traceback; the ``Trimmer`` goes on
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from arena._proc import ProcError, statm
from arena.counters import Stats, stats
from arena.trimmer import TrimmerStats, active
from arena.trimming import Totals, totals

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from arena.requests import RequestStats

    _Family = CounterMetricFamily | GaugeMetricFamily

__all__ = ["Collector", "observe"]

_Labels = tuple[str, ...]
_Values = Iterable[tuple[_Labels, float]]


class _Kind(enum.Enum):
    COUNTER = "observable_counter"
    """Never falls."""
    LEVEL = "observable_up_down_counter"
    """Sums of it over processes mean something."""
    GAUGE = "observable_gauge"


def _requests() -> list[RequestStats]:
    """What each ``Requests`` holds; nothing is imported, or asked, where none was ever made."""
    module = sys.modules.get("arena.requests")
    return [] if module is None else [one.stats() for one in module.registries()]


@dataclasses.dataclass(frozen=True, slots=True)
class _Now:
    """The figures of one moment."""

    stats: Stats
    totals: Totals
    trimmer: TrimmerStats | None
    resident: int | None
    requests: list[RequestStats]

    @classmethod
    def read(cls) -> _Now:
        trimmer = active()
        try:
            resident = statm().resident
        except ProcError:
            resident = None
        running = trimmer.stats() if trimmer else None
        return cls(stats(), totals(), running, resident, _requests())


@dataclasses.dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    """As OpenTelemetry has it; Prometheus writes it with the unit: ``arena_scratch_bytes``."""
    kind: _Kind
    unit: str
    """"By" and "s", or what is counted in braces, or "1"."""
    help: str
    read: Callable[[_Now], _Values]
    labels: _Labels = ()

    @property
    def prometheus(self) -> str:
        """Without the ``_total`` that prometheus_client itself adds to a counter."""
        suffix = {"By": "_bytes", "s": "_seconds"}.get(self.unit, "")
        return self.name.replace(".", "_") + suffix


def _counted(
    name: str, kind: _Kind, unit: str, text: str, field: str, of: str = "stats"
) -> _Metric:
    """A metric that is one number of ``stats()``, or of the trims."""

    def read(now: _Now) -> Iterator[tuple[_Labels, float]]:
        source = getattr(now, of)
        value = None if source is None else getattr(source, field)
        if value is not None:  # such as a limit that is not set
            yield (), value

    return _Metric(name, kind, unit, text, read)


def _skips(now: _Now) -> _Values:
    return [((reason,), count) for reason, count in sorted(now.totals.skips.items())]


def _retained(field: str) -> Callable[[_Now], _Values]:
    def read(now: _Now) -> _Values:
        return [((row.name or "",), getattr(row, field)) for row in now.stats.retention]

    return read


def _policies(now: _Now) -> _Values:
    return [((row.name or "", str(row.policy)), 1) for row in now.stats.retention]


def _seconds(field: str) -> Callable[[_Now], _Values]:
    return lambda now: [((), getattr(now.totals, field) / 1e3)]


def _registered(name: str, kind: _Kind, unit: str, text: str, field: str) -> _Metric:
    """A metric of each ``Requests``; those of one name are told as one, for labels must differ."""

    def read(now: _Now) -> _Values:
        found: dict[str, list[float]] = {}
        for row in now.requests:
            if (figure := getattr(row, field)) is not None:  # a limit that is not set
                found.setdefault(row.name, []).append(figure)
        merge = max if kind is _Kind.GAUGE else sum
        return [((registry,), merge(values)) for registry, values in found.items()]

    return _Metric(name, kind, unit, text, read, ("registry",))


_COUNTER, _LEVEL, _GAUGE = _Kind.COUNTER, _Kind.LEVEL, _Kind.GAUGE
_METRICS = (
    _counted("arena.ticks", _COUNTER, "{tick}", "Ticks that have ended.", "ticks_ended"),
    _counted("arena.ticks.open", _LEVEL, "{tick}", "Ticks that are open now.", "ticks_open"),
    _counted("arena.scratch", _LEVEL, "By", "What open ticks have asked for.", "scratch"),
    _counted(
        "arena.scratch.peak", _GAUGE, "By", "The most that one tick had asked for.", "scratch_peak"
    ),
    _counted("arena.chunks", _LEVEL, "By", "Mapped for open ticks now.", "chunks"),
    _counted(
        "arena.chunks.peak", _GAUGE, "By", "The most mapped for open ticks at once.", "chunks_peak"
    ),
    _counted("arena.cached", _LEVEL, "By", "Chunks kept for the next ticks.", "cached"),
    _counted("arena.pinned", _LEVEL, "By", "Chunks that views keep past their tick.", "pinned"),
    _counted(
        "arena.pinned.chunks", _LEVEL, "{chunk}", "Chunks that are pinned now.", "pinned_count"
    ),
    _counted("arena.pins", _COUNTER, "{chunk}", "Chunks that were ever pinned.", "pinned_ever"),
    _counted("arena.persisted", _LEVEL, "By", "Persisted memory now.", "persisted"),
    _counted(
        "arena.persisted.allocations", _LEVEL, "{allocation}", "Persisted now.", "persisted_count"
    ),
    _counted("arena.persisted.peak", _GAUGE, "By", "The most persisted at once.", "persisted_peak"),
    _counted("arena.stray", _LEVEL, "By", "Allocated in C with no tick open.", "strays"),
    _counted(
        "arena.stray.allocations", _LEVEL, "{allocation}", "Strays that live on.", "strays_count"
    ),
    _counted("arena.strays", _COUNTER, "{allocation}", "Strays, ever.", "strays_ever"),
    _counted("arena.maps", _COUNTER, "{mapping}", "Mappings of chunks asked for.", "maps"),
    _counted("arena.unmaps", _COUNTER, "{mapping}", "Mappings of chunks given back.", "unmaps"),
    _counted("arena.retired", _COUNTER, "By", "What debug() keeps out of use.", "retired"),
    _counted("arena.quarantined", _LEVEL, "By", "Ended ticks that audit() keeps.", "quarantined"),
    _counted("arena.limit", _GAUGE, "By", "The limit of the process, where one is set.", "limit"),
    _Metric(
        "arena.retention.cached",
        _LEVEL,
        "By",
        "Kept for the next ticks, by the name of the tick; empty: all other ticks.",
        _retained("cached"),
        ("name",),
    ),
    _Metric(
        "arena.retention.needed",
        _GAUGE,
        "By",
        "The most that the last ticks needed at once, by the name of the tick.",
        _retained("needed"),
        ("name",),
    ),
    _Metric(
        "arena.retention.policy",
        _GAUGE,
        "1",
        "1 for the policy in force, by the name of the tick.",
        _policies,
        ("name", "policy"),
    ),
    _registered("arena.requests", _COUNTER, "{request}", "Requests opened.", "opened"),
    _registered("arena.requests.open", _LEVEL, "{request}", "Requests that are open now.", "open"),
    _registered(
        "arena.requests.scratch", _LEVEL, "By", "What open requests have asked for.", "bytes"
    ),
    _registered(
        "arena.requests.oldest", _GAUGE, "s", "Age of the oldest open request; 0: none.", "oldest"
    ),
    _registered(
        "arena.requests.discarded", _COUNTER, "{request}", "Requests discarded.", "discarded"
    ),
    _registered(
        "arena.requests.swept",
        _COUNTER,
        "{request}",
        "Ended by sweep(), close_group(), close().",
        "swept",
    ),
    _registered(
        "arena.requests.pinned", _LEVEL, "By", "Memory that views keep past its request.", "pinned"
    ),
    _registered(
        "arena.requests.limit", _GAUGE, "By", "The limit of a registry, where one is set.", "limit"
    ),
    _Metric(
        "arena.resident",
        _LEVEL,
        "By",
        "Resident memory of the process.",
        lambda now: [] if now.resident is None else [((), now.resident)],
    ),
    _counted("arena.trims", _COUNTER, "{trim}", "Trims that have run.", "trims", "totals"),
    _Metric(
        "arena.trim.skips",
        _COUNTER,
        "{trim}",
        "Trims that did not walk the heap: stall, unseen, nothing, budget, shared, or none.",
        _skips,
        ("reason",),
    ),
    _counted(
        "arena.trim.returned",
        _COUNTER,
        "By",
        "Bytes by which resident memory fell at trims.",
        "returned",
        "totals",
    ),
    _Metric("arena.trim.time", _COUNTER, "s", "Time that trims took.", _seconds("milliseconds")),
    _Metric(
        "arena.trim.worst.stall",
        _GAUGE,
        "s",
        "The longest walk of the heap, during which others who allocate from it wait.",
        _seconds("worst_ms"),
    ),
    _Metric(
        "arena.trimmer.running",
        _LEVEL,
        "{trimmer}",
        "1 while a Trimmer runs.",
        lambda now: [((), int(now.trimmer is not None))],
    ),
    _counted(
        "arena.trimmer.refault.ratio",
        _GAUGE,
        "1",
        "Share of what the running Trimmer returned that was faulted in again, 0 to 1.",
        "refault_share",
        "trimmer",
    ),
    _counted(
        "arena.trimmer.backoff",
        _GAUGE,
        "1",
        "By how much the running Trimmer's periods are longer than asked for.",
        "backed_off",
        "trimmer",
    ),
)


class Collector:
    """A collector for prometheus_client: ``prometheus_client.REGISTRY.register(Collector())``.

    What is not known is left out: a limit that is not set, resident memory where there is no /proc,
    the figures of a ``Trimmer`` while none runs. Trims are counted for the process, whoever asked
    for them. Any thread may collect. Raises ImportError when prometheus_client is missing.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import core
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{error.name} is missing: pip install 'tick-arena[prometheus]'"
            ) from None
        self._families = {
            _Kind.COUNTER: core.CounterMetricFamily,
            _Kind.LEVEL: core.GaugeMetricFamily,
            _Kind.GAUGE: core.GaugeMetricFamily,
        }

    def _family(self, metric: _Metric) -> _Family:
        family: _Family = self._families[metric.kind](
            metric.prometheus, metric.help, labels=metric.labels
        )
        return family

    def describe(self) -> list[_Family]:
        """Return the metrics without values: a registry asks for their names."""
        return [self._family(metric) for metric in _METRICS]

    def collect(self) -> Iterator[_Family]:
        """Return the metrics with the values of this moment."""
        now = _Now.read()
        for metric in _METRICS:
            family = self._family(metric)
            for labels, value in metric.read(now):
                family.add_metric(labels, value)
            yield family


def observe(meter: Meter) -> None:
    """Register observable instruments with an OpenTelemetry ``Meter``, for as long as it lives.

    Names are ``arena.scratch`` and the like, units "By", "s" or what is counted. The same figures
    as ``Collector``, read whenever the reader of the meter's provider collects. Call it once for a
    meter. Raises TypeError for something that is no meter.
    """
    if not callable(getattr(meter, "create_observable_gauge", None)):
        raise TypeError(
            "observe() takes an OpenTelemetry Meter, such as opentelemetry.metrics.get_meter("
            f"'arena'), not {meter!r}"
        )
    from opentelemetry.metrics import Observation

    def callback(metric: _Metric) -> Callable[[CallbackOptions], list[Observation]]:
        def read(_options: CallbackOptions) -> list[Observation]:
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True)))
                for labels, value in metric.read(_Now.read())
            ]

        return read

    for metric in _METRICS:
        create = getattr(meter, f"create_{metric.kind.value}")
        create(metric.name, callbacks=[callback(metric)], unit=metric.unit, description=metric.help)

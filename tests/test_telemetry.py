"""What arena tells Prometheus, OpenTelemetry and the log."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import arena
import arena.requests
from arena import _native, telemetry, trimming
from arena._native import ffi, lib
from arena._stall import Look
from arena.trimming import Plan, Totals, TrimResult

pytestmark = pytest.mark.as_ever  # what an audit keeps, and objects' spans, are memory too
ROOT = Path(__file__).resolve().parent.parent
Samples = dict[tuple[str, tuple[str, ...]], float]


def parsed(text: str) -> tuple[Samples, dict[str, str]]:
    """Return the samples by name and label values, and the type of each metric."""
    samples: Samples = {}
    kinds: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        kinds[family.name] = family.type
        for sample in family.samples:
            samples[sample.name, tuple(sample.labels.values())] = sample.value
    return samples, kinds


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(telemetry.Collector())
    return registry


def scrape(registry: CollectorRegistry) -> Samples:
    return parsed(generate_latest(registry).decode())[0]


def test_what_a_tick_holds_is_seen_while_it_is_open_and_gone_after_it(
    registry: CollectorRegistry,
) -> None:
    before = scrape(registry)
    with arena.tick():
        block = arena.alloc(1000)
        view = memoryview(arena.alloc(70_000))
        kept = arena.persist(block)
        during = scrape(registry)
    pinned = scrape(registry)

    def change(now: Samples, name: str) -> float:
        return now[name, ()] - before[name, ()]

    assert change(during, "arena_ticks_open") == 1
    assert change(during, "arena_scratch_bytes") == 71_000
    assert change(during, "arena_chunks_bytes") >= 71_000
    assert change(during, "arena_persisted_bytes") >= 1000
    assert change(during, "arena_persisted_allocations") == 1
    assert change(pinned, "arena_pinned_bytes") >= 70_000
    assert change(pinned, "arena_pinned_chunks") == 1
    assert change(pinned, "arena_pins_total") == 1
    assert change(pinned, "arena_ticks_total") == 1
    assert change(pinned, "arena_scratch_bytes") == 0
    view.release()
    kept.free()
    del kept
    after = scrape(registry)
    for name in ("scratch_bytes", "ticks_open", "chunks_bytes", "pinned_bytes", "pinned_chunks"):
        assert change(after, f"arena_{name}") == 0, name
    assert change(after, "arena_persisted_bytes") == 0
    assert change(after, "arena_persisted_allocations") == 0


def test_strays_are_told(registry: CollectorRegistry) -> None:
    before = scrape(registry)
    stray = lib.arena_alloc(ffi.NULL, 500)
    during = scrape(registry)
    lib.arena_free_persist(stray)
    after = scrape(registry)
    assert during["arena_stray_allocations", ()] == before["arena_stray_allocations", ()] + 1
    assert during["arena_stray_bytes", ()] >= before["arena_stray_bytes", ()] + 500
    assert after["arena_stray_allocations", ()] == before["arena_stray_allocations", ()]
    assert after["arena_strays_total", ()] == before["arena_strays_total", ()] + 1


def test_counters_never_fall_whatever_is_done_between_two_scrapes(
    registry: CollectorRegistry,
) -> None:
    _, kinds = parsed(generate_latest(registry).decode())
    counters = {f"{name}_total" for name, kind in kinds.items() if kind == "counter"}
    assert {"arena_ticks_total", "arena_trims_total", "arena_maps_total"} <= counters
    last = scrape(registry)
    for turn in range(5):
        with arena.tick() as tick:
            tick.alloc(100_000 * turn)
        if turn % 2:
            arena.trim()
        now = scrape(registry)
        for (name, labels), value in last.items():
            if name in counters:
                assert now[name, labels] >= value, name
        last = now


def test_a_limit_is_told_only_while_one_is_set(registry: CollectorRegistry) -> None:
    assert ("arena_limit_bytes", ()) not in scrape(registry)
    before = arena.set_limit("1 GiB")
    try:
        assert scrape(registry)["arena_limit_bytes", ()] == 1 << 30
    finally:
        arena.set_limit(before)
    assert ("arena_limit_bytes", ()) not in scrape(registry)


def test_each_policy_of_retention_is_told_with_its_name(registry: CollectorRegistry) -> None:
    assert scrape(registry)["arena_retention_policy", ("", "adaptive")] == 1
    arena.set_retention(1 << 20, "telemetry's")
    try:
        with arena.tick("telemetry's") as tick:
            tick.alloc(100_000)
        samples = scrape(registry)
        assert samples["arena_retention_policy", ("telemetry's", "1048576")] == 1
        assert samples["arena_retention_cached_bytes", ("telemetry's",)] >= 100_000
        assert samples["arena_retention_needed_bytes", ("telemetry's",)] >= 100_000
    finally:
        arena.set_retention(None, "telemetry's")
    arena.trim()


def of_registry(samples: Samples, name: str) -> dict[str, float]:
    """The figures of the registries with this name."""
    start = "arena_requests"
    return {
        metric.removeprefix(start): value
        for (metric, labels), value in samples.items()
        if metric.startswith(start) and labels == (name,)
    }


def test_each_registry_of_requests_is_told_with_its_name(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        arena.Requests("told bodies", limit="1 MiB") as bodies,
        arena.Requests("told others") as others,
    ):
        monkeypatch.setattr(arena.requests, "_clock", lambda: 100.0)
        delivered, late = bodies.open(1), bodies.open(2)
        view = memoryview(delivered.strbuf(bytes(100_000)))
        late.strdup("x" * 1234)
        monkeypatch.setattr(arena.requests, "_clock", lambda: 160.5)
        bodies.open(3)
        others.open(1)
        bodies.discard(1)
        samples = scrape(registry)
        figures = of_registry(samples, "told bodies")
        assert figures.pop("_pinned_bytes") >= 100_000
        assert figures == {
            "_total": 3,
            "_open": 2,
            "_scratch_bytes": 1234,
            "_oldest_seconds": 60.5,
            "_discarded_total": 1,
            "_swept_total": 0,
            "_limit_bytes": 1 << 20,
        }
        assert of_registry(samples, "told others") == {
            "_total": 1,
            "_open": 1,
            "_scratch_bytes": 0,
            "_oldest_seconds": 0,
            "_discarded_total": 0,
            "_swept_total": 0,
            "_pinned_bytes": 0,
        }
        bodies.sweep(older_than=60)
        view.release()
        after = of_registry(scrape(registry), "told bodies")
        assert (after["_swept_total"], after["_open"], after["_pinned_bytes"]) == (1, 1, 0)


def test_registries_of_one_name_are_told_as_one(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena.requests, "_clock", lambda: 100.0)
    with arena.Requests("shared", limit=3000) as one, arena.Requests("shared", limit=5000) as other:
        one.open("a").strdup("x" * 300)
        monkeypatch.setattr(arena.requests, "_clock", lambda: 107.0)
        other.open("a").strdup("x" * 50)
        other.open("b")
        figures = of_registry(scrape(registry), "shared")
    assert figures["_open"] == figures["_total"] == 3
    assert figures["_scratch_bytes"] == 350
    assert figures["_oldest_seconds"] == 7
    assert figures["_limit_bytes"] == 5000


def test_where_nobody_uses_requests_telling_imports_nothing_of_them() -> None:
    code = """
        import sys, arena.telemetry
        from prometheus_client import CollectorRegistry, generate_latest
        registry = CollectorRegistry(auto_describe=True)
        registry.register(arena.telemetry.Collector())
        text = generate_latest(registry).decode()
        assert "# TYPE arena_requests_open gauge" in text
        print("arena.requests" in sys.modules, "arena_requests_open{" in text)
        with arena.Requests("now") as reqs:
            reqs.open("key")
            text = generate_latest(registry).decode()
            assert 'arena_requests_open{registry="now"} 1.0' in text
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")


@pytest.fixture
def fresh_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimming, "_totals", Totals())


def raw(*, heap: int = 2, shared: int = 0, fell: int = 5 << 20) -> tuple[int, ...]:
    """What the core says of a trim that took 30 ms, 20 of them in the heap."""
    return 1, 100 << 20, (100 << 20) - fell, 0, 0, 30_000_000, 0, 20_000_000, 1, heap, 1, shared


@pytest.mark.usefixtures("fresh_totals")
def test_trims_are_counted_for_the_process_and_a_shared_one_once(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [raw(), raw(shared=1), raw(heap=1), raw(heap=0), raw(fell=-(1 << 20))]
    monkeypatch.setattr(_native, "_trim", lambda *_: answers.pop(0))
    while answers:
        trimming.run("test", 0, None)
    samples = scrape(registry)
    assert samples["arena_trims_total", ()] == 4
    assert samples["arena_trim_returned_bytes_total", ()] == 15 << 20  # no growth is subtracted
    assert samples["arena_trim_time_seconds_total", ()] == pytest.approx(0.12)
    assert samples["arena_trim_worst_stall_seconds", ()] == pytest.approx(0.02)
    skips = {key[1]: value for key, value in samples.items() if key[0] == "arena_trim_skips_total"}
    assert skips == {("shared",): 1, ("budget",): 1, ("none",): 1}


@pytest.mark.usefixtures("fresh_totals")
def test_a_heap_that_is_left_alone_is_counted_with_its_reason(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lib.arena_heap_kind() == lib.ARENA_HEAP_NONE:
        pytest.skip("there is no heap to plan for here")
    monkeypatch.setattr(_native, "_trim", lambda *_: raw(heap=1))
    monkeypatch.setattr(
        trimming, "plan", lambda _: Plan(99.0, "it would take 99 ms", "stall", Look(1, 1))
    )
    trimming.run("test", 0, 20.0)
    samples = scrape(registry)
    assert samples["arena_trim_skips_total", ("stall",)] == 1
    assert samples["arena_trim_worst_stall_seconds", ()] == 0


def test_the_figures_of_a_trimmer_are_told_while_it_runs(registry: CollectorRegistry) -> None:
    if lib.arena_heap_kind() == lib.ARENA_HEAP_NONE:
        pytest.skip("no thread is started here")
    own = ("arena_trimmer_refault_ratio", "arena_trimmer_backoff")
    idle = scrape(registry)
    with arena.Trimmer(every=1000, growth=None, every_ticks=None):
        running = scrape(registry)
    after = scrape(registry)
    for samples, runs in ((idle, 0), (running, 1), (after, 0)):
        assert samples["arena_trimmer_running", ()] == runs
        for name in own:
            assert ((name, ()) in samples) == bool(runs)
    assert running["arena_trimmer_backoff", ()] == 1


def test_collecting_does_not_look_at_the_heap(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the heap was looked at")

    monkeypatch.setattr(_native, "_heap_figures", never)
    monkeypatch.setattr(_native, "_trim", never)
    assert scrape(registry)["arena_resident_bytes", ()] > 1 << 20


def test_where_there_is_no_proc_resident_memory_is_left_out(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arena._proc.PROC", "/nowhere")
    samples = scrape(registry)
    assert ("arena_resident_bytes", ()) not in samples
    assert ("arena_ticks_total", ()) in samples


def test_a_second_collector_in_a_registry_is_refused(registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(telemetry.Collector())


@pytest.fixture
def serving() -> Iterator[subprocess.Popen[str]]:
    code = """
        import sys, arena, arena.telemetry
        from prometheus_client import CollectorRegistry, start_http_server
        registry = CollectorRegistry()
        registry.register(arena.telemetry.Collector())
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        print(server.server_port, flush=True)
        for line in sys.stdin:
            for _ in range(int(line)):
                with arena.tick("work") as tick:
                    tick.alloc(10_000)
            print("done", flush=True)
        server.shutdown()
        server.server_close()
        thread.join()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_process_that_ticks_is_scraped_over_http(serving: subprocess.Popen[str]) -> None:
    assert serving.stdin is not None
    assert serving.stdout is not None
    port = int(serving.stdout.readline())

    def over_http() -> Samples:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert answer.status == 200
            return parsed(answer.read().decode())[0]

    before = over_http()
    assert before["arena_ticks_total", ()] == 0
    print(500, file=serving.stdin, flush=True)
    assert serving.stdout.readline() == "done\n"
    after = over_http()
    assert after["arena_ticks_total", ()] == 500
    assert after["arena_scratch_peak_bytes", ()] == 10_000
    assert after["arena_scratch_bytes", ()] == before["arena_scratch_bytes", ()] == 0
    assert 1 << 20 < after["arena_resident_bytes", ()] < 1 << 30


def test_without_prometheus_client_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"^prometheus_client is missing: pip install "):
        telemetry.Collector()


def test_opentelemetry_sees_the_same_figures_in_its_own_words() -> None:
    base = arena.stats().scratch
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    try:
        telemetry.observe(provider.get_meter("arena"))
        with arena.tick() as tick:
            tick.alloc(4321)
            data = reader.get_metrics_data()
        assert data is not None
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        found = {metric.name: metric for metric in scope.metrics}
        scratch = found["arena.scratch"]
        assert scratch.unit == "By"
        assert not scratch.data.is_monotonic
        assert [point.value for point in scratch.data.data_points] == [base + 4321]
        ticks = found["arena.ticks"]
        assert ticks.data.is_monotonic
        assert ticks.data.data_points[0].value == arena.stats().ticks_ended - 1
        policies = found["arena.retention.policy"].data.data_points
        assert dict(policies[0].attributes) == {"name": "", "policy": "adaptive"}
        assert found["arena.trim.time"].unit == "s"
        with arena.tick():
            pass
        again = reader.get_metrics_data()
        assert again is not None
        metrics = again.resource_metrics[0].scope_metrics[0].metrics
        (now,) = next(one for one in metrics if one.name == "arena.scratch").data.data_points
        assert now.value == base
    finally:
        provider.shutdown()


def test_opentelemetry_is_told_of_each_registry_too() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    try:
        telemetry.observe(provider.get_meter("arena"))
        with arena.Requests("seen by OpenTelemetry") as requests:
            requests.open("delivered").discard()
            requests.open("open").strdup("x" * 77)
            data = reader.get_metrics_data()
        assert data is not None
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        told = {
            metric.name: point.value
            for metric in metrics
            for point in metric.data.data_points
            if point.attributes == {"registry": "seen by OpenTelemetry"}
        }
        assert told["arena.requests"] == 2
        assert told["arena.requests.open"] == 1
        assert told["arena.requests.scratch"] == 77
        assert told["arena.requests.discarded"] == 1
        assert "arena.requests.limit" not in told
    finally:
        provider.shutdown()


def test_what_is_no_meter_is_refused_in_one_line() -> None:
    with pytest.raises(TypeError, match=r"takes an OpenTelemetry Meter.* not 'a meter'"):
        telemetry.observe("a meter")  # type: ignore[arg-type]


def test_import_arena_loads_nothing_that_a_loop_never_needs() -> None:
    code = (
        "import sys, arena; dear = 'arena.telemetry', 'arena.diagnosis', 'arena.tuning', "
        "'asyncio', 'prometheus_client', 'opentelemetry'; "
        "print([name for name in dear if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_each_trim_is_a_record_of_one_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "arena"):
        result = trimming.run("the test's", 0, None)[0]
    assert isinstance(result, TrimResult)
    assert [(record.name, record.levelno) for record in caplog.records] == [
        ("arena", logging.DEBUG)
    ]
    assert caplog.records[0].getMessage() == f"trim (the test's): {result}"


def test_nothing_is_printed_even_when_a_trim_fails() -> None:
    code = """
        import time, arena
        from arena import trimmer
        failed = []
        def fail(*_):
            failed.append(1)
            raise ValueError("out of luck")
        trimmer.run = fail
        arena.trim()
        with arena.Trimmer(every=0.01, cooldown=0.01):
            while not failed and trimmer.active():
                time.sleep(0.01)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_totals_lose_no_trim_of_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimming, "_totals", Totals())
    monkeypatch.setattr(_native, "_trim", lambda *_: raw())
    plus = Totals.plus

    def slow(self: Totals, result: TrimResult, skipped: str) -> Totals:
        time.sleep(0.001)  # long enough for the others to come in between
        return plus(self, result, skipped)

    monkeypatch.setattr(Totals, "plus", slow)

    def work() -> None:
        for _ in range(10):
            trimming.run("test", 0, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trimming.totals().trims == 40

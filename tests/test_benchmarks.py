"""The benchmarks run and write what they promise; how fast anything is, no test asks."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arena._native import lib

ROOT = Path(__file__).resolve().parent.parent


def benchmarks(*args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT,
        env=None if path is None else {**os.environ, "PATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def figures(path: Path, *args: str) -> list[dict[str, Any]]:
    done = benchmarks(*args, "--json", str(path))
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written.keys() == {"machine", "rows"}
    assert written["machine"].keys() >= {"cpu", "cores", "python", "arena", "gc"}
    rows: list[dict[str, Any]] = written["rows"]
    for row in rows:
        assert row.keys() == {"bench", "case", "contender", "value", "unit"}
    return rows


@pytest.mark.parametrize(
    ("name", "case", "expected"),
    [
        (
            "scratch",
            "1000 pieces, append",
            {
                "arena append",
                "arena +=",
                "arena write",
                "limit",
                "StringIO + encode",
                "list + join + encode",
                "bytearray += encoded",
                "BytesIO.write encoded",
            },
        ),
        (
            "tick",
            "with tick(): pass",
            {
                "arena",
                "limit",
                "slotted Python no-op",
                "contextlib.nullcontext",
                "@contextmanager",
                "ContextVar set + reset alone",
            },
        ),
    ],
)
def test_a_quick_run_writes_a_row_for_arena_the_limit_and_each_peer(
    tmp_path: Path, name: str, case: str, expected: set[str]
) -> None:
    rows = figures(tmp_path / "rows.json", name, "--quick")
    assert {row["bench"] for row in rows} == {name}
    assert {row["contender"] for row in rows if row["case"] == case} >= expected
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    for one in cases.values():
        contenders = [row["contender"] for row in one]
        assert len(contenders) == len(set(contenders))
        assert contenders.count("limit") == 1
        assert any(contender.split()[0].rstrip(",") == "arena" for contender in contenders)
        assert len({row["unit"] for row in one}) == 1
        assert one[0]["unit"] in {"ns", "us", "ms"}
        assert all(row["value"] > 0 for row in one)


def test_a_steady_run_stays_flat_and_is_measured_at_each_checkpoint(tmp_path: Path) -> None:
    rows = figures(tmp_path / "rows.json", "steady", "--ticks", "4000")
    resident = {row["case"]: row["value"] for row in rows if row["unit"] == "MB"}
    assert list(resident) == ["resident memory at 1000 ticks", "resident memory at 4000 ticks"]
    first, last = resident.values()
    assert 1 < first < 200
    assert last - first < 1
    calls = [row["value"] for row in rows if row["case"] == "system calls per tick"]
    assert all(abs(value) < 0.1 for value in calls)  # empty where strace may not run


def test_a_steady_run_says_so_when_system_calls_cannot_be_counted(tmp_path: Path) -> None:
    done = benchmarks("steady", "--ticks", "20", path=tmp_path)
    assert done.returncode == 0
    assert "not counted, strace is not installed" in done.stdout
    refusing = tmp_path / "strace"
    refusing.write_text("#!/bin/sh\necho 'ptrace: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    done = benchmarks("steady", "--ticks", "20", path=tmp_path)
    assert done.returncode == 0
    assert "ptrace: Operation not permitted" in done.stdout


def test_objects_in_ticks_are_measured_beside_plain_and_tuned_allocators(tmp_path: Path) -> None:
    rows = figures(tmp_path / "rows.json", "objects", "--quick", "--ticks", "8")
    seen = {(row["case"], row["contender"]): row["value"] for row in rows}
    for contender in ("plain", "malloc_trim every 10 s", "MALLOC_ARENA_MAX=2", "objects=True"):
        assert 0 < seen["wall", contender] < 60
        assert 10 < seen["rest", contender] <= seen["peak", contender] < 1000


def test_the_cost_of_each_source_is_measured_in_a_small_and_a_large_process(tmp_path: Path) -> None:
    rows = figures(tmp_path / "rows.json", "sources", "--quick")
    assert len(rows) == 8 * 3
    assert {row["unit"] for row in rows} == {"ms"}
    assert all(row["value"] > 0 for row in rows)
    named = {row["case"].partition(",")[0] for row in rows}
    assert named >= {"statm", "status", "cgroup", "rollup", "heap", "heaps", "objects", "arena"}


glibc = pytest.mark.skipif(
    lib.arena_heap_kind() != lib.ARENA_HEAP_GLIBC, reason="compares with recipes for glibc"
)


def by_contender(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    return {(row["case"], row["contender"]): row["value"] for row in rows}


@glibc
def test_trims_of_each_heap_are_measured_beside_the_recipe_by_hand(tmp_path: Path) -> None:
    seen = by_contender(figures(tmp_path / "rows.json", "trim", "--quick"))
    contenders = ("malloc_trim by ctypes", "arena.trim()")
    for block, share in itertools.product(("64 KB", "512 B"), ("15/16", "3/4")):
        case = f"16 MB in blocks of {block}, {share} freed"
        for contender in (*contenders, "arena.trim(budget_ms=20)"):
            assert seen[f"{case}: time", contender] > 0
            assert seen[f"{case}, again: time", contender] > 0
            assert abs(seen[f"{case}, again: came back", contender]) < 1  # MB
    for contender in contenders:
        assert seen["16 MB in blocks of 64 KB, 15/16 freed: came back", contender] > 12
        # The return code says 1 all the same.
        assert abs(seen["16 MB in blocks of 512 B, 3/4 freed: came back", contender]) < 4
        assert seen["16 MB in blocks of 512 B, 3/4 freed: code", contender] == 1
        assert seen["16 MB in blocks of 64 KB, 15/16 freed, again: code", contender] == 1
    gap = "16 MB in blocks of 64 KB: worst gap of another thread that"
    for what in ("allocates", "forks", "calls mallinfo2", "does none of it"):
        assert seen[f"{gap} {what}", "malloc_trim by ctypes.PyDLL"] > 0
        assert seen[f"{gap} {what}", "arena.trim()"] > 0


@glibc
def test_stalls_of_a_loop_are_measured_beside_the_recipe_by_hand(tmp_path: Path) -> None:
    seen = by_contender(figures(tmp_path / "rows.json", "stall", "--quick"))
    case = "a heap of 16 MB"
    for contender in (
        "arena.Trimmer",
        "trim_async(budget_ms=20)",
        "malloc_trim on the loop",
        "malloc_trim in a thread",
    ):
        assert seen[f"{case}: worst gap", contender] >= seen[f"{case}: 99 of 100 gaps", contender]
        assert seen[f"{case}: 99 of 100 gaps", contender] >= 1
        assert seen[f"{case}: came back", contender] > 10
    assert seen[f"{case}: came back", "nothing trims"] < 2
    assert seen[f"{case}: free but resident", "nothing trims"] > 10


@glibc
def test_what_stays_of_threads_is_measured_by_what_malloc_was_told(tmp_path: Path) -> None:
    seen = by_contender(figures(tmp_path / "rows.json", "tune", "--quick"))
    assert len({contender for _, contender in seen}) == 9
    assert seen["stays", "default"] > 20
    assert seen["stays", "os.environ from inside"] > 20
    assert seen["stays", "arena.tune()"] < 10
    assert seen["stays", 'arena.tune(mmap_threshold="1 MiB")'] < 10
    for (case, _), value in seen.items():
        assert case != "peak" or 20 < value < 1000


@glibc
def test_a_spike_is_followed_until_it_is_back(tmp_path: Path) -> None:
    seen = by_contender(figures(tmp_path / "rows.json", "spike", "--quick"))
    assert seen["resident memory after 0 small ticks", "arena, in pieces"] > 40
    assert 0 < seen["back within 10 %", "arena, in pieces"] <= 32
    assert seen["back within 10 %", "arena, one piece"] == 0
    assert ("back within 10 %", "list") not in seen
    assert seen["resident memory after 64 small ticks", "list"] > 40
    assert 0 < seen["back within 10 %", "list, malloc_trim each 16"] < 17
    giving = "madvise and munmap per tick, once it is back"
    if (giving, "arena, in pieces") in seen:  # strace may run here
        assert seen[giving, "arena, in pieces"] == seen[giving, "arena, one piece"] == 0
        assert seen[giving, "list, malloc_trim each 16"] > 0


@glibc
def test_bodies_are_measured_as_they_come_in_beside_what_the_frameworks_do(tmp_path: Path) -> None:
    seen = by_contender(figures(tmp_path / "rows.json", "bodies", "--quick"))
    for contender in ("arena.asgi", "arena.aiohttp"):
        assert 16 < seen["whole: peak over the base", contender] < 1.25 * 16.8
        assert 16 < seen["refused: peak over the base", contender] < 20
        for case in ("whole", "refused"):
            assert seen[f"{case}: left over the base", contender] < 2
    assert seen["whole: peak over the base", "starlette request.body()"] > 30
    assert seen["refused: peak over the base", "starlette request.body()"] > 60
    assert seen["refused: peak over the base", "body += piece, aiohttp"] > 30


def test_the_churn_of_bodies_is_measured_from_outside(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    drawn = tmp_path / "churn.png"
    more = ("--only", "keep,arena", "--plot", str(drawn))
    seen = by_contender(figures(tmp_path / "rows.json", "churn", "--quick", *more))
    for contender in ("keep", "arena"):
        base, peak = seen["base", contender], seen["peak", contender]
        assert 10 < base < seen["resting", contender] <= peak < 1000
        assert seen["cpu", contender] > 0
        assert seen["loop gap", contender] > 0
        assert seen["hung", contender] == 0
        assert seen["at rest: heap used", contender] > 1
    # 36 bodies of 1 MB on average, and eight that failed, against four at a time.
    assert seen["peak", "keep"] - seen["base", "keep"] > 45
    assert seen["peak", "arena"] - seen["base", "arena"] < 40
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name", ["discard/jemalloc", "keep/mimalloc", "keep/2 heaps", "discard+trim", "arena+objects"]
)
def test_a_variant_of_the_churn_runs_with_what_it_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.churn.measure import running
    from benchmarks.churn.variants import VARIANTS

    variant = VARIANTS[name]
    if variant.missing:
        pytest.skip(variant.missing)
    with running(variant) as site:
        process = Path(f"/proc/{site.server._process.pid}")
        mapped = (process / "maps").read_text()
        heaps = b"MALLOC_ARENA_MAX=2" in (process / "environ").read_bytes().split(b"\0")
        trims, rest = site.server.ask("trimmer"), site.server.ask("rest")
        figures = site.server.ask("figures")
    assert [lib for lib in ("jemalloc", "mimalloc") if f"lib{lib}" in mapped] == (
        [variant.library] if variant.library else []
    )
    assert heaps == (name == "keep/2 heaps")
    assert (trims is not None and trims["running"]) == (name == "discard+trim")
    assert (rest["captured"] > 0) == (name == "arena+objects")
    assert (figures["open"], figures["tasks"], figures["hung"]) == (0, 0, 0)


def test_a_variant_whose_library_is_missing_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from rich.console import Console

    from benchmarks._report import Options, Report
    from benchmarks.churn import variants
    from benchmarks.churn.compare import chosen

    monkeypatch.setattr(variants.ctypes.util, "find_library", lambda name: None)
    said = io.StringIO()
    found = chosen(Options(), Report(Console(file=said, width=200)))
    names = [one.name for one in found]
    assert {"keep", "arena", "keep/2 heaps"} < set(names)
    assert not any("malloc" in name for name in names)
    assert "keep/jemalloc: left out, libjemalloc is not installed" in said.getvalue()


def test_a_child_that_ends_too_early_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import UnavailableError
    from benchmarks._child import Child

    with (
        pytest.raises(UnavailableError, match=r"_spike_child pieces: exit code 1 at 'nonsense'"),
        Child("_spike_child", "pieces", stderr=subprocess.DEVNULL) as child,
    ):
        child.ask("nonsense")


def test_the_slope_detector_is_measured_beside_simpler_ones_on_series_of_all_kinds(
    tmp_path: Path,
) -> None:
    rows = figures(tmp_path / "rows.json", "slope", "--quick")
    seen = {(row["case"], row["contender"]): row["value"] for row in rows}
    kinds = [
        case
        for case, contender in seen
        if contender == "least squares" and not case.startswith("all: ")
    ]
    assert len(kinds) == 26
    for kind in kinds:
        for contender in ("arena", "last minus first", "least squares"):
            assert 0 <= seen[kind, contender] <= 2
    in_all = ["all: false alarms", "all: misses"]
    for contender in ("arena", "last minus first", "least squares"):
        assert sum(seen[case, contender] for case in in_all) == sum(
            seen[kind, contender] for kind in kinds
        )
    assert seen["all: false alarms", "arena"] < seen["all: false alarms", "least squares"]
    for kind in ("level", "few steps", "warm-up", "leak, in lumps", "regular steps"):
        assert seen[kind, "arena"] == 0  # made up from seeds, so always the same


def test_without_a_name_the_benchmarks_are_listed_with_a_sentence_each() -> None:
    done = benchmarks()
    assert done.returncode == 0
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert listed.keys() >= {"scratch", "tick", "steady", "trim", "stall", "tune", "spike"}
    assert all(sentence.endswith(".") for sentence in listed.values())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["nonsense"], "nonsense"),
        (["tick", "nonsense"], "nonsense"),
        (["tick", "--loud"], "--loud"),
        (["steady", "--ticks", "0"], "--ticks"),
        (["steady", "--ticks", "many"], "--ticks"),
        (["tick", "--json", "no/such/folder/rows.json"], "no/such/folder/rows.json"),
        (["churn", "--plot", "no/such/folder/drawn.png"], "no/such/folder/drawn.png"),
        (["churn", "--only", "keep,nonsense"], "nonsense"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(args: list[str], named: str) -> None:
    done = benchmarks(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_a_missing_extra_is_named_in_one_line_and_exit_code_2() -> None:
    # What is None in sys.modules cannot be imported.
    code = (
        "import runpy, sys; sys.modules['psutil'] = None; "
        "runpy.run_module('benchmarks', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "benchmarks: psutil is missing: pip install -e '.[test]'\n"


def test_contenders_that_disagree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import scratch
    from benchmarks._timing import Kind

    jobs: dict[Kind, dict[str, scratch.Job]] = {Kind.ARENA: {"arena append": scratch.arena_append}}
    assert len(scratch.contend(jobs, ["a", "b"], b"ab")) == 1
    with pytest.raises(AssertionError, match="arena append"):
        scratch.contend(jobs, ["a", "b"], b"abc")

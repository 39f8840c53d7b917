"""``python -m arena demo`` as a user runs it: real processes, and what can go wrong."""

from __future__ import annotations

import gzip
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from arena.cli._feed import generated, read
from arena.cli._loop import Progress
from arena.cli._mind import EDGES, NODES, SCRATCH, Mind, Permanent
from arena.cli._report import Series, projection, verdict

KEYS = {
    "name",
    "ticks",
    "scratch_per_tick",
    "rss_start_mb",
    "rss_end_mb",
    "growth_mb_per_min",
    "ci95",
    "state_ok",
}
ENV = {**os.environ, "COLUMNS": "100"}
ENV.pop("FORCE_COLOR", None)


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "arena", "demo", *map(str, args)]


def demo(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, env=ENV, timeout=60)


def start(*args: object) -> tuple[subprocess.Popen[str], dict[str, psutil.Process]]:
    """Start the demo in a process group of its own, and return it with its children by name."""
    process = subprocess.Popen(
        command("--seconds", 60, "--rate", 20, *args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
        process_group=0,
    )
    assert process.stdout
    while "0.0 s: unscoped" not in process.stdout.readline():
        assert process.poll() is None
    children = psutil.Process(process.pid).children()
    return process, {child.cmdline()[-2]: child for child in children}


def assert_gone(children: dict[str, psutil.Process]) -> None:
    assert set(children) == {"unscoped", "ticked"}
    _, alive = psutil.wait_procs(children.values(), timeout=10)
    assert not alive


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of file that an input can hold."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "small.json").write_text('{"name": "small"}')
    (folder / "deep" / "large.json").write_text(
        json.dumps({"long": "ö" * 50_000, "many": [{"n": n, "half": "\ud800"} for n in range(999)]})
    )
    (folder / "deep" / "er" / "packed.json.gz").write_bytes(gzip.compress(b'["packed", 1e999]'))
    (folder / "broken.json").write_text('{"name":')
    (folder / "torn.json.gz").write_bytes(gzip.compress(b"[1, 2, 3]" * 99)[:-9])
    (folder / "nested.json").write_text("[" * 100_000 + "]" * 100_000)
    (folder / "notes.txt").write_text("no JSON")
    os.mkfifo(folder / "pipe.json")
    return folder


@pytest.fixture(scope="module")
def figures(
    tmp_path_factory: pytest.TempPathFactory, documents: Path
) -> tuple[str, dict[str, dict[str, object]], bytes]:
    """One run with everything on: its output, its runs by name, its picture."""
    folder = tmp_path_factory.mktemp("figures")
    target, picture = folder / "demo.json", folder / "demo.png"
    result = demo(
        "--seconds", 5, "--rate", 40, "--json", target, "--plot", picture, "--input", documents
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert {path.name for path in folder.iterdir()} == {"demo.json", "demo.png"}
    report = json.loads(target.read_text())
    assert set(report) == {"runs"}
    return result.stdout, {run["name"]: run for run in report["runs"]}, picture.read_bytes()


def test_the_json_file_has_both_runs_with_every_key(figures) -> None:
    _, runs, _ = figures
    assert list(runs) == ["unscoped", "ticked"]
    for run in runs.values():
        assert set(run) == KEYS
        assert 0 < run["ticks"] <= 5 * 40 + 10
        assert run["scratch_per_tick"] == pytest.approx(117_000, rel=0.01)
        assert run["ci95"][0] <= run["growth_mb_per_min"] <= run["ci95"][1]
        assert run["state_ok"] is True


def test_the_unscoped_run_grows_by_its_scratch(figures) -> None:
    _, runs, _ = figures
    unscoped = runs["unscoped"]
    kept = unscoped["scratch_per_tick"] * unscoped["ticks"] / 1e6
    assert unscoped["rss_end_mb"] - unscoped["rss_start_mb"] == pytest.approx(kept, rel=0.25)
    assert unscoped["growth_mb_per_min"] == pytest.approx(kept / 5 * 60, rel=0.25)


def test_the_ticked_run_keeps_next_to_nothing_of_its_scratch(figures) -> None:
    _, runs, _ = figures
    ticked = runs["ticked"]
    made = ticked["scratch_per_tick"] * ticked["ticks"] / 1e6
    assert ticked["rss_end_mb"] - ticked["rss_start_mb"] < made / 50
    assert ticked["growth_mb_per_min"] < runs["unscoped"]["growth_mb_per_min"] / 50
    assert ticked["rss_end_mb"] < runs["unscoped"]["rss_start_mb"]


def test_the_output_into_a_file_is_plain_and_has_table_and_verdict(figures, documents) -> None:
    output, runs, _ = figures
    ticked = runs["ticked"]
    assert "\x1b" not in output
    assert "\r" not in output
    assert f"3 documents of {documents}" in output
    assert "3 skipped" in output
    assert "warms up for 100 ticks" in output
    for label in ("ticks", "scratch per tick", "resident at end", "growth", "95 % interval"):
        assert label in output
    assert output.count("yes, every tick") == 2
    assert output.rstrip().endswith((f"{ticked['rss_end_mb']:.1f} MB.", "MB a minute."))


def test_the_picture_is_a_png_1200_pixels_wide(figures) -> None:
    _, _, picture = figures
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") == 1200


@pytest.mark.parametrize("whole_group", [True, False], ids=["to the group", "to the parent alone"])
def test_ctrl_c_prints_the_table_and_leaves_no_child(whole_group: bool, tmp_path: Path) -> None:
    process, children = start("--json", tmp_path / "demo.json")
    time.sleep(1)
    assert all(os.getpgid(child.pid) != process.pid for child in children.values())
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == ""
    assert output.count("yes, every tick") == 2
    assert "Interrupted after" in output
    assert_gone(children)
    assert len(json.loads((tmp_path / "demo.json").read_text())["runs"]) == 2


@pytest.mark.parametrize("name", ["unscoped", "ticked"])
def test_a_killed_child_is_told_in_one_line_and_takes_the_other_along(name: str) -> None:
    process, children = start()
    children[name].kill()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert f"the {name} run" in errors
    assert "SIGKILL" in errors
    assert_gone(children)


def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    process, children = start()
    process.kill()
    process.communicate(timeout=30)
    assert_gone(children)


def test_bars_show_both_runs_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("--seconds", 1, "--rate", 20),
        stdout=theirs,
        stderr=theirs,
        env={**ENV, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    while process.poll() is None:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # what Linux says when the other side is closed
            break
    os.close(ours)
    assert process.wait(30) == 0
    assert b"\x1b[" in seen
    assert b"ticks" in seen
    assert seen.rstrip().endswith(b".")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "inf"], "--seconds"),
        (["--seconds", "0.1"], "--seconds"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "fast"], "--rate"),
        (["--input", "/no/such/file"], "--input"),
        (["--json", "/no/such/folder/demo.json"], "--json"),
        (["--plot", "/no/such/folder/demo.png"], "--plot"),
        (["--plot", "demo.tiff"], "--plot"),
        (["--what"], "--what"),
        (["two\nlines"], "two lines"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_is_one_line_before_anything_runs(args: list[str], word: str) -> None:
    result = demo(*args)
    assert_one_line(result, word)
    assert result.stdout == ""


def test_what_is_not_a_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_one_line(demo("--json", tmp_path / "pipe"), "not a regular file")
    assert_one_line(demo("--json", tmp_path), "not a regular file")
    assert_one_line(demo("--json", "/"), "not a regular file")
    assert (tmp_path / "pipe").is_fifo()


def test_one_file_for_two_outputs_is_one_line(tmp_path: Path) -> None:
    both = tmp_path / "both.png"
    assert_one_line(demo("--json", both, "--plot", both), "named twice")
    assert list(tmp_path.iterdir()) == []


def test_a_plain_kill_leaves_no_child_and_no_draft(tmp_path: Path) -> None:
    process, children = start("--json", tmp_path / "demo.json")
    process.terminate()
    process.communicate(timeout=30)
    assert_gone(children)
    assert not [path for path in tmp_path.iterdir() if path.name != "demo.json"]


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("--seconds", 1), stdout=full, stderr=subprocess.PIPE, text=True, env=ENV
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "No space left" in done.stderr


def test_a_tick_that_finds_the_state_broken_is_counted_by_the_child_and_told() -> None:
    code = (
        "from arena.cli import _loop, _mind; turn = _mind.Mind.turn;"
        "_mind.Mind.turn = lambda self, scratch, n: turn(self, scratch, n) and n not in (3, 5);"
        "_loop._run(_loop.RUNS['ticked'](), 100.0)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin
    assert child.stdout
    child.stdin.write("".join(f"{record}\n" for record in generated().records) + "\n\n")
    child.stdin.flush()
    for line in child.stdout:
        progress = Progress(**json.loads(line))
        if progress.ticks == 8:
            break
    child.stdin.close()
    child.stdout.read()
    child.stdout.close()
    assert child.wait(timeout=30) == 0
    assert progress.broken == 2
    assert not Series("ticked", progress).state_ok


def test_input_without_any_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "notes.txt").write_text("1")
    assert_one_line(demo("--input", tmp_path), "no usable JSON", "1 skipped")
    assert_one_line(demo("--input", tmp_path / "broken.json"), "no usable JSON")


def test_output_is_left_as_it_was_when_the_input_is_bad(tmp_path: Path) -> None:
    target = tmp_path / "demo.json"
    target.write_text("before")
    assert_one_line(demo("--json", target, "--input", "/no/such/file"), "--input")
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("module", "extra"), [("rich", "cli"), ("psutil", "cli"), ("matplotlib", "plot")]
)
def test_a_missing_extra_is_named_in_one_line(module: str, extra: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from arena.cli import main\n"
        f"sys.exit(main(['demo', '--plot', {str(tmp_path / 'demo.png')!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert_one_line(result, f"pip install 'tick-arena[{extra}]'")


def test_without_a_command_help_is_printed_and_no_extra_is_needed() -> None:
    code = (
        "import sys; sys.modules['rich'] = sys.modules['psutil'] = None\n"
        "from arena.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for args, word in (([], "demo"), (["--version"], "tick-arena "), (["demo", "-h"], "--rate")):
        result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        assert word in result.stdout


def test_each_turn_uses_the_same_scratch_in_a_tick_and_outside() -> None:
    import arena

    ticked, unscoped = Mind(generated().records), Mind(generated().records)
    permanent = Permanent()
    for number in range(40):
        with arena.tick() as scratch:
            assert ticked.turn(scratch, number)
            used = scratch.used
        assert unscoped.turn(permanent.begin(), number)
        assert used == permanent.used == SCRATCH
    assert {key: bytes(ticked.store[key]) for key in ticked.store} == {
        key: bytes(unscoped.store[key]) for key in unscoped.store
    }


def test_a_lost_node_and_a_doubled_edge_are_noticed() -> None:
    import arena

    mind = Mind(generated().records)
    assert sum(key.startswith("node:") for key in mind.store) == NODES
    nodes = [json.loads(bytes(mind.store[f"node:{n}"])) for n in range(NODES)]
    assert sum(len(node["to"]) for node in nodes) == EDGES
    linked = next(node for node in nodes if len(node["to"]) > 1)
    lonely = next(node for node in nodes if not node["to"])

    def whole() -> bool:
        with arena.tick() as scratch:
            return mind.turn(scratch, 50)

    assert whole()
    doubled = {**linked, "to": [linked["to"][0], *linked["to"][:-1]]}
    mind.store[f"node:{linked['id']}"] = json.dumps(doubled)
    assert not whole()
    mind.store[f"node:{linked['id']}"] = json.dumps(linked)
    assert whole()
    del mind.store[f"node:{lonely['id']}"]
    assert not whole()


@pytest.mark.parametrize("text", ["1", '""', '{"a": [null]}', json.dumps("x" * 30_000)])
def test_any_json_document_fills_a_tick(text: str, tmp_path: Path) -> None:
    import arena

    path = tmp_path / "one.json"
    path.write_text(text)
    mind = Mind(read(path).records)
    for number in range(3):
        with arena.tick() as scratch:
            assert mind.turn(scratch, number)
            assert scratch.used == SCRATCH


def test_the_verdict_says_what_the_figures_say() -> None:
    def series(name: str, *megabytes: float) -> Series:
        done = Progress(ticks=100, scratch=11_700_000)
        return Series(name, done, [float(n) for n in range(len(megabytes))], list(megabytes))

    grows = series("unscoped", *(30 + n for n in range(20)))
    flat = series("ticked", *[17.5] * 20)
    assert verdict(grows, flat).endswith(
        "reaches 1.5 GB in 24 minutes; with each tick in "
        "arena.tick() the same loop stays at 17.5 MB."
    )
    assert "grew too, by 60.00 MB" in verdict(grows, series("ticked", *range(20)))
    assert "too short" in verdict(grows, series("ticked", 17.5, 17.5))
    assert "too short" in verdict(series("unscoped", *[30, 31] * 10), flat)
    flat.progress.broken = 1
    assert "lost state" in verdict(grows, flat)
    assert projection(series("unscoped", *(1_490 + n for n in range(20)))) == "reached"

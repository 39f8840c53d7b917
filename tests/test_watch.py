"""``python -m arena watch`` as a user runs it: real processes, and what can go wrong."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from arena import _proc
from arena.cli import UsageError, _watched, main
from arena.cli._watch_live import spark
from arena.cli._watch_report import Rate, as_json, found, left, lines, span
from arena.cli._watched import Command, Sample, Samples, Watched

ENV = {**os.environ, "COLUMNS": "100"}
ENV.pop("FORCE_COLOR", None)
ENV.pop("ARENA_EXPORT", None)
MB = 1_000_000

LEAKS = """
import arena
kept = []
for tick in arena.ticks(interval=0.002):
    kept.append(bytearray(1000))
"""
LEVEL = """
import arena
for tick in arena.ticks(interval=0.002):
    tick.alloc(1000)
"""


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "arena", "watch", *map(str, args)]


def watch(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, env=ENV, timeout=60)


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture
def sleeper():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def leak(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A leak of 1 kB a tick that is watched for some 3,000 ticks, with everything on."""
    folder = tmp_path_factory.mktemp("leak")
    result = watch(
        "--for", "7s", "--every", "20ms", "--limit", "1 GiB", "--fail-above", "500 B/tick",
        "--json", folder / "watch.json", "--plot", folder / "watch.html",
        "--", sys.executable, "-c", LEAKS,
    )  # fmt: skip
    return result, folder


def test_a_kilobyte_a_tick_is_found_and_fails_a_watch_that_allows_half_of_it(leak) -> None:
    result, folder = leak
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert "exceeded" in result.stderr
    figures = json.loads((folder / "watch.json").read_text())
    assert figures["state"] == "growing"
    assert figures["fail_above"] == {"bytes": 500, "per": "tick", "failed": True}
    assert figures["ticks"] > 500
    assert 900 < figures["per_tick"]["slope"] < 1500
    assert figures["per_tick"]["low"] < figures["per_tick"]["slope"] < figures["per_tick"]["high"]
    assert figures["per_minute"]["state"] == "growing"
    left_over = (1 << 30) - figures["resident"]["last"]
    assert figures["seconds_to_limit"] == pytest.approx(
        left_over / figures["per_minute"]["slope"] * 60
    )
    assert figures["command"][0] == sys.executable
    assert figures["exit_status"] == -signal.SIGTERM
    series = figures["series"]
    assert len({len(values) for values in series.values()}) == 1
    assert series["resident"][-1] == figures["resident"]["last"]
    assert figures["faults"]["minor"] == series["minor"][-1] - series["minor"][0] > 0
    assert series["ticks"][-1] > 500


def test_the_page_shows_curve_and_report_and_loads_and_runs_nothing(leak) -> None:
    _, folder = leak
    page = (folder / "watch.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|src=|url\(|http", page.replace("http-equiv", ""))
    points = re.search(r'<polyline points="([^"]+)"', page)
    assert points
    assert len(points[1].split()) > 100
    assert "<line" in page
    for words in ("growing", "by tick", "1.0 GiB (--limit)"):
        assert words in page


def test_the_report_is_plain_lines_with_what_was_seen(leak) -> None:
    result, _ = leak
    assert "\x1b" not in result.stderr
    for label in ("resident", "state", "by time", "by tick", "limit", "page faults", "cost"):
        assert re.search(rf"^  {label} ", result.stderr, re.M)
    assert re.search(r"state +growing", result.stderr)
    assert "1.0 GiB (--limit): in" in result.stderr


def test_a_level_loop_is_flat_and_passes(tmp_path: Path) -> None:
    target = tmp_path / "watch.json"
    result = watch(
        "--for", "4s", "--every", "20ms", "--fail-above", "100 B/tick", "--json", target,
        "--", sys.executable, "-c", LEVEL,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(target.read_text())
    assert figures["state"] == "flat"
    assert figures["fail_above"]["failed"] is False
    assert figures["seconds_to_limit"] is None
    assert list(tmp_path.iterdir()) == [target]


def test_a_command_keeps_its_output_and_its_status_is_told(tmp_path: Path) -> None:
    target = tmp_path / "watch.json"
    code = (
        "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(.5); sys.exit(7)"
    )
    result = watch("--every", "50ms", "--json", target, "--", sys.executable, "-c", code)
    assert result.returncode == 0
    assert result.stdout == "out\n"
    assert "err\n" in result.stderr
    assert "the command has ended with exit status 7" in result.stderr
    figures = json.loads(target.read_text())
    assert figures["exit_status"] == 7
    assert figures["ended"] == "the command has ended with exit status 7"
    assert figures["ticks"] is None
    assert "does not show its ticks" in figures["ticks_unknown"]


def test_a_command_that_ends_at_once_is_no_error() -> None:
    result = watch("--", "true")
    assert result.returncode == 0
    assert "exit status 0" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_that_a_signal_ends_is_named_by_it() -> None:
    code = "import os, time; time.sleep(.3); os.kill(os.getpid(), 9)"
    result = watch("--every", "50ms", "--", sys.executable, "-c", code)
    assert "ended by SIGKILL" in result.stderr


def test_a_process_that_ends_meanwhile_is_reported_as_far_as_it_was_seen(sleeper) -> None:
    process = subprocess.Popen(
        command("--every", "50ms", sleeper.pid), stdout=subprocess.PIPE, text=True, env=ENV
    )
    assert process.stdout
    process.stdout.readline()
    process.stdout.readline()
    sleeper.kill()  # a zombie, as nobody waits for it
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert f"ended          process {sleeper.pid} has ended" in output
    assert re.search(r"resident +\d", output)


def test_a_number_that_is_another_process_now_ends_the_watch(
    sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Watched(sleeper.pid) as watched:
        assert watched.look()
        monkeypatch.setattr(_proc, "started", lambda pid: 1)
        assert not watched.look()
        assert len(watched.samples) == 1
    assert watched.ended
    assert "another process" in watched.ended


def test_ctrl_c_ends_watch_and_command_with_a_report(tmp_path: Path) -> None:
    target = tmp_path / "watch.json"
    code = "import time, os; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        command("--for", "60s", "--json", target, "--", sys.executable, "-c", code),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, process_group=0,
    )  # fmt: skip
    assert process.stdout
    pid = int(process.stdout.readline())
    assert os.getpgid(pid) != process.pid
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "arena/cli" not in errors  # what there is of a traceback is the command's
    assert gone(pid)
    figures = json.loads(target.read_text())
    assert figures["interrupted"] is True
    assert figures["exit_status"] in (-signal.SIGINT, 130, 1)


def test_ctrl_c_is_the_way_to_end_a_watch_without_a_time(sleeper) -> None:
    process = subprocess.Popen(
        command("--every", "50ms", sleeper.pid), stdout=subprocess.PIPE, text=True, env=ENV
    )
    assert process.stdout
    process.stdout.readline()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "state " in output
    assert sleeper.poll() is None


def test_a_command_that_ignores_signals_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watched, "_PATIENCE", 0.2)
    code = (
        "import signal, time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN);"
        "time.sleep(60)"
    )
    with Command([sys.executable, "-c", code]) as watched:
        time.sleep(0.5)
        assert watched.look()
        watched.end(signal.SIGINT)
        assert watched.status == -signal.SIGKILL


def test_a_plain_kill_of_the_watch_leaves_no_command_and_no_draft(tmp_path: Path) -> None:
    code = "import time, os; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        command("--json", tmp_path / "watch.json", "--", sys.executable, "-c", code),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV,
    )  # fmt: skip
    assert process.stdout
    pid = int(process.stdout.readline())
    time.sleep(0.3)
    process.terminate()
    process.communicate(timeout=30)
    assert gone(pid)
    assert [path.name for path in tmp_path.iterdir()] == ["watch.json"]


def test_json_on_stdout_is_alone_there(sleeper) -> None:
    result = watch("--for", "300ms", "--every", "20ms", "--json", "-", sleeper.pid)
    assert result.returncode == 0
    assert json.loads(result.stdout)["pid"] == sleeper.pid
    assert "resident" in result.stderr


def test_the_picture_is_a_png_1200_pixels_wide(sleeper, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "watch.png"
    result = watch(
        "--for", "500ms", "--every", "20ms", "--limit", "20 MiB", "--plot", target, sleeper.pid
    )
    assert result.returncode == 0, result.stderr
    picture = target.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") == 1200


def test_a_terminal_has_a_live_view(sleeper) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("--for", "2s", "--every", "20ms", sleeper.pid),
        stdout=theirs,
        stderr=theirs,
        env={**ENV, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # what Linux says when the other side is closed
            break
    os.close(ours)
    assert process.wait(30) == 0
    assert b"\x1b[" in seen
    assert "▁".encode() in seen
    assert b"Ctrl-C ends the watch" in seen


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["number of a process", "command"]),
        (["1", "--", "true"], ["either"]),
        (["potato"], ["potato", "--"]),
        (["0"], ["'0'"]),
        (["-7"], ["-7"]),
        (["99999999999999999999"], ["number"]),
        (["4194304"], ["no process 4194304"]),
        (["--", "/no/such/program"], ["/no/such/program", "No such file"]),
        (["--every", "0", "1"], ["--every", "0"]),
        (["--every", "1ms", "1"], ["--every", "10 ms"]),
        (["--every", "nan", "1"], ["--every"]),
        (["--for=-5s", "1"], ["--for", "-5s"]),
        (["--for", "12 potatoes", "1"], ["--for", "12 potatoes", "5m"]),
        (["--limit", "12 potatoes", "1"], ["--limit", "12 potatoes", "64 MiB"]),
        (["--limit", "0", "1"], ["--limit"]),
        (["--fail-above", "12 potatoes/min", "1"], ["--fail-above", "12 potatoes"]),
        (["--fail-above", "1 MiB", "1"], ["--fail-above", "1 MiB/min"]),
        (["--fail-above", "1 MiB/year", "1"], ["--fail-above"]),
        (["--fail-above", "1 kB/tick", "SLEEP"], ["--fail-above", "ARENA_EXPORT=1"]),
        (["--plot", "x.gif", "1"], ["--plot", ".html"]),
        (["--json", "/no/such/folder/x.json", "1"], ["--json"]),
        (["--what", "1"], ["--what"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_is_one_line(args: list[str], words: list[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:  # this process may show its ticks
        try:
            result = watch(*(str(other.pid) if arg == "SLEEP" else arg for arg in args))
        finally:
            other.kill()
    assert_one_line(result, *words)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 60),
        ("60s", 60),
        ("5m", 300),
        ("5 min", 300),
        ("2h", 7200),
        ("500ms", 0.5),
        ("1d", 86400),
        ("0.5s", 0.5),
    ],
)
def test_times_are_read_as_users_write_them(text: str, seconds: float) -> None:
    from arena.cli._values import duration

    assert duration(text) == seconds


def test_no_proc_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(_proc, "PROC", str(tmp_path / "proc"))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["watch", str(os.getpid())]) == 2
    finally:
        signal.signal(signal.SIGTERM, handler)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "no /proc here" in told


def test_a_process_of_another_user_that_hides_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str, pid: int | None = None) -> bytes:
        raise _proc._problem(PermissionError(13, "Permission denied"), pid, path)

    monkeypatch.setattr(_proc, "read", denied)
    with pytest.raises(UsageError, match="no permission to read"):
        Watched(os.getpid())


class Seen(Watched):
    """A watch whose samples are made up; of this process."""

    def __init__(self, resident: list[int], ticks: list[int | None] | None = None) -> None:
        super().__init__(os.getpid())
        self.no_ticks = None if ticks else "none"
        for second, size in enumerate(resident):
            tick = ticks[second] if ticks else None
            self.samples.add(Sample(float(second), size, tick, 10 * second, second, 0, 1, 0))


def told(watched: Watched, limit: int | None = None) -> dict[str, str]:
    return dict(lines(found(watched, limit), watched))


def test_the_time_to_the_limit_is_that_at_the_slope_and_its_interval() -> None:
    watched = Seen([100 * MB + second * MB for second in range(100)])
    one = found(watched, 500 * MB)
    assert one.to_limit == pytest.approx((301 / 60,) * 3)
    assert left(one) == "476.8 MiB (--limit): in 5.0 minutes (5.0 minutes to 5.0 minutes)"
    assert left(found(watched, 150 * MB)).endswith("reached")
    flat = Seen([100 * MB] * 100)
    assert left(found(flat, 500 * MB)).endswith("not at this slope")
    assert "--limit" in left(found(flat, None))
    assert left(found(Seen([100 * MB] * 3), 500 * MB)).endswith("not yet known")
    assert [span(s) for s in (5, 300, 3600 * 5, 86400 * 9, 1e9)] == [
        "5 s", "5.0 minutes", "5.0 hours", "9.0 days", "years",
    ]  # fmt: skip


def test_page_faults_are_told_per_second_of_the_watch() -> None:
    assert told(Seen([MB] * 100))["page faults"] == "10.0 minor/s, 1.00 major/s"


def test_growth_by_ticks_is_growth_also_where_time_says_nothing() -> None:
    # It stands still for most of the time: by time that is a step.
    ticks: list[int | None] = [second if second < 60 else 60 for second in range(300)]
    ticks[200:] = [second - 140 for second in range(200, 300)]
    watched = Seen([100 * MB + 1000 * (tick or 0) for tick in ticks], ticks)
    one = found(watched, None)
    assert one.by_tick is not None
    assert one.by_tick.slope == pytest.approx(1000)
    assert one.state == "growing"
    assert one.over(Rate(999, "tick"))
    assert not one.over(Rate(1001, "tick"))


def test_ticks_that_begin_anew_are_counted_from_there() -> None:
    ticks: list[int | None] = [None, *range(900, 950), *range(49)]
    one = found(Seen([MB] * 100, ticks), None)
    assert one.ticks == 48


def test_a_slope_that_is_not_known_is_null_in_the_json() -> None:
    watched = Seen([MB, 2 * MB])
    text = as_json(
        found(watched, None), watched,
        command=None, status=None, interrupted=False, fail_above=Rate(1, "min"),
    )  # fmt: skip
    figures: dict[str, Any] = json.loads(text)
    assert figures["state"] == "not yet"
    assert figures["per_minute"]["low"] is None
    assert figures["per_tick"] is None
    assert figures["fail_above"]["failed"] is False


def test_a_long_watch_keeps_fewer_samples_at_even_distances_and_the_peak() -> None:
    samples = Samples()
    for second in range(100_000):
        samples.add(Sample(float(second), 9 if second == 12_345 else 1, None, 0, 0, 0, 1, 0))
        assert samples[-1].seconds == second
    assert 4_000 < len(samples) <= 8_193
    assert samples.taken == 100_000
    assert samples.peak == 9
    gaps = {after.seconds - before.seconds for before, after in pairwise(samples[:-1])}
    assert len(gaps) == 1


def test_the_curve_in_the_terminal_shows_the_most_of_each_stretch() -> None:
    assert spark([0, 7, 0, 0], 2) == "█▁"
    assert spark([5, 5], 10) == "▁▁"
    assert spark(list(range(8)), 8) == "▁▂▃▄▅▆▇█"


def test_the_help_has_no_doubled_percent_signs() -> None:
    for command in ("demo", "watch", "doctor", "map", "tune"):
        done = subprocess.run(
            [sys.executable, "-m", "arena", command, "--help"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "%%" not in done.stdout
        assert "%(" not in done.stdout


LEAK = "import time; keep = []\nwhile True: keep.append(bytearray(100_000)); time.sleep(0.005)"


@pytest.mark.parametrize("how", [[], ["--children"]])
def test_what_a_command_starts_is_counted_in(tmp_path: Path, how: list[str]) -> None:
    shell = f"{sys.executable} -c '{LEAK}'; true"
    path = tmp_path / "seen.json"
    done = watch(
        "--for", "4s", "--every", "50ms", "--fail-above", "1 MiB/min", "--json", path, *how,
        "--", "sh", "-c", shell,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"children +1, counted in", done.stderr)
    assert json.loads(path.read_text())["children_counted"] is True


def test_what_is_not_counted_in_is_said_so() -> None:
    shell = f"{sys.executable} -c '{LEAK}'; true"
    done = watch("--for", "2s", "--every", "50ms", "--no-children", "--", "sh", "-c", shell)
    assert done.returncode == 0
    assert re.search(r"children +1, not counted: --children counts them in", done.stderr)
    with subprocess.Popen(["sh", "-c", shell], process_group=0) as process:
        try:
            time.sleep(0.5)
            done = watch("--for", "2s", "--every", "50ms", process.pid)
            assert "1, not counted" in done.stdout
            done = watch("--for", "3s", "--every", "50ms", "--children", process.pid)
            assert re.search(r"state +growing", done.stdout)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_gate_that_cannot_tell_yet_has_a_status_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    path.write_text("OLD")
    sleep = [sys.executable, "-c", "import time; time.sleep(0.6)"]
    done = watch("--every", "100ms", "--fail-above", "1 MiB/min", "--", *sleep)
    assert "not known yet" in done.stderr
    assert done.returncode == 3
    done = watch("--fail-above", "1 MiB/min", "--json", path, "--", "true")
    assert done.returncode == 3
    assert "Nothing was seen: the command has ended with exit status 0." in done.stderr
    told = json.loads(path.read_text())
    assert (told["state"], told["cost"]["samples"], told["exit_status"]) == ("not yet", 0, 0)


def test_a_second_ctrl_c_kills_the_command_at_once_and_the_report_comes(tmp_path: Path) -> None:
    path = tmp_path / "seen.json"
    stubborn = "trap '' INT TERM; while :; do sleep 0.1; done"
    with subprocess.Popen(
        [sys.executable, "-m", "arena", "watch", "--for", "60s", "--every", "50ms",
         "--json", path, "--", "sh", "-c", stubborn],
        stderr=subprocess.PIPE, text=True, process_group=0,
    ) as process:  # fmt: skip
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "by the watch, with status -9" in told
    assert json.loads(path.read_text())["interrupted"] is True


def test_a_closed_terminal_ends_the_command_too() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(
        [sys.executable, "-m", "arena", "watch", "--every", "50ms", "--", *sleep],
        stderr=subprocess.PIPE, text=True, process_group=0,
    ) as process:  # fmt: skip
        time.sleep(1.5)
        (child,) = _proc.children(process.pid)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
    assert not Path(f"/proc/{child}").exists()


def test_a_picture_that_cannot_be_drawn_is_told_before_anything_runs(tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'matplotlib' else find(name)\n"
        "from arena.cli import main\n"
        f"sys.exit(main(['watch', '--plot', {str(tmp_path / 'a.png')!r}, '--', 'sleep', '600']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "matplotlib is missing: pip install 'tick-arena[plot]'" in done.stderr


def test_a_process_that_ends_before_the_time_is_one_clear_line_and_status_2(sleeper: Any) -> None:
    process = subprocess.Popen(
        command("--for", "60s", "--every", "50ms", sleeper.pid),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV,
    )  # fmt: skip
    assert process.stdout
    process.stdout.readline()
    process.stdout.readline()
    sleeper.kill()
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.startswith(f"python -m arena watch: error: process {sleeper.pid} has ended")
    assert errors.endswith("before the time was over\n")
    assert errors.count("\n") == 1
    assert re.search(r"resident +\d", output)  # and what was seen until then

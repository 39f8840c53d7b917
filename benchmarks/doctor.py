"""The doctor on nine little programs, each with one known condition: what it says of which.

Each runs as a user would run it: by ``python -m arena doctor``, which measures inside the program,
and again by itself, with ``python -m arena doctor PID`` beside it, which may only claim what shows
from outside. Sizes, rates and seeds differ from repeat to repeat. A row is 1 when the verdict was
right, and 0 when it was not; one that says "not yet" is not right.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import UnavailableError
from benchmarks._doctor_cases import CASES
from benchmarks._report import Options, Report

ROOT = Path(__file__).resolve().parent.parent
INSIDE, OUTSIDE = "arena", "arena, from outside"
REPEATS = 6
AT_ONCE = 3
"""Programs at a time: each is asleep most of its time."""
JEMALLOC = "libjemalloc.so.2"
GROWING = {"leaking list", "leaking C memory", "uncollected cycles"}

WANTED = {
    "leaking list": {"python-objects"},
    "leaking C memory": {"native-memory"},
    "freed but retained": {"retained"},
    "fragmented": {"fragmented"},
    "pinned views": {"pinned"},
    "uncollected cycles": {"cycles"},
    "mapped file": {"file-mapped"},
    "warm-up, then flat": {"flat"},
    "jemalloc": {"retained", "flat"},
}
"""The main verdict from inside. On jemalloc a flat process is right to be called flat, and one that
keeps freed memory for ever retained: ``Trial.keeps`` says which of the two it is."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a case."""

    case: str
    number: int
    size: float
    """MB."""
    rate: float
    """MB a second, where it grows."""
    seconds: float

    @property
    def keeps(self) -> bool:
        """Of jemalloc: whether it is told to keep freed pages for ever."""
        return self.number % 2 == 0

    def environment(self) -> dict[str, str]:
        """Return what it runs with."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "ARENA_CASES_DIR": tempfile.gettempdir()}
        if self.case == "jemalloc":
            decay = "-1" if self.keeps else "0"
            env["LD_PRELOAD"] = JEMALLOC
            env["MALLOC_CONF"] = f"dirty_decay_ms:{decay},muzzy_decay_ms:{decay}"
        return env

    def arguments(self, seconds: float) -> list[str]:
        """Return the program and its arguments."""
        return [
            "-m", "benchmarks._doctor_cases", self.case,
            "--size", f"{self.size}", "--rate", f"{self.rate}",
            "--seconds", f"{seconds}", "--seed", f"{self.number}",
        ]  # fmt: skip

    def judge_inside(self, found: dict[str, Any]) -> bool:
        """Whether the main verdict from inside is the right one."""
        main = found["verdicts"][0]
        if main["kind"] not in WANTED[self.case] or found["growing"] != (self.case in GROWING):
            return False
        if self.case == "jemalloc":
            right = "retained" if self.keeps else "flat"
            named = found["allocator"] == "jemalloc" and "jemalloc" in main["text"]
            return bool(named and main["kind"] == right)
        return "jemalloc" not in main["text"]

    def judge_outside(self, found: dict[str, Any]) -> bool:
        """Whether all that is claimed from outside is so: growth, kind of page, allocator."""
        main = found["verdicts"][0]["kind"]
        if self.case in GROWING:
            right = main == "anonymous"
        elif self.case == "mapped file":
            right = main == "file-mapped" and not found["growing"]
        else:
            right = main == "flat"
        allocator = "jemalloc" if self.case == "jemalloc" else "glibc"
        return right and bool(found["allocator"] == allocator)


def trials(repeats: int, seconds: float) -> Iterator[Trial]:
    """Yield all runs. From 70 to 300 MB, and from 2 to 20 MB a second."""
    for case in CASES:
        chance = random.Random(case)
        for number in range(repeats):
            size = round(chance.uniform(70, 300))
            rate = round(chance.uniform(2, 20), 1)
            yield Trial(case, number, size, rate, seconds)


def inside(trial: Trial) -> dict[str, Any]:
    """Run the program under the doctor, and return what that says as JSON."""
    with tempfile.TemporaryDirectory(prefix="arena-doctor-") as folder:
        path = Path(folder) / "found.json"
        done = subprocess.run(
            [
                sys.executable, "-m", "arena", "doctor", "--for", f"{trial.seconds}s",
                "--warm-up", "3s", "--json", str(path), *trial.arguments(120.0),
            ],
            cwd=ROOT, env=trial.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not path.exists():
            raise UnavailableError(f"the doctor said nothing of {trial}: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(path.read_text())
    if done.returncode != found["exit_status"]:
        raise UnavailableError(f"exit status {done.returncode} of {trial}: {done.stderr.strip()}")
    return found


def outside(trial: Trial) -> dict[str, Any]:
    """Run the program by itself, and return what the doctor says of its PID."""
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(
            subprocess.Popen(
                [sys.executable, *trial.arguments(120.0)],
                cwd=ROOT, env=trial.environment(), stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        stack.callback(program.kill)
        assert program.stdout is not None
        if not select.select([program.stdout], [], [], 60)[0] or not program.stdout.readline():
            raise UnavailableError(f"the program of {trial} did not get ready")
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(3)
        done = subprocess.run(
            [
                sys.executable, "-m", "arena", "doctor", "--for", f"{trial.seconds}s",
                "--json", "-", str(program.pid),
            ],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if not done.stdout:
        raise UnavailableError(f"the doctor said nothing of {trial}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(options: Options, report: Report) -> None:
    """Run all, a few at a time, and print the tables."""
    repeats, seconds = (1, 4.0) if options.quick else (REPEATS, 8.0)
    everything = list(trials(repeats, seconds))
    for contender, ask in ((INSIDE, inside), (OUTSIDE, outside)):
        _confusion(contender, ask, everything, report)


def _confusion(
    contender: str,
    ask: Callable[[Trial], dict[str, Any]],
    everything: Sequence[Trial],
    report: Report,
) -> None:
    judge = Trial.judge_inside if contender == INSIDE else Trial.judge_outside
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, everything))
    said: dict[str, collections.Counter[str]] = {case: collections.Counter() for case in CASES}
    right: collections.Counter[str] = collections.Counter()
    wrong = []
    for trial, found in zip(everything, answers, strict=True):
        main = found["verdicts"][0]
        ok = judge(trial, found)
        report.add(trial.case, contender, int(ok), "right")
        said[trial.case][main["kind"]] += 1
        right[trial.case] += ok
        if not ok:
            wrong.append(f"{trial}: {main['kind']}: {main['text']} ({found['allocator']})")
    kinds = sorted({kind for counts in said.values() for kind in counts})
    columns = ("case", *(kind.replace("-", "\n") for kind in kinds), "right")
    table = report.table(f"{contender}: main verdict by case", columns)
    for case, counts in said.items():
        of = sum(counts.values())
        cells = [f"{counts[kind]}" if counts[kind] else "" for kind in kinds]
        table.add_row(case, *cells, f"{right[case]}/{of}")
    report.console.print(table)
    total = len(everything)
    verdict = "[green]met[/]" if not wrong else "[red]not met[/]"
    report.say(f"target: no wrong verdict: {len(wrong)} of {total} wrong: {verdict}")
    for line in wrong:
        report.console.print(f"  wrong: {line}", highlight=False, markup=False)

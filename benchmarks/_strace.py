"""Counts the system calls of a command by strace."""

from __future__ import annotations

import collections
import subprocess
import tempfile
from collections.abc import Sequence

from benchmarks import UnavailableError
from benchmarks._child import ROOT


def traced(strace: str, command: Sequence[str], text: str = "") -> collections.Counter[str]:
    """Return how often the command, given that text, makes each system call, and the "total"."""
    with tempfile.NamedTemporaryFile("r", prefix="arena-strace-") as file:
        done = subprocess.run(
            [strace, "-c", "-f", "-o", file.name, *command],
            cwd=ROOT,
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = file.read().splitlines()
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UnavailableError(f"strace does not work here: {reason}")
    # Columns: % time, seconds, usecs/call, calls, errors or nothing, name.
    rows = [line.split() for line in lines]
    return collections.Counter(
        {row[-1]: int(row[3]) for row in rows if len(row) >= 5 and row[3].isdigit()}
    )

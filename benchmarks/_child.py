"""A child process that works when it is told to, and is watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from arena._proc import status
from benchmarks import UnavailableError

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """``python -m benchmarks.MODULE``: each line that it gets it answers with a line of JSON."""

    def __init__(
        self,
        module: str,
        *args: str,
        environment: dict[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        self._name = " ".join([module, *args])
        self._process = subprocess.Popen(
            command(module, *args),
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self._outside = psutil.Process(self._process.pid)

    def ask(self, line: str) -> Any:
        """Let it do what the line says, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            raise UnavailableError(f"{self._name}: exit code {self._process.wait()} at {line!r}")
        return json.loads(answer)

    def resident(self) -> int:
        """Return its resident memory in bytes, as the system has it."""
        return int(self._outside.memory_info().rss)

    def cpu(self) -> float:
        """Return the time that it has had on the processor so far, in seconds."""
        return float(sum(self._outside.cpu_times()[:2]))

    def peak(self) -> int:
        """Return the most that was resident, ever or since forget_peak(), in bytes."""
        return status(self._process.pid).peak

    def forget_peak(self) -> None:
        """Let peak() begin anew, with what is resident now."""
        try:
            Path(f"/proc/{self._process.pid}/clear_refs").write_text("5", encoding="ascii")
        except OSError as error:
            raise UnavailableError(f"the peak cannot be set back: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()  # a heap in pieces takes its time to be torn down
        self._process.communicate()


def command(module: str, *args: str) -> list[str]:
    """Return what starts it."""
    return [sys.executable, "-m", f"benchmarks.{module}", *args]


def serve(commands: dict[str, Callable[..., Any]]) -> None:
    """In the child: do what each line of the standard input says, a command and its arguments."""
    for line in sys.stdin:
        name, *args = line.split()
        print(json.dumps(commands[name](*args)), flush=True)

"""The process that is watched: what is read of it, how often, and what it cost to read.

Everything is read from outside, of /proc, and nothing is attached: a sample is three small files,
and the control group once a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from arena import _cgroup, _proc
from arena.cli._errors import UsageError

__all__ = ["Command", "Sample", "Samples", "Watched"]

_SELDOM = 1.0  # seconds between looks at what changes slowly, or costs more
_KEPT = 8192  # samples: from then on each second one is dropped, and half as many are kept
_PATIENCE = 5.0  # seconds for a command to end when it is told to, each time


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What was read at one time."""

    seconds: float
    """Since the watch began."""
    resident: int
    """Bytes, as are swap."""
    ticks: int | None
    """Finished ticks; None: the process does not show them."""
    minor: int
    """Page faults, ever."""
    major: int
    swap: int
    threads: int
    children: int
    """Processes that it and its children have started; counted in ``resident`` or not."""


class Samples(list[Sample]):
    """The samples, oldest first. A long watch keeps fewer of them, at even distances."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0
        self.peak = 0
        """The most resident memory of all samples, kept or not, in bytes."""
        self._stride = 1

    def add(self, sample: Sample) -> None:
        """Keep it, or put it in the place of the one before: the newest is always there."""
        self.peak = max(self.peak, sample.resident)
        if self and (self.taken - 1) % self._stride:
            self[-1] = sample
        else:
            self.append(sample)
        self.taken += 1
        if len(self) > _KEPT:
            del self[1::2]
            self._stride *= 2


class Watched:
    """A process by its number. Raises UsageError when it cannot be watched. A context manager."""

    def __init__(self, pid: int, *, tree: bool = False) -> None:
        self.pid = pid
        self.tree = tree
        """Whether the resident memory of its children is counted in."""
        self.samples = Samples()
        self.cgroup: _cgroup.Cgroup | None = None
        self.first_cgroup: _cgroup.Cgroup | None = None
        self.ended: str | None = None
        """How the process came to its end, if it did."""
        self.no_ticks: str | None = None
        """Why ticks are not counted; None: they are."""
        self.spent = 0.0
        """Seconds that reading took."""
        self._counter: _proc.TickCounter | None = None
        self._children: list[int] = []
        self._looked = -_SELDOM
        try:
            self._identity = _proc.started(pid)
            self.name = _proc.status(pid).name
        except _proc.ProcError as error:
            raise UsageError(str(error)) from None
        self.began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._counter is not None:
            self._counter.close()

    def look(self) -> bool:
        """Take a sample. False: the process has ended, and there is none."""
        begun = time.monotonic()
        try:
            self._look(begun - self.began)
        except _proc.ProcError as error:
            self.ended = self._how(error)
        self.spent += time.monotonic() - begun
        return self.ended is None

    def _look(self, seconds: float) -> None:
        pid = self.pid
        resident = _proc.statm(pid).resident
        status = _proc.status(pid)
        minor, major = _proc.faults(pid)
        # After the others: had it ended before, they would be of whoever has its number now.
        if _proc.started(pid) != self._identity:
            raise _proc.ProcError(f"process {pid} has ended: the number is another process's now")
        if seconds - self._looked >= _SELDOM:
            self._looked = seconds
            self._look_seldom()
        if self.tree:
            resident += sum(map(_resident, self._children))
        self.samples.add(
            Sample(
                seconds,
                resident,
                self._ticks(),
                minor,
                major,
                status.swap,
                status.threads,
                len(self._children),
            )
        )

    def _look_seldom(self) -> None:
        self._children = _proc.children(self.pid)
        self.cgroup = _cgroup.cgroup(self.pid)
        if self.first_cgroup is None:
            self.first_cgroup = self.cgroup
        # It may begin to show them later. A command may be a shell that starts what has ticks.
        for pid in [self.pid, *(self._children if self.tree else [])]:
            if self._counter is not None:
                return
            try:
                self._counter = _proc.TickCounter(pid)
                self.no_ticks = None
            except _proc.ProcError as error:
                self.no_ticks = self.no_ticks or str(error)

    def _ticks(self) -> int | None:
        if self._counter is None:
            return None
        try:
            return self._counter.read()
        except _proc.ProcError as error:
            self.no_ticks = str(error)
            return None

    def _how(self, error: _proc.ProcError) -> str:
        """In words: how the process came to its end, given what reading it said."""
        return str(error)


def _resident(pid: int) -> int:
    """Bytes; 0 for a process that has ended."""
    try:
        return _proc.statm(pid).resident
    except _proc.ProcError:
        return 0


class Command(Watched):
    """A command that is started, watched, and ended with the watch. Its output is let through.

    It has a process group of its own: Ctrl-C in the terminal is the watch's, which passes it on. So
    it cannot read from the terminal, and gets none of it.
    """

    def __init__(self, arguments: Sequence[str], *, tree: bool = True) -> None:
        nothing = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=nothing,
                env={**os.environ, "ARENA_EXPORT": "1"},
                process_group=0,
            )
        except OSError as error:
            raise UsageError(f"cannot run {arguments[0]!r}: {error.strerror}") from None
        try:
            super().__init__(self._process.pid, tree=tree)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def status(self) -> int | None:
        """Its exit status; negative: the signal that ended it; None: it runs."""
        return self._process.poll()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(signal.SIGTERM)
        super().__exit__(exc_type, exc, traceback)

    def end(self, number: signal.Signals) -> None:
        """End the command and its children: by this signal, by SIGTERM, and at last by SIGKILL.

        Another Ctrl-C meanwhile kills them at once.
        """
        signals = [signal.SIGKILL, signal.SIGTERM, number]
        while signals and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signals.pop())
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:
                signals = [signal.SIGKILL]

    def _how(self, error: _proc.ProcError) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has let go of its memory already
            self._process.wait(_PATIENCE)
        code = self._process.returncode
        if code is None:
            return super()._how(error)
        if code < 0:
            try:
                return f"the command was ended by {signal.Signals(-code).name}"
            except ValueError:  # of the real-time ones
                return f"the command was ended by signal {-code}"
        return f"the command has ended with exit status {code}"

"""The parent's side of one child of the demo: starts it, feeds it, measures it, ends it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import psutil

from arena.cli._loop import Progress

__all__ = ["Child", "ChildDiedError"]

_PATIENCE = 5  # seconds for a child to end by itself


class ChildDiedError(Exception):
    """A child ended before it was told to; the text is the one line that says how."""


class Child:
    """A running ``arena.cli._loop``. A context manager: at its end the child is gone."""

    def __init__(self, name: str, rate: float) -> None:
        self.name = name
        self.progress = Progress(ticks=-1)
        """The newest that the child told."""
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        # A process group of its own: the terminal's Ctrl-C is the parent's to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "arena.cli._loop", name, repr(rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="ascii",
            process_group=0,
        )
        self._memory = psutil.Process(self._process.pid)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._listener.join()
            assert self._process.stdout
            self._process.stdout.close()
            self._errors.close()

    def feed(self, records: Iterable[str]) -> None:
        """Send the input, which also starts the warm-up."""
        self._send("".join(f"{record}\n" for record in records) + "\n")

    def go(self) -> None:
        """Start the measured loop."""
        self._send("\n")

    def resident(self) -> float:
        """Resident memory in MB (10^6 bytes), as the operating system counts it."""
        try:
            bytes_now = self._memory.memory_info().rss
        except psutil.Error:
            bytes_now = 0
        self.check()  # what was read of a process that has ended is no measurement
        return bytes_now / 1e6

    def check(self) -> None:
        """Raise ChildDiedError unless the child runs."""
        if self._process.poll() is not None:
            raise self._death()

    def stop(self) -> None:
        """Tell the child to end, and wait until it has told all."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
            self._listener.join()

    def _send(self, text: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.wait(_PATIENCE)
            raise self._death() from None

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.progress = Progress(**json.loads(line))

    def _death(self) -> ChildDiedError:
        code = self._process.returncode
        how = f"with exit status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        why = f": {said[-1]}" if said else ""
        return ChildDiedError(f"the {self.name} run (pid {self._process.pid}) was ended {how}{why}")

"""``python -m arena doctor``: says what is the matter with the memory of a process or a program."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from arena._inside import Watch, examine
from arena._proc import ProcError
from arena.cli._errors import UsageError
from arena.cli._files import output
from arena.cli._program import Program
from arena.cli._ticked import Ticked
from arena.diagnosis import Diagnosis

__all__ = ["Options", "run"]

_PROG = "python -m arena doctor"
_PATIENCE = 5.0  # seconds that a program has to end, once it is interrupted


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    target: str
    is_module: bool = False
    args: Sequence[str] = ()
    seconds: float = 10.0
    warm_up: float = 3.0
    json: Path | None = None
    keep_running: bool = False
    trim: bool = True
    collect: bool = True


def run(options: Options) -> int:
    """Diagnose, and return the exit status. Raises UsageError."""
    if options.target.isdigit() and not options.is_module:
        return _process(options)
    return _Treatment(options).run()


def _process(options: Options) -> int:
    """Another process, from outside."""
    from arena._outside import look_at

    if options.args:
        raise UsageError(f"a PID takes no arguments: {' '.join(options.args)!r}")
    json = _Json(options.json)
    try:
        found = look_at(int(options.target), options.seconds)
    except ProcError as error:
        raise UsageError(str(error)) from None
    if not json.is_stdout:
        print(found)
    json.write(found)
    return found.exit_status


class _Json:
    """Where the figures go; found unwritable before anything has run."""

    def __init__(self, path: Path | None) -> None:
        self.is_stdout = path is not None and str(path) == "-"
        self._path = None
        if path is not None and not self.is_stdout:
            self._path = Path.cwd() / path  # the program may go elsewhere
            with output(self._path, "--json"):
                pass

    def write(self, found: Diagnosis) -> None:
        """Write them, if they are wanted. Raises OSError and UsageError."""
        if self.is_stdout:
            print(found.as_json(), flush=True)
        elif self._path is not None:
            with output(self._path, "--json") as draft:
                draft.write_text(found.as_json() + "\n")


class _Treatment:
    """Runs a program in this process, with the doctor in a thread beside it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._done = threading.Event()
        self._found: Diagnosis | None = None
        self._failure: BaseException | None = None
        self._stopped = False

    def run(self) -> int:
        options = self._options
        program = Program(options.target, options.is_module, options.args, Ticked([], {}, print))
        program.check()
        self._json = _Json(options.json)
        for name in ("_trend", "reporting", "trimming"):
            # Imported now: what the thread imports while it watches would be growth.
            importlib.import_module(f"arena.{name}")
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what goes on in
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the background
        self._hook = sys.excepthook
        sys.excepthook = self._told
        self._stderr = os.dup(2)
        threading.Thread(target=self._examine, name="arena doctor", daemon=True).start()
        program.run()
        if os.getpid() != self._pid:
            return program.status  # of a child that the program forked
        self._ended.set()
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        assert self._found is not None
        if options.keep_running or (program.status and not self._stopped):
            return program.status
        return self._found.exit_status

    def _examine(self) -> None:
        options = self._options
        try:
            self._ended.wait(options.warm_up)
            watch = Watch(None, options.seconds, ended=self._ended)
            found = examine(watch, trim=options.trim, collect=options.collect)
            self._found = found
            self._say(f"{_PROG}: {found}")
            self._json.write(found)
        except BaseException as error:
            self._failure = error
        finally:
            self._done.set()
        if not self._ended.is_set() and not options.keep_running:
            self._stop()

    def _stop(self) -> None:
        """End the program as Ctrl-C does; if it does not heed that, end the process."""
        self._stopped = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)  # also where it waits in a system call
        if self._ended.wait(_PATIENCE):
            return
        self._say(
            f"{_PROG}: the program was killed: it went on for {_PATIENCE:g} s after an interrupt"
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(2 if self._found is None else self._found.exit_status)

    def _told(self, *what: object) -> None:
        """Tell of what ended the program, unless that was us."""
        if not (self._stopped and what[0] is KeyboardInterrupt):
            self._hook(*what)  # type: ignore[arg-type]

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stderr, text.encode(errors="backslashreplace") + b"\n")

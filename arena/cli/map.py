"""``python -m arena map``: runs a program, records what escapes its ticks, and prints the map."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import gc
import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import arena
from arena import _native
from arena._map_text import OBJECTS, plural
from arena.cli._errors import UsageError
from arena.cli._files import output
from arena.cli._program import Program
from arena.cli._term import AtTerm
from arena.cli._ticked import Ticked, Wanted
from arena.escapes import EscapeMap, Frame, as_it_ran

__all__ = ["Options", "run"]

_PROG = "python -m arena map"


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    program: str
    is_module: bool
    args: Sequence[str]
    ticks: Sequence[str] = ()
    html: Path | None = None
    json: Path | None = None
    depth: int = 4
    objects: bool = True
    budget: str | None = None
    fail_on_growth: bool = False


def run(options: Options) -> int:
    """Run the program and return its exit status. Raises UsageError before anything has run."""
    importlib.import_module("arena._map_table")  # rich, before the program can be in its way
    try:
        wanted = [Wanted.parse(text) for text in options.ticks]
    except ValueError as error:
        raise UsageError(f"--tick is {error}") from None
    files = _Files(options.html, options.json)
    report = _Report(files, wanted, options.objects)
    ticked = Ticked(wanted, {"objects": options.objects, "trace": options.depth}, report.remark)
    program = Program(options.program, options.is_module, options.args, ticked)
    program.check()
    _record(options)
    if wanted:
        sys.meta_path.insert(0, ticked)
    report.listen()
    program.run()
    return _finish(options, program, report)


def _record(options: Options) -> None:
    """Turn on what is recorded, until the process ends. Raises UsageError."""
    try:
        arena.trace(options.depth)
    except ValueError as error:
        raise UsageError(f"--depth: {error}") from None
    try:
        arena.audit(*([] if options.budget is None else [options.budget]))
    except ValueError as error:
        raise UsageError(f"--budget: {error}") from None
    if options.objects:
        try:
            _native._objects_always(True)
        except (ImportError, arena.ArenaError) as error:
            raise UsageError(f"{error} (or give --no-objects)") from None


def _finish(options: Options, program: Program, report: _Report) -> int:
    """Print the map at the end of the program, and settle the exit status."""
    if report.forked:
        return program.status
    report.at_term.listen_no_more()
    with contextlib.suppress(Exception):  # such as a full disk: Python tells of it at its exit
        sys.stdout.flush()
    uncollected = _now()
    gc.collect()
    last = as_it_ran(_now(), uncollected)
    # Only now: until here the exception has kept what the program had when it ended.
    program.error = None
    report.tell(last)
    problems = report.tell_problems()
    if program.status == 0 and (problems or report.failed):
        return 2 if problems else 1
    if options.fail_on_growth and last.growing:
        return program.status or 1
    return program.status


def _now() -> EscapeMap:
    """The map without the frames below the program: those that `python -m arena` has."""
    whole = arena.escapes()
    return dataclasses.replace(
        whole,
        rows=tuple(
            dataclasses.replace(row, site=_above(row.site), used=_above(row.used)) for row in whole
        ),
    )


def _above(site: tuple[Frame, ...]) -> tuple[Frame, ...]:
    while site and site[-1].file == "<frozen runpy>":
        site = site[:-1]
    return site


class _Files:
    """Where the map is written to; found unwritable before the program runs."""

    def __init__(self, html: Path | None, json: Path | None) -> None:
        here = Path.cwd()  # the program may go elsewhere
        self._html = html and here / html
        self._json = json and here / json
        with contextlib.ExitStack() as stack:
            for path, option in self._all():
                stack.enter_context(output(path, option))

    def _all(self) -> Iterator[tuple[Path, str]]:
        if self._html:
            yield self._html, "--html"
        if self._json:
            yield self._json, "--json"

    def write(self, last: EscapeMap) -> None:
        """Write the map, whole or not at all. Raises OSError and UsageError."""
        for path, option in self._all():
            with output(path, option) as draft:
                (last.to_html if option == "--html" else last.to_json)(draft)


class _Report:
    """Tells of the map on what was stderr at the start: the program may close its own."""

    def __init__(self, files: _Files, wanted: Sequence[Wanted], objects: bool) -> None:
        self._files = files
        self._wanted = wanted
        self._objects = objects
        self.at_term = AtTerm(self._tell_ended)
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._ticks = arena.stats().ticks_begun
        self._busy = _thread.allocate_lock()
        self.failed = False
        """Whether something could not be written."""
        try:
            self._stream: _Stream | None = _Stream(os.dup(sys.stderr.fileno()))
        except (AttributeError, OSError, ValueError):  # there is no stderr
            self._stream = None

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that the map is of."""
        return os.getpid() != self._pid

    @property
    def ticks(self) -> int:
        """How many the program has begun."""
        return arena.stats().ticks_begun - self._ticks

    def listen(self) -> None:
        """From now on SIGUSR1 tells of the map as it is then, and SIGTERM before it ends it all."""
        self.at_term.listen()
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, self._asked)

    def _asked(self, *_: object) -> None:
        # In a thread of its own: what is made here must not count as the program's, whose tick this
        # thread may be in, and the program may hold any lock. So not by threading.Thread either.
        if not self.forked:
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter ends
                _thread.start_new_thread(self._tell_asked, ())

    def _tell_asked(self) -> None:
        if self._busy.acquire(blocking=False):
            try:
                # Here too finalizers run in this thread, as they may in any. It waits for no lock
                # that the program holds where the signal came.
                gc.collect()
                self._tell(_now())
            finally:
                self._busy.release()

    def _tell_ended(self) -> None:
        gc.collect()
        self.tell(_now())
        self.tell_problems()

    def tell(self, last: EscapeMap) -> None:
        """Print the map, and write the files. What cannot be written is one line."""
        with self._busy:
            self._tell(last)

    def _tell(self, last: EscapeMap) -> None:
        seconds = time.monotonic() - self._began
        self.say(
            f"{_PROG}: {plural(self.ticks, 'tick')} in {seconds:,.1f} s of process {self._pid}"
        )
        if self._stream is not None:
            with contextlib.suppress(OSError):
                last.print(self._stream)
                self._stream.flush()
        if self._objects and not any(row.kind == "object" for row in last):
            self.say(OBJECTS)  # as the headline says where there are some
        try:
            self._files.write(last)
        except (OSError, UsageError) as error:
            self.failed = True
            self.say(f"{_PROG}: error: {error}")

    def tell_problems(self) -> bool:
        """Tell of ticks that the program has not, and return whether it is the command's fault."""
        problems = [one.problem for one in self._wanted if one.problem]
        for problem in problems:
            self.remark(f"error: {problem}")
        if not problems and self.ticks == 0:
            self.remark(
                "no tick was begun: name the function that is one turn of the loop with "
                "--tick FILE:FUNCTION, or wrap the loop's body in `with arena.tick():`"
            )
        return bool(problems)

    def remark(self, what: str) -> None:
        """Print a line under the name of this command."""
        self.say(f"{_PROG}: {what}")

    def say(self, line: str) -> None:
        """Print a line."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.write(line + "\n")
                self._stream.flush()


class _Stream(io.TextIOWrapper):
    """A text stream over a file descriptor of ours, in the encoding of stderr."""

    def __init__(self, descriptor: int) -> None:
        raw: Any = io.FileIO(descriptor, "w")
        encoding = getattr(sys.stderr, "encoding", None)
        super().__init__(io.BufferedWriter(raw), encoding, errors="backslashreplace")

"""``python -m arena watch``: watches a process from outside, and says whether its memory grows."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING

from arena import _proc
from arena.cli._errors import UsageError
from arena.cli._files import output
from arena.cli._watch_report import Found, Rate, as_json, found, lines, state_line
from arena.cli._watched import Command, Watched

if TYPE_CHECKING:
    from arena.cli._watch_live import View

__all__ = ["Options", "run"]

_INTERRUPTED = 130  # what shells say of a program that Ctrl-C ended
_UNKNOWN = 3  # as the doctor's
_LINES = 10  # plain lines in a watch of a given length
_LINE = 10.0  # seconds between them in one that lasts until it is ended


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    pid: int | None
    command: list[str]
    seconds: float | None
    every: float
    limit: int | None
    children: bool | None
    """Whether to count them in; None: those of a command."""
    fail_above: Rate | None
    json: Path | None
    """``-``: stdout."""
    plot: Path | None


def run(options: Options) -> int:
    """Watch, report, and return the exit status. Raises UsageError before anything has run."""
    with ExitStack() as stack:
        to_stdout = options.json is not None and str(options.json) == "-"
        json_draft = plot_draft = None
        if options.json and not to_stdout:
            json_draft = stack.enter_context(output(options.json, "--json"))
        if options.plot:
            plot_draft = stack.enter_context(output(options.plot, "--plot"))
            if options.plot.suffix.lower() == ".png" and not importlib.util.find_spec("matplotlib"):
                # Now, and not when there is something to lose.
                raise ModuleNotFoundError("matplotlib is missing", name="matplotlib")
        # Stdout belongs to the command, or to the JSON.
        talk = sys.stderr if options.command or to_stdout else sys.stdout
        watched: Watched
        if options.command:
            watched = Command(options.command, tree=options.children is not False)
        else:
            assert options.pid is not None
            watched = Watched(options.pid, tree=bool(options.children))
            if options.fail_above is not None and options.fail_above.per == "tick":
                try:
                    _proc.TickCounter(options.pid).close()
                except _proc.ProcError as error:
                    raise UsageError(f"--fail-above by tick: {error}") from None
        stack.enter_context(watched)
        interrupted = _watch(options, watched, talk)
        status = _end(watched, interrupted)
        if not watched.samples:
            if not isinstance(watched, Command):
                raise UsageError(watched.ended or "nothing was seen of the process")
            print(f"Nothing was seen: {watched.ended}.", file=talk)
        one = found(watched, options.limit) if watched.samples else None
        if one is not None:
            _tell(one, watched, options, talk)
        text = as_json(
            one,
            watched,
            command=options.command or None,
            status=status,
            interrupted=interrupted,
            fail_above=options.fail_above,
        )
        try:
            if to_stdout:
                sys.stdout.write(text)
                sys.stdout.flush()
            if json_draft:
                json_draft.write_text(text)
            if plot_draft and one is not None:
                _draw(one, watched, plot_draft, options)
        except BrokenPipeError:
            raise
        except OSError as error:
            print(f"python -m arena watch: nothing written: {error}", file=sys.stderr)
            return 2
        if interrupted and (options.seconds is not None or one is None):
            return _INTERRUPTED
        status = 0 if options.fail_above is None else _gate(one, watched, options.fail_above)
        if status != 1 and watched.ended and options.seconds and not options.command:
            print(
                f"python -m arena watch: error: {watched.ended}, before the time was over",
                file=sys.stderr,
            )
            return 2
        return status


def _gate(one: Found | None, watched: Watched, rate: Rate) -> int:
    """The exit status of a watch that may fail. Raises UsageError where ticks are not counted."""
    if one is None:
        return _UNKNOWN
    judged = one.by_tick if rate.per == "tick" else one.by_time
    if judged is None:
        raise UsageError(f"--fail-above by tick: {watched.no_ticks}")
    if one.over(rate):
        return 1
    return _UNKNOWN if judged.state == "not yet" else 0


def _watch(options: Options, watched: Watched, talk: IO[str]) -> bool:
    """Take samples until the time is over or the process is. True: it was interrupted."""
    try:
        with _view(options, watched, talk) as view:
            if options.command:  # what it needs to start is no growth
                time.sleep(min(options.every, 1.0))
            judged = -view.every
            number = 0
            while watched.look():
                elapsed = time.monotonic() - watched.began
                if elapsed - judged >= view.every:
                    judged = elapsed
                    view.show(found(watched, options.limit), watched)
                number = max(number + 1, int(elapsed / options.every))  # late ones are left out
                due = number * options.every
                if options.seconds is not None:
                    if elapsed >= options.seconds:
                        break
                    due = min(due, options.seconds)
                time.sleep(max(0.0, due - (time.monotonic() - watched.began)))
    except KeyboardInterrupt:
        return True
    return False


def _end(watched: Watched, interrupted: bool) -> int | None:
    """End the command, if it is one that still runs, and return its exit status."""
    if not isinstance(watched, Command):
        return None
    if watched.status is None:
        watched.end(signal.SIGINT if interrupted else signal.SIGTERM)
    return watched.status


def _view(options: Options, watched: Watched, talk: IO[str]) -> View | _Lines:
    """A live view on a terminal that is ours alone; else plain lines, few enough to read."""
    title = f"{watched.name} (pid {watched.pid})"
    if not options.command and talk.isatty() and importlib.util.find_spec("rich"):
        from arena.cli import _watch_live

        return _watch_live.View(talk, title)
    seconds = options.seconds
    length = "until it ends, or Ctrl-C" if seconds is None else f"for {seconds:g} s"
    print(f"Watching {title} every {options.every:g} s, {length}.", file=talk, flush=True)
    return _Lines(_LINE if options.seconds is None else options.seconds / _LINES, talk)


class _Lines(contextlib.nullcontext["_Lines"]):
    """A line now and then."""

    def __init__(self, every: float, file: IO[str]) -> None:
        super().__init__(self)
        self.every = every
        self._file = file

    def show(self, one: Found, watched: Watched) -> None:
        print(state_line(one), file=self._file, flush=True)


def _tell(one: Found, watched: Watched, options: Options, talk: IO[str]) -> None:
    print(f"\n{watched.name} (pid {watched.pid})", file=talk)
    for name, told in lines(one, watched):
        print(f"  {name:14} {told}", file=talk)
    if watched.ended:
        print(f"  {'ended':14} {watched.ended}", file=talk)
    elif isinstance(watched, Command):
        print(f"  {'ended':14} by the watch, with status {watched.status}", file=talk)
    if options.fail_above is not None:
        print(f"  {'--fail-above':14} {_judgement(one, options.fail_above)}", file=talk)
    talk.flush()


def _judgement(one: Found, rate: Rate) -> str:
    if one.over(rate):
        return f"{rate}: exceeded"
    judged = one.by_tick if rate.per == "tick" else one.by_time
    if judged is None or judged.state == "not yet":
        return f"{rate}: not known yet, watch for longer"
    return f"{rate}: not exceeded"


def _draw(one: Found, watched: Watched, draft: Path, options: Options) -> None:
    assert options.plot is not None
    if options.plot.suffix.lower() == ".png":
        from arena.cli._watch_plot import draw

        draw(one, watched, draft)
    else:
        from arena.cli._watch_page import page

        draft.write_text(page(one, watched), encoding="utf-8")

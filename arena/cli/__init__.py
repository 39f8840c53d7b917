"""The command line: reads the arguments of ``python -m arena`` and calls what they name.

Whatever a user can get wrong is one line on stderr and exit status 2. What a sub-command needs
beyond arena itself is imported when that sub-command runs.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from arena._version import __version__

if TYPE_CHECKING:
    from arena.cli._watch_report import Rate

__all__ = ["UsageError", "main"]

_EXTRAS = {"rich": "cli", "psutil": "cli", "matplotlib": "plot"}

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class UsageError(Exception):
    """What the user asked for cannot be done; the text is the one line that says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line: argparse would print the usage in front of it."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"not a finite number above 0: {text!r}")
    return number


def _duration(text: str) -> float:
    seconds = _positive(text)
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"less than 1 second shows nothing: {text!r}")
    return seconds


def _span(text: str) -> float:
    """A length of time in seconds: "60", "60s", "5m" or "2h"."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"not a time above 0, such as 10s, 5m or 2h: {text!r}")
    return seconds


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"the picture is a .png file: {text!r}")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m arena",
        description="arena: tick-scoped memory for long-running Python loops.",
    )
    parser.add_argument("--version", action="version", version=f"tick-arena {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="run the same loop twice, with and without ticks, and measure its memory",
        description="Two processes run the same awareness loop side by side on the same input. "
        "One keeps every tick's scratch, the other wraps each tick in arena.tick(). "
        "Their resident memory is measured from outside.",
        epilog="Exit status: 0 done; 1 a run died or lost state; 2 wrong usage; 130 after Ctrl-C, "
        "which still prints the table.",
    )
    demo.add_argument(
        "--seconds",
        type=_duration,
        default=25.0,
        metavar="N",
        help="length of the measured run (default: 25)",
    )
    demo.add_argument(
        "--rate",
        type=_positive,
        default=5.0,
        metavar="TICKS_PER_SECOND",
        help="ticks per second of each loop (default: 5)",
    )
    demo.add_argument(
        "--input",
        type=Path,
        metavar="PATH",
        help="a JSON file, or a folder of .json and .json.gz files (default: generated documents)",
    )
    demo.add_argument(
        "--plot", type=_picture, metavar="FILE.png", help="draw resident memory over time"
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    demo.set_defaults(run=_demo)
    _add_map(commands)
    _add_tune(commands)
    _add_doctor(commands)
    _add_watch(commands)
    return parser


def _add_tune(commands: argparse._SubParsersAction[_Parser]) -> None:
    tuned = commands.add_parser(
        "tune",
        help="print the settings of glibc's malloc for a Dockerfile or a unit file",
        description="Prints the lines that set, from the start of a process, what arena.tune() "
        "sets from inside. Changes nothing itself.",
        epilog="Each option takes none, too: then that setting is left alone. Exit status: 0 done; "
        "2 wrong usage.",
    )
    tuned.add_argument(
        "--mmap-threshold",
        default="1 MiB",
        metavar="SIZE",
        help="what is larger goes back to the system when it is freed (default: 1 MiB)",
    )
    tuned.add_argument(
        "--arena-max",
        default="2",
        metavar="N",
        help="how many heaps the threads share (default: 2)",
    )
    tuned.add_argument(
        "--trim-threshold",
        default="auto",
        metavar="SIZE",
        help="most free bytes at the end of a heap (default: auto, twice the mmap threshold)",
    )
    tuned.set_defaults(run=_tune)


def _add_map(commands: argparse._SubParsersAction[_Parser]) -> None:
    mapped = commands.add_parser(
        "map",
        allow_abbrev=False,
        help="run a program and print what escapes its ticks",
        usage="%(prog)s [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]",
        description="Runs a program in this process, as python does, and records what outlives its "
        "ticks and where that came from. The map is printed on stderr when the program ends, by "
        "itself, by an exception, by Ctrl-C or by SIGTERM (unless it handles that itself), and "
        "whenever it gets SIGUSR1 (kill -USR1 PID).",
        epilog="Exit status: the program's own; 130 after Ctrl-C; with --fail-on-growth 1 when "
        "memory keeps growing; 2 wrong usage. The map is of this process alone, to the end of its "
        "threads: children that it forks or starts print none, and there is none when it ends by "
        "os._exit(), os.exec*() or another signal.",
    )
    mapped.add_argument(
        "--tick",
        action="append",
        default=[],
        metavar="FILE:FUNCTION",
        help="each call of this function is a tick, such as server.py:Handler.do_GET or "
        "pkg.mod:step; for programs that have no ticks (may be given more than once)",
    )
    mapped.add_argument("--html", type=Path, metavar="FILE", help="write the map as a page, too")
    mapped.add_argument("--json", type=Path, metavar="FILE", help="write the map as JSON, too")
    mapped.add_argument(
        "--depth",
        type=int,
        default=4,
        metavar="N",
        help="frames of each place that are recorded, 1 to 32 (default: 4)",
    )
    mapped.add_argument(
        "--no-objects",
        dest="objects",
        action="store_false",
        help="record arena's own memory only, not that of Python objects",
    )
    mapped.add_argument(
        "--budget",
        metavar="SIZE",
        help='most bytes of ended ticks that are kept for those who still use them, "256 MiB"',
    )
    mapped.add_argument(
        "--fail-on-growth",
        action="store_true",
        help="exit with status 1 when the memory of some place kept growing",
    )
    mapped.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    mapped.add_argument("program", metavar="SCRIPT")
    mapped.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    mapped.set_defaults(run=_map)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="say which kind of memory growth it is, or what the level is made of",
        usage="%(prog)s [OPTIONS] (PID | SCRIPT | -m MODULE) [ARGS ...]",
        description="With a PID, watches that process from outside: nothing is attached, so it "
        "says how much and of which kind of page, no more. With a program, runs it in this "
        "process, as python does, with the doctor in a thread beside it, which measures: a census "
        "of Python objects, the C heap, what gc.collect() frees and what a trim returns. The "
        "diagnosis is printed on stderr when the time is over (or the program, if that ends "
        "before), and the program is then interrupted as by Ctrl-C, and ended if it does not heed "
        "that in 5 seconds.",
        epilog="Exit status: 0 nothing wrong; 1 memory grows, or some can be won back; 2 wrong "
        "usage (no such process, no permission, no /proc); 3 cannot tell yet. Of a program that "
        "ends by itself with another status than 0, and with --keep-running, the program's own.",
    )
    doctor.add_argument(
        "--for",
        dest="seconds",
        type=_span,
        default=10.0,
        metavar="TIME",
        help="how long to watch, such as 10s, 5m or 2h (default: 10s)",
    )
    doctor.add_argument(
        "--warm-up",
        type=_span,
        default=3.0,
        metavar="TIME",
        help="with a program: how long it runs before it is watched (default: 3s)",
    )
    doctor.add_argument(
        "--json", type=Path, metavar="FILE|-", help="write the diagnosis as JSON, too; - is stdout"
    )
    doctor.add_argument(
        "--keep-running",
        action="store_true",
        help="with a program: let it go on after the diagnosis",
    )
    doctor.add_argument(
        "--no-trim",
        dest="trim",
        action="store_false",
        help="with a program: do not measure what a trim returns",
    )
    doctor.add_argument(
        "--no-collect",
        dest="collect",
        action="store_false",
        help="with a program: do not measure what gc.collect() frees",
    )
    doctor.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    doctor.add_argument("target", metavar="PID|SCRIPT")
    doctor.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")
    doctor.set_defaults(run=_doctor)


def _add_watch(commands: argparse._SubParsersAction[_Parser]) -> None:
    watch = commands.add_parser(
        "watch",
        allow_abbrev=False,
        help="watch the memory of a process, and say whether it grows",
        usage="%(prog)s [OPTIONS] (PID | -- COMMAND [ARGS ...])",
        description="Reads a process's resident memory from outside, of /proc, and says how fast "
        "it grows, with a 95 %% interval: a minute, and a tick where the process shows its ticks "
        "(ARENA_EXPORT=1, or arena.export_ticks() in it; a command started here does). What "
        "comes and goes, steps that stay, and a warm-up are no growth; until enough was seen it "
        'says "not yet". A command\'s own output is let through, and the watch speaks on stderr; '
        "it is ended with the watch, and cannot read from the terminal.",
        epilog="Exit status: 0 done; 1 it grows faster than --fail-above says; 2 wrong usage, or a "
        "process that cannot be watched; 130 when Ctrl-C came before the time was over, after the "
        "report. A process that ends meanwhile is reported as far as it was seen; a command's own "
        "exit status is told in the report and the JSON.",
    )
    watch.add_argument("pid", nargs="?", metavar="PID")
    watch.add_argument(
        "--for",
        dest="seconds",
        type=_length,
        metavar="TIME",
        help="how long: 60, 60s, 5m, 2h (default: until it ends, or Ctrl-C)",
    )
    watch.add_argument(
        "--every",
        type=_interval,
        default=0.5,
        metavar="TIME",
        help="time between two looks, 10ms or more (default: 500ms)",
    )
    watch.add_argument(
        "--limit",
        type=_limit,
        metavar="SIZE",
        help='say when it will reach this much, "2 GiB" (default: the limit of its control group)',
    )
    watch.add_argument(
        "--fail-above",
        type=_rate,
        metavar="RATE",
        help='exit with status 1 when it grows faster: "1 MiB/min", "1 kB/tick"',
    )
    watch.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures and samples as JSON; - is stdout: the report then goes to stderr",
    )
    watch.add_argument(
        "--plot", type=_chart, metavar="FILE", help="draw the curve: a .png, or a page: .html"
    )
    watch.set_defaults(run=_watch)


def _length(text: str) -> float:
    unit = text.lstrip("0123456789.")
    scale = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    try:
        seconds = float(text.removesuffix(unit)) * scale[unit.strip()]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= 1e9:
        raise argparse.ArgumentTypeError(
            f"not a time above 0, such as 60, 60s, 5m, 2h or 500ms: {text!r}"
        )
    return seconds


def _interval(text: str) -> float:
    seconds = _length(text)
    if seconds < 0.01:
        raise argparse.ArgumentTypeError(f"more often than each 10 ms is too much: {text!r}")
    return seconds


def _limit(text: str) -> int:
    from arena import _native

    try:
        size = _native._size(text, "a limit")
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size == 0:
        raise argparse.ArgumentTypeError("nothing fits into 0 bytes")
    return size


def _rate(text: str) -> Rate:
    from arena import _native
    from arena.cli._watch_report import Rate

    size, _, per = text.partition("/")
    per = {"minute": "min", "min": "min", "tick": "tick"}.get(per.strip(), "")
    try:
        if not per:
            raise ValueError
        return Rate(_native._size(size.strip(), "a rate"), per)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'not a rate such as "1 MiB/min" or "1 kB/tick": {text!r}'
        ) from None


def _chart(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".png", ".html"):
        raise argparse.ArgumentTypeError(f"the curve is a .png or an .html file: {text!r}")
    return path


def _watch(args: argparse.Namespace) -> int:
    # A plain kill ends the watch as Ctrl-C does, and the command with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from arena.cli import watch

    if bool(args.program) == (args.pid is not None):
        raise UsageError("give either the number of a process, or -- and a command")
    pid = None
    if args.pid is not None:
        if not (args.pid.isascii() and args.pid.isdigit() and 0 < int(args.pid[:10]) < 2**31):
            raise UsageError(f"not the number of a process: {args.pid!r} (a command goes after --)")
        pid = int(args.pid)
    return watch.run(
        watch.Options(
            pid=pid,
            command=args.program,
            seconds=args.seconds,
            every=args.every,
            limit=args.limit,
            fail_above=args.fail_above,
            json=args.json,
            plot=args.plot,
        )
    )


def _demo(args: argparse.Namespace) -> int:
    # A plain kill ends the run as Ctrl-C does: no draft of a file is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from arena.cli import demo

    return demo.run(demo.Options(args.seconds, args.rate, args.input, args.plot, args.json))


def _map(args: argparse.Namespace) -> int:
    from arena.cli import map as mapping

    return mapping.run(
        mapping.Options(
            program=args.program,
            is_module=args.is_module,
            args=args.args,
            ticks=args.tick,
            html=args.html,
            json=args.json,
            depth=args.depth,
            objects=args.objects,
            budget=args.budget,
            fail_on_growth=args.fail_on_growth,
        )
    )


def _tune(args: argparse.Namespace) -> int:
    from arena.tuning import lines, settings

    def given(text: str) -> str | None:
        return None if text == "none" else text

    heaps = given(args.arena_max)
    if heaps is not None and not (heaps.isascii() and heaps.isdigit()):
        raise UsageError(f"--arena-max is a number of heaps such as 2, or none, not {heaps!r}")
    try:
        values = settings(
            given(args.mmap_threshold),
            None if heaps is None else int(heaps),
            given(args.trim_threshold),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    for where, line in lines(values).items():
        print(f"# {where}\n{line}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from arena.cli import doctor

    return doctor.run(
        doctor.Options(
            target=args.target,
            is_module=args.is_module,
            args=args.args,
            seconds=args.seconds,
            warm_up=args.warm_up,
            json=args.json,
            keep_running=args.keep_running,
            trim=args.trim,
            collect=args.collect,
        )
    )


def _quiet_stdout() -> None:
    """Send what is still buffered nowhere: the reader of our output has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Take off the command to watch, which argparse would look for options in."""
    if argv[:1] != ["watch"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m arena`` with these arguments and return its exit status."""
    parser = _parser()
    words, program = _split(list(sys.argv[1:] if argv is None else argv))
    args = parser.parse_args(words)
    args.program = getattr(args, "program", program)
    if args.command is None:
        parser.print_help()
        return 0
    prog = f"{parser.prog} {args.command}"
    try:
        status: int = args.run(args)
        return status
    except UsageError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        extra = _EXTRAS[missing]
        print(
            f"{prog}: error: {missing} is missing: pip install 'tick-arena[{extra}]' "
            f"(in a clone: pip install -e '.[{extra}]')",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        _quiet_stdout()
        return 1
    except OSError as error:  # such as no room left where stdout goes
        print(f"{prog}: {error}", file=sys.stderr)
        _quiet_stdout()
        return 1
    except KeyboardInterrupt:  # a second one, while the first was being dealt with
        return 130

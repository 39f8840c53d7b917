"""The sub-commands: what each takes, and what it calls.

What a sub-command needs beyond arena itself is imported when it runs.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from arena.cli import _values
from arena.cli._errors import UsageError

__all__ = ["add_all"]

if TYPE_CHECKING:
    _Commands: TypeAlias = argparse._SubParsersAction[Any]


def add_all(commands: _Commands) -> None:
    """Add them, in the order of the help text."""
    for add in (_add_demo, _add_watch, _add_doctor, _add_map, _add_tune):
        add(commands)


def _add_demo(commands: _Commands) -> None:
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
        type=_values.whole_seconds,
        default=25.0,
        metavar="N",
        help="length of the measured run (default: 25)",
    )
    demo.add_argument(
        "--rate",
        type=_values.positive,
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
        "--plot", type=_values.picture, metavar="FILE.png", help="draw resident memory over time"
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    # A plain kill ends the run as Ctrl-C does: no draft of a file is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from arena.cli import demo

    return demo.run(demo.Options(args.seconds, args.rate, args.input, args.plot, args.json))


def _add_watch(commands: _Commands) -> None:
    watch = commands.add_parser(
        "watch",
        allow_abbrev=False,
        help="watch the memory of a process, and say whether it grows",
        usage="%(prog)s [OPTIONS] (PID | -- COMMAND [ARGS ...])",
        description="Reads a process's resident memory from outside, of /proc, and says how fast "
        "it grows, with a 95 % interval: a minute, and a tick where the process shows its ticks "
        "(ARENA_EXPORT=1, or arena.export_ticks() in it; a command started here does). What "
        "comes and goes, steps that stay, and a warm-up are no growth; until enough was seen it "
        'says "not yet". A command\'s own output is let through, and the watch speaks on stderr; '
        "it is ended with the watch, and cannot read from the terminal.",
        epilog="Exit status: 0 done; 1 it grows faster than --fail-above says; 3 that is not known "
        "yet; 2 wrong usage, a process that cannot be watched, or files that cannot be written; "
        "130 when Ctrl-C came before the time was over, after the report. A process that ends "
        "meanwhile is reported as far as it was seen; a command's own exit status is told in the "
        "report and the JSON.",
    )
    watch.add_argument("pid", nargs="?", metavar="PID")
    watch.add_argument(
        "--for",
        dest="seconds",
        type=_values.duration,
        metavar="TIME",
        help="how long: 60, 60s, 5m, 2h (default: until it ends, or Ctrl-C)",
    )
    watch.add_argument(
        "--every",
        type=_values.interval,
        default=0.5,
        metavar="TIME",
        help="time between two looks, 10ms or more (default: 500ms)",
    )
    watch.add_argument(
        "--limit",
        type=_values.limit,
        metavar="SIZE",
        help='say when it will reach this much, "2 GiB" (default: the limit of its control group)',
    )
    watch.add_argument(
        "--children",
        action=argparse.BooleanOptionalAction,
        help="count the memory of the processes that it starts, pages that are shared more than "
        "once (default: of a command, not of a PID)",
    )
    watch.add_argument(
        "--fail-above",
        type=_values.rate,
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
        "--plot",
        type=_values.chart,
        metavar="FILE",
        help="draw the curve: a .png, or a page: .html",
    )
    watch.set_defaults(run=_watch)


def _watch(args: argparse.Namespace) -> int:
    # A plain kill ends the watch as Ctrl-C does, and the command with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, signal.default_int_handler)
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
            children=args.children,
            fail_above=args.fail_above,
            json=args.json,
            plot=args.plot,
        )
    )


def _add_doctor(commands: _Commands) -> None:
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
        type=_values.duration,
        default=10.0,
        metavar="TIME",
        help="how long to watch, such as 10s, 5m or 2h (default: 10s)",
    )
    doctor.add_argument(
        "--warm-up",
        type=_values.duration,
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


def _add_map(commands: _Commands) -> None:
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


def _add_tune(commands: _Commands) -> None:
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

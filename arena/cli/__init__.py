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
from typing import NoReturn

from arena._version import __version__

__all__ = ["UsageError", "main"]

_EXTRAS = {"rich": "cli", "psutil": "cli", "matplotlib": "plot"}


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
    return parser


def _quiet_stdout() -> None:
    """Send what is still buffered nowhere: the reader of our output has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m arena`` with these arguments and return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    prog = f"{parser.prog} {args.command}"
    # A plain kill ends the run as Ctrl-C does: no draft of a file is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from arena.cli import demo

        return demo.run(demo.Options(args.seconds, args.rate, args.input, args.plot, args.json))
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

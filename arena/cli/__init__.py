"""The command line: reads the arguments of ``python -m arena`` and calls what they name.

Whatever a user can get wrong is one line on stderr and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from arena._version import __version__
from arena.cli._commands import add_all
from arena.cli._errors import UsageError

__all__ = ["UsageError", "main"]

_EXTRAS = {"rich": "cli", "psutil": "cli", "matplotlib": "plot"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line: argparse would print the usage in front of it."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m arena",
        description="arena: tick-scoped memory for long-running Python loops.",
    )
    parser.add_argument("--version", action="version", version=f"tick-arena {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    add_all(commands)
    return parser


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

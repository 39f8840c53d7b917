"""The command line of the benchmarks: ``python -m benchmarks NAME [NAME ...]``."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import NoReturn

import benchmarks
from benchmarks.churn.variants import VARIANTS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(message)


def _fail(message: str, code: int = 2) -> NoReturn:
    print(f"benchmarks: {message}", file=sys.stderr)
    raise SystemExit(code)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError
    return count


_count.__name__ = "number of ticks"  # argparse puts it into its message


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parse(names: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m benchmarks", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="short runs: to see that they work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--ticks", type=_count, metavar="N", help="length of a steady run")
    parser.add_argument("--only", type=_names, default=(), metavar="A,B", help="variants of churn")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what churn saw over time")
    options = parser.parse_args()
    for name in options.names:
        if name not in names:
            parser.error(f"no benchmark is called {name!r}; there are {', '.join(names)}")
    for name in options.only:
        if name not in VARIANTS:
            parser.error(f"--only: churn has no variant {name!r}; there are {', '.join(VARIANTS)}")
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            parser.error(f"{flag}: cannot write {path}")
    return options


def main() -> int:
    """Run what the command line asks for, and return the exit code."""
    names = sorted(
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if not module.name.startswith("_")
    )
    options = _parse(names)
    try:
        from rich.console import Console

        from benchmarks._report import Options, Report

        modules = {name: importlib.import_module(f"benchmarks.{name}") for name in names}
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is missing: pip install -e '.[test]'")
    except ImportError as error:  # of arena, which says how to build it
        _fail(str(error))
    if not options.names:
        for name, module in modules.items():
            print(f"{name:12}{(module.__doc__ or '').splitlines()[0]}")
        return 0
    # Wide enough for a whole table also where the output is a file.
    width = None if sys.stdout.isatty() else 110
    report = Report(Console(width=width))
    report.say(" | ".join(f"{key} {value}" for key, value in report.machine.items()))
    asked = Options(options.quick, options.ticks, options.only, options.plot)
    try:
        for name in options.names:
            report.begin(name, modules[name].__doc__ or "")
            modules[name].run(asked, report)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except benchmarks.UnavailableError as error:
        _fail(str(error), 1)
    if options.json is not None:
        options.json.write_text(report.as_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the command line takes: text in, a value out, or the one line that says what is wrong."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arena.cli._watch_report import Rate

__all__ = ["chart", "duration", "interval", "limit", "picture", "positive", "rate", "whole_seconds"]

_UNITS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"not a finite number above 0: {text!r}")
    return number


def whole_seconds(text: str) -> float:
    """Seconds, one at the least."""
    seconds = positive(text)
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"less than 1 second shows nothing: {text!r}")
    return seconds


def duration(text: str) -> float:
    """A length of time in seconds: "60", "60s", "5m", "2h" or "500ms"."""
    unit = text.lstrip("0123456789.")
    try:
        seconds = float(text.removesuffix(unit)) * _UNITS[unit.strip()]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= 1e9:
        raise argparse.ArgumentTypeError(
            f"not a time above 0, such as 60, 60s, 5m, 2h or 500ms: {text!r}"
        )
    return seconds


def interval(text: str) -> float:
    """The time between two looks, in seconds."""
    seconds = duration(text)
    if seconds < 0.01:
        raise argparse.ArgumentTypeError(f"more often than each 10 ms is too much: {text!r}")
    return seconds


def limit(text: str) -> int:
    """A size above 0, in bytes."""
    from arena import _native

    try:
        size = _native._size(text, "a limit")
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size == 0:
        raise argparse.ArgumentTypeError("nothing fits into 0 bytes")
    return size


def rate(text: str) -> Rate:
    """Bytes per minute or per tick: "1 MiB/min", "1 kB/tick"."""
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


def chart(text: str) -> Path:
    """A file for a curve."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".html"):
        raise argparse.ArgumentTypeError(f"the curve is a .png or an .html file: {text!r}")
    return path


def picture(text: str) -> Path:
    """A file for a picture."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"the picture is a .png file: {text!r}")
    return path

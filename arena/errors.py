"""The errors of arena, and how several of them that happen at once are told together."""

from __future__ import annotations

import sys
import traceback

__all__ = [
    "ArenaError",
    "BodyLimitError",
    "DisconnectError",
    "EscapeError",
    "GrowthError",
    "LimitError",
    "StaleError",
    "TickError",
    "TrimError",
    "WrongThreadError",
]


class ArenaError(Exception):
    """The base of every error of arena's own. Wrong types and values are plain built-in errors."""


class StaleError(ArenaError, ReferenceError):
    """A handle was used after its tick had ended, or after its persisted memory was freed."""


class ClosedError(StaleError, ValueError):
    """flush() or len() of a stale StrBuf: a ValueError too, as the closed io classes raise."""


class TickError(ArenaError, RuntimeError):
    """No tick is open, or the tick is not in a state that allows the call (ended, ending)."""


class WrongThreadError(ArenaError, RuntimeError):
    """A tick, or scratch of it, was used by another thread than the one that began it."""


class LimitError(ArenaError, MemoryError):
    """An allocation would pass the limit of its tick, of one around it, or of the process.

    Everything is as it was before the call. A ``MemoryError`` too.
    """


class BodyLimitError(LimitError):
    """The body of a request is larger than ``read_body()`` was to take. Nothing of it is kept."""

    def __init__(self, limit: int, size: int, announced: bool = False) -> None:
        super().__init__(limit, size, announced)
        self.limit = limit
        """The most bytes that the body may have."""
        self.size = size
        """Bytes that had come, or that Content-Length says."""
        self.announced = announced
        """True: it was refused by its Content-Length, before any of it was read."""

    def __str__(self) -> str:
        came = f"Content-Length says {self.size}" if self.announced else f"{self.size} have come"
        return f"the body is over its limit: {self.limit} bytes are allowed, {came}"


class DisconnectError(ArenaError, ConnectionError):
    """The client went away before ``read_body()`` had all of the body."""


class EscapeError(ArenaError, BufferError):
    """A tick opened with ``escapes="raise"`` ended while views into it were alive."""


class TrimError(ArenaError, RuntimeError):
    """A second ``Trimmer`` was started while one runs: the text names the first."""


class GrowthError(ArenaError, AssertionError):
    """``assert_no_growth()`` found memory that grows tick after tick. An ``AssertionError`` too."""


def thread_label(ident: int) -> str:
    """Name the thread with this ident for a message; threads that have ended have no name left."""
    import threading

    for thread in threading.enumerate():
        if thread.ident == ident:
            return f"{thread.name!r} (ident {ident})"
    if ident in sys._current_frames():  # gevent's threading has other idents
        return f"a thread without a name (ident {ident})"
    return f"a thread that has ended (ident {ident})"


_NOTES = 100  # on one exception
_NO_MORE = "arena adds no more notes to this exception: it has too many"
_NOTE = 20_000  # characters


def _part_from(failure: BaseException, body: BaseException) -> None:
    """Cut the body's exception out of what led to a failure, for it is the one with the note.

    Left in, each note would tell all notes before it again.
    """
    seen: set[int] = set()
    error: BaseException | None = failure
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if error.__cause__ is body:
            error.__cause__ = None
        if error.__context__ is body:
            error.__context__ = None
        error = error.__cause__ or error.__context__


def _shortened(note: str) -> str:
    left_out = len(note) - _NOTE
    if left_out <= 0:
        return note
    half = _NOTE // 2
    return f"{note[:half]}\n... {left_out} characters are left out ...\n{note[-half:]}"


def settle(
    tick: str,
    failures: list[BaseException],
    escape: EscapeError | None,
    body: BaseException | None,
) -> BaseException | None:
    """Decide what the end of a tick raises: the body's own exception always wins.

    ``failures`` are those of the cleanups, in the order in which they ran. Returns the exception
    to raise; None when the body's exception is on its way and has been given notes instead. Of
    the failures that is a group, or KeyboardInterrupt or SystemExit as such, the rest in a note.
    """
    group = (
        BaseExceptionGroup(f"{len(failures)} cleanup(s) of {tick} failed", failures)
        if failures
        else None
    )
    notes = []
    if group is not None:
        if body is not None:
            for failure in failures:
                _part_from(failure, body)
        notes.append(_shortened("".join(traceback.format_exception(group)).rstrip()))
    if escape is not None:
        notes.append(f"EscapeError: {escape}")
    if body is not None:
        # One exception may be raised through tick after tick, for as long as the process runs.
        told = getattr(body, "__notes__", None)
        room = _NOTES - (len(told) if isinstance(told, list) else 0)
        if room > 0:
            for note in notes if room > len(notes) else [*notes[: room - 1], _NO_MORE]:
                body.add_note(note)
        return None
    # Ctrl-C and sys.exit() in a cleanup mean what they mean elsewhere; a group would hide them.
    leave = next((error for error in failures if not isinstance(error, Exception)), None)
    main = leave or group or escape
    if main is not None:
        for note in notes if main is leave else notes[1:]:
            main.add_note(note)
    return main

"""The errors of arena, and how several of them that happen at once are told together."""

from __future__ import annotations

import sys
import traceback

__all__ = [
    "ArenaError",
    "EscapeError",
    "LimitError",
    "StaleError",
    "TickError",
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
    """An allocation would take a tick past its limit; the tick is as it was before the call."""


class EscapeError(ArenaError, BufferError):
    """A tick opened with ``escapes="raise"`` ended while views into it were alive."""


def thread_label(ident: int) -> str:
    """Name the thread with this ident for a message; threads that have ended have no name left."""
    import threading

    for thread in threading.enumerate():
        if thread.ident == ident:
            return f"{thread.name!r} (ident {ident})"
    if ident in sys._current_frames():  # gevent's threading has other idents
        return f"a thread without a name (ident {ident})"
    return f"a thread that has ended (ident {ident})"


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
        notes.append("".join(traceback.format_exception(group)).rstrip())
    if escape is not None:
        notes.append(f"EscapeError: {escape}")
    if body is not None:
        for note in notes:
            body.add_note(note)
        return None
    # Ctrl-C and sys.exit() in a cleanup mean what they mean elsewhere; a group would hide them.
    leave = next((error for error in failures if not isinstance(error, Exception)), None)
    main = leave or group or escape
    if main is not None:
        for note in notes if main is leave else notes[1:]:
            main.add_note(note)
    return main

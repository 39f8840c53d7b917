"""``debug()``: the dial that makes C code which touches a dead tick show itself."""

from __future__ import annotations

import dataclasses

from arena._native import lib

__all__ = ["Debug", "debug"]


@dataclasses.dataclass(frozen=True, slots=True)
class Debug:
    """What the dial has turned on, for memory that ends from now on."""

    fill: bool
    """Ended memory is overwritten with 0xDD."""
    noreuse: bool
    """Ended chunks are never used again and stay readable. Resident memory grows."""
    guard: bool
    """Ended chunks cannot be touched, and a page that faults lies behind each oversize block."""


_FLAGS = {
    "fill": lib.ARENA_DEBUG_FILL,
    "noreuse": lib.ARENA_DEBUG_NOREUSE,
    "guard": lib.ARENA_DEBUG_GUARD,
}


def debug(
    *, fill: bool | None = None, noreuse: bool | None = None, guard: bool | None = None
) -> Debug:
    """Turn parts of the dial on or off, and return what is on; None leaves a part as it is.

    For finding code that keeps a raw pointer into a tick: what it reads is a pattern (``fill``),
    never another tick's data (``noreuse``), or a fault that stops it at the culprit (``guard``),
    with the Python line when ``faulthandler`` is on. Handles and views need none of it: they raise,
    or pin. ``noreuse`` and ``guard`` keep address space for as long as the process lives.

    ``ARENA_DEBUG=fill,guard`` in the environment sets the start. The dial is the process's; any
    thread may turn it. Raises TypeError for a value that is neither bool nor None. C: arena_debug.
    """
    given = {"fill": fill, "noreuse": noreuse, "guard": guard}
    flags = lib.arena_debug_now()
    for name, on in given.items():
        if on is None:
            continue
        if not isinstance(on, bool):
            raise TypeError(f"{name} is True, False or None, not {type(on).__name__}")
        flags = flags | _FLAGS[name] if on else flags & ~_FLAGS[name]
    lib.arena_debug(flags)
    return Debug(**{name: bool(flags & flag) for name, flag in _FLAGS.items()})

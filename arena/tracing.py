"""``trace()`` and ``audit()``: what is recorded about the places that memory comes from."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self

from arena import _native
from arena._load import prepare
from arena._native import lib

__all__ = ["Audit", "Trace", "audit", "trace"]

DEPTH = 32
"""The most frames of one site. C: ARENA__DEPTH."""
BUDGET = "256 MiB"


class _Setting(abc.ABC):
    """What a switch has set. As a context manager, its end sets what was before."""

    __slots__ = ()

    @abc.abstractmethod
    def _restore(self) -> None:
        """Set what was before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()


class Trace(_Setting):
    """What ``trace()`` has set. As a context manager, its end sets what was before."""

    __slots__ = ("_before", "depth")

    def __init__(self, depth: int, before: int) -> None:
        self.depth = depth
        """Frames of each site that are recorded; 0: none."""
        self._before = before

    def _restore(self) -> None:
        lib.arena_trace(self._before)

    def __repr__(self) -> str:
        return (
            f"<arena.trace: {self.depth} frame(s) of each site>"
            if self.depth
            else "<arena.trace: off>"
        )


def trace(depth: int = 1) -> Trace:
    """Record where memory comes from, ``depth`` frames of each place (at most 32); 0 stops.

    From now on each handle, persisted copy, view and stray of the process knows the lines above it:
    ``StaleError`` says where its handle was allocated and where its tick began and ended, and
    ``escapes()`` has a row for each line that something escapes from. What is recorded stays when
    it stops. A line in arena's own files is never one; the line that called them is.

    Off it costs nothing; for what it costs on, see ``python -m benchmarks trace``. At most 65,535
    sites, 1,022 names of ticks and 16,384 code objects are told apart: what comes later is counted
    without its site, or its name, and nothing fails.

    ``with arena.trace(8):`` records inside the block only; ``tick(trace=8)`` in one tick only.
    ``ARENA_TRACE=depth`` in the environment sets the start. It is the process's; any thread may set
    it. Raises TypeError, ValueError, MemoryError. C: arena_trace.
    """
    if not isinstance(depth, int) or isinstance(depth, bool):
        raise TypeError(f"depth is a number of frames from 0 to {DEPTH}, not {depth!r}")
    if not 0 <= depth <= DEPTH:
        raise ValueError(f"depth is a number of frames from 0 to {DEPTH}, not {depth}")
    prepare()
    before = lib.arena_trace(depth)
    if before < 0:
        raise MemoryError("no memory for the map of escapes")
    return Trace(depth, before)


class Audit(_Setting):
    """What ``audit()`` has set. As a context manager, its end sets what was before."""

    __slots__ = ("_before", "_traced", "budget")

    def __init__(self, budget: int, before: int, traced: int) -> None:
        self.budget = budget
        """Bytes that are kept at most; 0: there is no audit."""
        self._before = before
        self._traced = traced

    def _restore(self) -> None:
        _native._audit(self._before)
        lib.arena_trace(self._traced)

    def __repr__(self) -> str:
        return f"<arena.audit: keeps {self.budget} bytes>" if self.budget else "<arena.audit: off>"


def audit(budget: int | str | None = BUDGET) -> Audit:
    """Let ticks end without harm: keep what they had, and record who still uses it.

    A tick that ends while handles of it are held is over, and stays readable: a stale handle gives
    the true old bytes, may even be appended to, raises nothing, and is recorded in ``escapes()``
    with the line that allocated it and the line that used it. So a loop can be wrapped and run as
    it is, while the map fills. ``budget`` (bytes, or "256 MiB"; None or 0 stops) is the most that
    is kept, chunks of ended ticks whose handles are held, oldest first out: past it ``StaleError``
    is raised as usual. Ticks with ``wipe=True`` are not kept. ``stats().quarantined`` says what is.

    Records sites too: ``trace(1)``, when nothing is recorded yet. Memory of C ticks is kept as
    well, and who touches it is stopped by the processor, recorded and let go on: see arena_audit in
    arena.h.

    ``with arena.audit():`` audits inside the block only. ``ARENA_AUDIT=1`` in the environment sets
    the start. It is the process's; any thread may set it. Raises TypeError, ValueError,
    MemoryError. C: arena_audit.
    """
    prepare()
    traced = lib.arena_tracing()
    before = _native._audit(budget)
    return Audit(lib.arena_audit_now(), before, traced)

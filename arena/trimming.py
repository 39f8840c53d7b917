"""``trim()``: memory goes back to the operating system, at a cost that is known beforehand."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from typing import Any

from arena import _native, objects
from arena._native import ffi, lib
from arena._proc import ProcError, statm
from arena._walk import Plan, learn, plan

__all__ = [
    "KEEP_RETAINED",
    "Totals",
    "TrimResult",
    "run",
    "switched_off",
    "time_of",
    "totals",
    "trim",
    "trim_async",
]

_NONE = lib.ARENA_HEAP_NONE
_NEVER = 2**64 - 1
KEEP_RETAINED = 2 * sys.maxsize + 1
"""For the chunks to keep: what the retention wants. C: ARENA_TRIM_KEEP_RETAINED."""
_NO_WAY = "this process's allocator has no way to give memory back"


@dataclasses.dataclass(frozen=True, slots=True)
class TrimResult:
    """What a trim did. Sizes in bytes, times in milliseconds."""

    reason: str
    """Why it ran, as its caller said."""
    backend: str
    """Whose heap it is: "glibc", "jemalloc", "mimalloc", "macos", or "none" where there is no
    way."""
    resident_before: int
    """Resident memory of the process, as the system has it; 0 where that is not known."""
    resident_after: int
    chunks: int
    """Bytes of arena's own cached chunks, and of spans for objects, that were given back."""
    milliseconds: float
    """In all."""
    heap_milliseconds: float | None
    """For the walk of the heap, in which others who allocate wait; None: it was not walked."""
    code: int | None
    """What the allocator returned, which does not tell whether anything came back."""
    skipped: tuple[str, ...] = ()
    """What was left out, and why."""
    shared: bool = False
    """The figures are of a trim that another caller had begun."""

    @property
    def returned(self) -> int:
        """Bytes by which resident memory fell; below 0 when other threads took more meanwhile."""
        return self.resident_before - self.resident_after

    def __str__(self) -> str:
        text = (
            f"{self.returned / 1e6:.1f} MB came back in {self.milliseconds:.1f} ms "
            f"({self.backend}; {self.resident_before / 1e6:.1f} to "
            f"{self.resident_after / 1e6:.1f} MB)"
        )
        return "; ".join([text, *self.skipped])


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """What all trims of the process have done, whoever asked for them. None of it ever falls."""

    trims: int = 0
    returned: int = 0
    """Bytes, of the trims at which resident memory fell."""
    milliseconds: float = 0.0
    worst_ms: float = 0.0
    """The longest walk of the heap."""
    skips: dict[str, int] = dataclasses.field(default_factory=dict)
    """Trims that did not walk it, by reason: as in ``TrimmerStats``, and "budget" (chunks took the
    time), "none" (the allocator has no way)."""

    def plus(self, result: TrimResult, skipped: str) -> Totals:
        """Return the totals with one more."""
        skips = self.skips
        if skipped:
            skips = {**skips, skipped: skips.get(skipped, 0) + 1}
        if result.shared:  # the other caller's figures are in already
            return dataclasses.replace(self, skips=skips)
        return Totals(
            trims=self.trims + 1,
            returned=self.returned + max(0, result.returned),
            milliseconds=self.milliseconds + result.milliseconds,
            worst_ms=max(self.worst_ms, result.heap_milliseconds or 0.0),
            skips=skips,
        )


# A lock that a signal handler which trims may take again, in the middle of a count.
_totals = Totals()
_totals_lock = threading.RLock()


def totals() -> Totals:
    """Return what all trims have done. Any thread may ask."""
    return _totals


def _forked() -> None:
    global _totals_lock
    _totals_lock = threading.RLock()  # a thread that is not here may have held it


os.register_at_fork(after_in_child=_forked)


def _count(result: TrimResult, skipped: str) -> None:
    global _totals
    with _totals_lock:
        _totals = _totals.plus(result, skipped)


def log() -> logging.Logger:
    """The one logger of arena. Nothing is printed unless the program configures it."""
    logger = logging.getLogger("arena")
    if not logger.handlers:  # without one, logging prints warnings and errors itself
        logger.addHandler(logging.NullHandler())
    return logger


def switched_off() -> bool:
    """Whether ARENA_TRIM=off is set: then nothing is trimmed."""
    return os.environ.get("ARENA_TRIM", "").lower() == "off"


def run(reason: str, keep: int, budget_ms: float | None) -> tuple[TrimResult, Plan]:
    """Trim, and learn from how long it took. Arguments are valid."""
    start = time.perf_counter()
    at_first = _resident()
    given = objects.give_back(None if budget_ms is None else start + budget_ms / 1e3)
    spent = (time.perf_counter() - start) * 1e3 if given else 0.0
    planned = Plan()
    if budget_ms is not None and lib.arena_heap_kind() != _NONE:
        planned = plan(budget_ms - spent)
    budget = _NEVER if budget_ms is None else max(0, int((budget_ms - spent) * 1e6))
    predicted = _NEVER if planned.withheld else int(planned.predicted * 1e6)
    _, before, after, chunks, kept, ns, _, heap_ns, backend, heap, code, shared = _native._trim(
        keep, budget, 0 if budget_ms is None else predicted
    )
    walked = heap == 2
    skipped = []
    if keep != KEEP_RETAINED and kept > keep and not shared:
        why = "the time was over" if budget_ms is not None else "other threads put them there"
        skipped.append(f"{kept:,} bytes of chunks stay cached: {why}")
    if heap == 0:
        skipped.append(_NO_WAY)
    elif heap == 1 and not shared:
        skipped.append(planned.withheld or "the heap was not walked: the time was over")
    if walked and not shared:
        learn(planned, heap_ns / 1e6)
    result = TrimResult(
        reason=reason,
        backend=ffi.string(lib.arena_heap_name(backend)).decode(),
        resident_before=at_first if given and not shared else before,
        resident_after=after,
        chunks=chunks + given,
        milliseconds=ns / 1e6 + spent,
        heap_milliseconds=heap_ns / 1e6 if walked else None,
        code=code if walked else None,
        skipped=tuple(skipped),
        shared=bool(shared),
    )
    if shared:
        missed = "shared"
    elif heap == 0:
        missed = "none"
    else:
        missed = "" if walked else planned.kind or "budget"
    _count(result, missed)
    log().debug("trim (%s): %s", reason, result)
    return result, planned


def _resident() -> int:
    try:
        return statm().resident
    except ProcError:
        return 0


def _nothing(reason: str, why: str) -> TrimResult:
    return TrimResult(reason, "none", 0, 0, 0, 0.0, None, None, (why,))


def time_of(value: Any, name: str, unit: str) -> float:
    """Check a time: a number above 0, and at most 10^9. Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of {unit}, such as 10, not {value!r}")
    if not 0 < value <= 1e9:
        shown = value if isinstance(value, float) or abs(value) < 1e20 else "a larger one"
        raise ValueError(f"{name} is a number of {unit} above 0 and up to 10^9, not {shown}")
    return float(value)


def trim(
    budget_ms: float | None = None, keep: int | str = 0, reason: str = "asked for"
) -> TrimResult:
    """``arena.trim()``, which csrc/python/heap.c calls when there is anything to do."""
    if budget_ms is not None:
        budget_ms = time_of(budget_ms, "budget_ms", "milliseconds")
    kept = _native._size(keep, "keep")
    if not isinstance(reason, str):
        raise TypeError(f"reason is a str, not {reason!r}")
    if switched_off():
        return _nothing(reason, "ARENA_TRIM=off is set")
    if _native._trim_is_idle():
        return _nothing(reason, _NO_WAY)
    return run(reason, kept, budget_ms)[0]


async def trim_async(
    budget_ms: float | None = None, keep: int | str = 0, reason: str = "asked for"
) -> TrimResult:
    """``trim()`` in a thread of asyncio's pool, so that the loop runs on meanwhile.

    It waits all the same when it allocates from the heap that is being walked: give a ``budget_ms``
    where that matters. A task that is cancelled does not stop the trim. Where the allocator has no
    way to give back, no thread is started. Arguments and errors as ``trim()``.
    """
    if lib.arena_heap_kind() == _NONE:
        return _native.trim(budget_ms, keep, reason)
    import asyncio

    return await asyncio.to_thread(_native.trim, budget_ms, keep, reason)


if lib.arena_heap_kind() == _NONE:
    _native._trim_nothing(_nothing("asked for", _NO_WAY))

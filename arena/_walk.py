"""Whether to walk the C heap within a budget of time: decided from what is free, before it is
done."""

from __future__ import annotations

import dataclasses
import time

from arena._native import ffi, lib
from arena._proc import ProcError, heaps, statm
from arena._stall import Look, Stall
from arena.heap import heap_figures

__all__ = ["Plan", "learn", "plan", "stall"]

_WORTH = 1 << 20  # bytes: for less a heap is not walked
_PAUSE_MS_PER_MB = 0.27  # of a whole heap in small pieces: the longest that was measured

stall = Stall()  # no lock over it, which a fork might find held: a lost update does no harm


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Whether to walk the heap."""

    predicted: float = 0.0
    """Milliseconds."""
    withheld: str | None = None
    """Why it is not walked; None: it is."""
    kind: str = ""
    """That in a word: "unseen", "stall", "nothing"."""
    look: Look | None = None
    """What is free and resident, as far as that is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Walked:
    """What there was after the last walk, when all that was free had gone back. Bytes."""

    own: int
    used: int


_walked: _Walked | None = None


def plan(budget_ms: float) -> Plan:
    """Decide whether to walk the heap, if it may take ``budget_ms`` milliseconds.

    How long that takes depends on what is free, and to know that takes a look, which costs time
    too: it is done when that is predicted to be within the budget.
    """
    own = _own()
    size = _heap_size(own) if lib.arena_heap_kind() == lib.ARENA_HEAP_GLIBC else 0
    look_ms = stall.look(size)  # others than glibc keep counts, and go through nothing
    if look_ms > budget_ms:
        return Plan(
            look_ms,
            f"the heap was not walked: its {size / 1e6:,.0f} MB are too much to look at what is "
            f"free in {budget_ms:.3g} ms (a look may take {look_ms:.1f}); up to that much may be "
            "free and stay resident: call arena.trim() where a pause of "
            f"{size / 1e6 * _PAUSE_MS_PER_MB:,.0f} ms does not matter",
            "unseen",
        )
    start = time.perf_counter()
    seen = heap_figures()
    took = (time.perf_counter() - start) * 1e3
    if seen is None or seen.free is None:
        return _blind(own, budget_ms)
    if size:
        stall.looked(size, took)
    look = _resident(Look(seen.free, seen.blocks_free or 0), own, seen.used or 0)
    walk_ms = stall.walk(look)
    if look.free < _WORTH:
        why = f"the heap was not walked: {look.free:,} bytes of it are free and resident"
        return Plan(walk_ms, why, "nothing", look)
    if took + walk_ms > budget_ms:
        pieces = f" in {look.pieces:,} pieces" if look.pieces else ""
        return Plan(
            walk_ms,
            f"the heap was not walked: {look.free / 1e6:,.0f} MB are free{pieces}, and to give "
            f"them back is predicted to take {walk_ms:,.0f} ms, over {budget_ms:.3g}: call "
            "arena.trim() where such a pause does not matter",
            "stall",
            look,
        )
    return Plan(walk_ms, look=look)


def learn(planned: Plan, ms: float) -> None:
    """The heap was walked, in so many milliseconds."""
    global _walked
    if planned.look is not None:
        stall.walked(planned.look, ms)
    seen = heap_figures()
    _walked = None if seen is None or seen.used is None else _Walked(_own(), seen.used)


def _blind(own: int, budget_ms: float) -> Plan:
    """Where the allocator does not tell what is free (mimalloc): it may be all."""
    look = Look(own, 0)
    walk_ms = stall.walk(look)
    if walk_ms <= budget_ms:
        return Plan(walk_ms, look=look)
    name = ffi.string(lib.arena_heap_name(lib.arena_heap_kind())).decode()
    return Plan(
        walk_ms,
        f"the heap was not walked: {name} does not tell how much of {own / 1e6:,.0f} MB is free; "
        f"to give all of it back is predicted to take {walk_ms:,.0f} ms, over {budget_ms:.3g}",
        "stall",
        look,
    )


def _resident(look: Look, own: int, used: int) -> Look:
    """What of that is resident. An allocator counts what it has given back inside of its heap as
    free.

    After a walk nothing was; what came since and is not in use may be.
    """
    most = own
    if _walked is not None:
        most = max(0, (own - _walked.own) - (used - _walked.used))
    if look.free <= most:
        return look
    return Look(most, round(look.pieces * most / look.free))


def _own() -> int:
    """Resident memory that is not shared with files or others, in bytes; 0: not known."""
    try:
        now = statm()
    except ProcError:
        return 0
    return max(0, now.resident - now.shared)


def _heap_size(own: int) -> int:
    """Bytes that a look may have to go through: glibc's heaps, and not what else is mapped."""
    try:
        return min(own, heaps())
    except ProcError:
        return own

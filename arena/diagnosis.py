"""``doctor()``: says which kind of growth it is, or what the level is made of, by measuring it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from arena import _later
from arena.trimming import time_of

if TYPE_CHECKING:
    from arena._census import Count

__all__ = ["Diagnosis", "Verdict", "doctor"]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that is so."""

    kind: str
    """For programs: "python-objects", "native-memory", "cycles", "retained", "fragmented",
    "pinned", "persisted", "scratch", "strays", "file-mapped", "shared-memory", "anonymous" (from
    outside), "flat", "peak", "unknown"."""
    text: str
    """For people."""
    next: str
    """The one next step."""
    growing: bool = False
    figures: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    """What is behind it: bytes, unless the name says otherwise."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is the matter with the memory of a process. ``print()`` it; sizes are bytes."""

    pid: int
    allocator: str
    """Whose malloc it is: "glibc", "jemalloc", "mimalloc", "macos", "none" (or, from outside, what
    is mapped: also "tcmalloc", "musl", "unknown")."""
    seconds: float
    """For how long it was watched."""
    turns: int | None
    """Turns of ``work()``, or ticks that the process has exported meanwhile; None: not counted."""
    verdicts: tuple[Verdict, ...]
    """The first is the main one."""
    figures: dict[str, Any]
    """All that was measured, by moment ("first", "last", "collected", "trimmed") and source."""
    types: tuple[Count, ...] = ()
    """Types of Python objects that there are more of, most bytes first."""
    notes: tuple[str, ...] = ()
    """What is missing, was cut short, or must be known to read the rest."""
    costs_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    """What the dear measurements took."""

    @property
    def growing(self) -> bool:
        """Whether memory was found to grow."""
        return any(verdict.growing for verdict in self.verdicts)

    @property
    def exit_status(self) -> int:
        """For scripts: 0 nothing wrong, 1 growing or memory to win back, 3 cannot tell yet."""
        kinds = {verdict.kind for verdict in self.verdicts}
        if self.growing or kinds - {"flat", "peak", "file-mapped", "unknown"}:
            return 1
        return 3 if "unknown" in kinds else 0

    def as_json(self) -> str:
        """Return it for programs: one JSON object."""
        import json

        return json.dumps(
            {
                "pid": self.pid,
                "allocator": self.allocator,
                "seconds": round(self.seconds, 3),
                "turns": self.turns,
                "growing": self.growing,
                "exit_status": self.exit_status,
                "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
                "types": [dataclasses.asdict(row) for row in self.types],
                "figures": self.figures,
                "notes": list(self.notes),
                "costs_ms": {name: round(ms, 3) for name, ms in self.costs_ms.items()},
            },
            indent=1,
        )

    def __str__(self) -> str:
        lines = []
        for number, verdict in enumerate(self.verdicts):
            lines.append(verdict.text if number == 0 else f"also: {verdict.text}")
            if not verdict.next.startswith("none: nothing"):
                lines.append(f"  next: {verdict.next}")
        lines.append(f"  process {self.pid}, watched for {self.seconds:.0f} s; {self._sums()}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _sums(self) -> str:
        from arena._verdicts import mb

        last = self.figures["last"]
        parts = [f"resident {mb(last['resident'])}"]
        words = {
            "heap_used": f"in use in the C heap ({self.allocator})",
            "heap_free": "free inside it",
            "small_held": "Python's arenas",
            "chunks": "arena's chunks",
            "persisted": "persisted",
            "file": "mapped files",
            "shmem": "shared",
            "swap": "swapped out",
        }
        parts += [f"{mb(last[name])} {what}" for name, what in words.items() if last.get(name)]
        return ", ".join(parts)


def doctor(
    work: Callable[[], object] | None = None,
    *,
    seconds: float = 10.0,
    turns: int | None = None,
    trim: bool = True,
    collect: bool = True,
) -> Diagnosis:
    """Watch the memory of this process, and say which kind of growth it is.

    ``work`` is one turn of the loop: it is called turn after turn for ``seconds``, or ``turns``
    times. Without it the doctor looks while other threads work, so it is called from a thread of
    its own; in the only thread it sees a level, no growth, and says so.

    It measures at a price, in which it holds the interpreter for a moment: a census of the live
    objects before and after (a microsecond each, two seconds at the most), the figures of the C
    heap and of Python's arenas, then a ``gc.collect()`` (``collect=False`` leaves it out) and a
    real ``arena.trim()`` (``trim=False``), in this order, as each shows what the one before could
    not reach. Any thread may call it. Raises TypeError and ValueError for arguments that make no
    sense, and what ``work`` raises. C: mallinfo2, malloc_trim.
    """
    seconds = time_of(seconds, "seconds", "seconds")
    if turns is not None:
        if isinstance(turns, bool) or not isinstance(turns, int):
            raise TypeError(f"turns is a whole number, such as 1000, not {turns!r}")
        if turns < 1:
            raise ValueError(f"turns is a whole number above 0, such as 1000, not {turns}")
        if work is None:
            raise ValueError("turns counts calls of work: give work, or seconds instead")
    if work is not None and not callable(work):
        raise TypeError(f"work is a function to call, or None, not {type(work).__name__}")
    if inspect.iscoroutinefunction(work) or inspect.isgeneratorfunction(work):
        raise TypeError(
            "work is called, and nothing more: give a plain function, such as "
            "lambda: asyncio.run(turn())"
        )
    for name, value in (("trim", trim), ("collect", collect)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} is True or False, not {value!r}")
    inside = _later.load("arena._inside")  # dear to import, and seldom wanted
    watch = inside.Watch(work, seconds, turns)
    found: Diagnosis = inside.examine(watch, trim=trim, collect=collect)
    return found

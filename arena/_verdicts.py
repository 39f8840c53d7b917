"""From figures to a verdict: which kind of growth it is, or what the level is made of.

Nothing here measures: ``judge()`` takes what ``diagnosis`` found, ``judge_outside()`` what can be
read of another process, and both return the verdicts, the one that matters most first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from arena._census import Count
from arena.diagnosis import Verdict

__all__ = [
    "Collector",
    "Evidence",
    "Level",
    "Moved",
    "Outside",
    "Trimmed",
    "judge",
    "judge_outside",
    "mb",
]

GROWTH = 512 << 10
"""Bytes that must have come in the time watched: the looks themselves, and first uses of code, move
resident memory by some 100 to 300 KB."""
WORTH = 8 << 20
"""Bytes of a level that are worth a word: below, it is what any interpreter has lying about (the
unused end of the heap, Python's arenas that are half full, garbage of the last second)."""
SHARE = 0.05
"""The same as a share of resident memory, for large processes. Memory that is stuck takes twice
both, as what is in use is known less well: it may be mapped, but not touched."""
CAUSE = 0.4
"""The share of growth that its main cause explains: what remains is one of the others."""
FILES = 64 << 20
"""Bytes of mapped files that are more than libraries."""
HEAPS = 4
"""Heaps of glibc that are more than a few threads have: then what is free is spread over them, and
comes back with each thread that frees. By default there are up to 8 for each processor."""
PEAK = 1.5
"""Times its level that a peak must be to be told."""


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """What there is at one moment, in bytes. None: not to be had here."""

    resident: int
    anonymous: int = 0
    file: int = 0
    shmem: int = 0
    peak: int = 0
    swap: int = 0
    heap_used: int | None = None
    """Of the C heap, with what malloc has mapped."""
    heap_free: int | None = None
    small_used: int | None = None
    """Of Python's own arenas."""
    small_held: int | None = None
    """The size of these arenas."""
    pinned: int = 0
    persisted: int = 0
    scratch: int = 0
    strays: int = 0
    chunks: int = 0
    """All pages that arena has mapped for ticks: open, cached and pinned."""
    loose: int | None = None
    """What of the C heap is resident and not in use, where its mappings tell that."""

    @property
    def live(self) -> int:
        """What is in use, as far as allocators know."""
        return (self.heap_used or 0) + (self.small_used or 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """How a series went, in bytes over the time watched."""

    state: str
    """Of a trend: "not yet", "flat", "growing", "shrinking"."""
    low: float = 0.0
    bytes: float = 0.0
    high: float = 0.0

    @property
    def grew(self) -> bool:
        """Whether it grew by more than looking at it makes it grow."""
        return self.state == "growing" and self.bytes >= GROWTH


@dataclasses.dataclass(frozen=True, slots=True)
class Collector:
    """Python's garbage collector."""

    enabled: bool
    thresholds: tuple[int, ...]
    visits: int
    """Of the oldest generation, ever, before the doctor's own."""
    watched: int
    """Those while the doctor looked."""
    frozen: int
    age: float | None = None
    """Seconds that the process has run."""
    unreachable: int | None = None
    """Objects that the doctor's own collection freed; None: it made none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trimmed:
    """What a real trim gave."""

    returned: int
    chunks: int = 0
    milliseconds: float = 0.0
    walked: bool = True
    """Whether it walked the C heap."""
    skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """All that the doctor found inside a process."""

    allocator: str
    seconds: float
    first: Level
    last: Level
    moved: dict[str, Moved]
    """Of resident memory ("resident") and what is in use ("live")."""
    large: int = 0
    """Bytes by which Python objects above 512 bytes grew: they are in the C heap."""
    types: Sequence[Count] = ()
    """What there was more of, by type."""
    worked: bool = True
    turns: int | None = None
    collector: Collector | None = None
    collected: Level | None = None
    trimmed: Level | None = None
    trim: Trimmed | None = None
    heaps: int | None = None
    limit: int | None = None
    """Bytes that the cgroup allows."""


def mb(count: float) -> str:
    """Bytes for people: "850 B", "12 KB", "3.4 MB", "1.3 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(count) >= 0.9995 * size:
            value = count / size
            return f"{value:.0f} {unit}" if abs(value) >= 9.95 else f"{value:.1f} {unit}"
    return f"{count:.0f} B"


# What to do next, by kind: one step each.
_MAP = (
    "map: run it as `python -m arena map --tick FILE:FUNCTION SCRIPT`: it names the lines whose "
    "memory outlives a turn"
)
_PIN = (
    "map: arena.trace(4) and print(arena.escapes()) name the lines that took the views: release "
    "them, or persist what must stay"
)
_PERSIST = (
    "map: arena.trace(4) and print(arena.escapes()) name the lines that persisted: free() what is "
    "replaced, or keep it in an arena.Store"
)
_NATIVE = (
    "profile: run it under `memray run --native` or heaptrack, which name the C functions: malloc "
    "does not tell who calls it"
)
_TRIM = "trim: with arena.Trimmer(): around the loop gives it back at a known cost"
_OTHER_TRIM = "trim: call arena.trim() where the memory was freed"
_TICK = (
    "tick: build text and buffers of a turn in arena.tick(), whose memory is not the heap's: it "
    "gets no new holes; what is stuck already goes with a restart"
)
_ARENAS = (
    "map: what lives long holds whole arenas of 1 MiB: `python -m arena map` names the lines that "
    "make it; make it before the rest, or in a process of its own"
)
_TICK_END = "tick: end it each turn, with arena.tick(): inside the loop, not around it"
_TUNE = (
    "tune: arena.tune(arena_max=2) before threads start; MALLOC_ARENA_MAX=2 in the environment "
    "does the same"
)
_COLLECT = (
    "collect: gc.collect() every so many turns, or lower thresholds: gc.set_threshold(700, 10, 10)"
)
_NOTHING = "none: nothing to do"
_LONGER = "watch: give it more seconds: python -m arena watch PID tells slow growth"
_ASK_INSIDE = (
    "doctor: ask inside: call arena.doctor(work) in the program, or start it as "
    "`python -m arena doctor SCRIPT`"
)


def judge(found: Evidence) -> tuple[Verdict, ...]:
    """Say what the figures mean, the main thing first."""
    growing = _growing(found)
    level = _level(found, growing)
    verdicts = growing + level
    if not verdicts:
        verdicts = [_nothing_found(found)]
    peak = _peak(found.last, found.first, bool(growing))
    return (*verdicts, *peak)


# Growth


def _growing(found: Evidence) -> list[Verdict]:
    moved = found.moved.get("resident", Moved("not yet"))
    live = found.moved.get("live", Moved("not yet"))
    if not moved.grew and not live.grew:
        return []
    grown = max((one for one in (moved, live) if one.grew), key=lambda one: one.bytes)
    causes = sorted(_causes(found), key=lambda cause: cause[0], reverse=True)
    total = max(grown.bytes, 1.0)
    named = [cause for cause in causes if cause[0] >= max(GROWTH, CAUSE * total)]
    if not named:
        what = "memory that neither malloc, nor Python, nor arena knows of"
        named = [(total, "native-memory", what, _NATIVE)]
    pace = _pace(total, found.seconds, found.turns and (found.turns, "turn"))
    pace += _left(total, found.seconds, found.limit, found.last.resident)
    verdicts = []
    for size, kind, what, following in named:
        verdicts.append(
            Verdict(
                kind,
                f"growing: {what}: {_of(size, total)} {pace}",
                following,
                True,
                {
                    "bytes": round(size),
                    "grown": round(total),
                    "per_minute": round(total / found.seconds * 60),
                    "low": round(grown.low),
                    "high": round(grown.high),
                },
            )
        )
    return verdicts


def _of(size: float, total: float) -> str:
    """How much of the growth it is. The parts are measured apart, so they may exceed the sum."""
    return mb(total) if size > 0.9 * total else f"{mb(size)} of {mb(total)}"


def _pace(grown: float, seconds: float, counted: tuple[int, str] | int | None) -> str:
    """How fast, by the minute and by what was counted: (how many, of what)."""
    pace = f"in {seconds:.0f} s ({mb(grown / seconds * 60)} a minute"
    if isinstance(counted, tuple):
        pace += f", {mb(grown / counted[0])} a {counted[1]}"
    return pace + ")"


def _left(grown: float, seconds: float, limit: int | None, resident: int) -> str:
    """When the cgroup's limit is reached, where there is one."""
    if limit is None:
        return ""
    left = max(0.0, (limit - resident) / (grown / seconds))
    return f"; it reaches the cgroup's limit of {mb(limit)} in {_time(left)}"


def _time(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _causes(found: Evidence) -> list[tuple[float, str, str, str]]:
    """All that may have grown: bytes, kind, words, next step. They do not overlap."""
    first, last = found.first, found.last

    def more(name: str) -> int:
        before, after = getattr(first, name), getattr(last, name)
        return 0 if before is None or after is None else after - before

    large = max(0, found.large)
    small = max(0, more("small_used"))
    if first.small_used is None or last.small_used is None:
        # Python's own arenas do not tell (hooks on its allocators, PYTHONMALLOC): by the census.
        small = max(0, sum(row.bytes for row in found.types) - large)
    python = small + large
    arena_own = more("persisted") + more("strays")
    if last.heap_used is not None:
        # What is in the heap and neither a Python object nor arena's, and what was mapped without
        # malloc: all private memory but that of the heap, of Python's arenas and of ticks.
        native = more("heap_used") - large - arena_own
        mapped = (
            more("anonymous")
            - more("heap_used")
            - more("heap_free")
            - more("small_held")
            - more("chunks")
        )
        native = max(0, native) + max(0, mapped)
        if first.small_used is None or last.small_used is None:
            native = max(0, native - small)  # which of the two these are in is not known
    else:
        native = max(0, more("anonymous") - python - arena_own - more("chunks"))
    freed = _freed(found)
    causes: list[tuple[float, str, str, str]] = [
        (
            native,
            "native-memory",
            "live native memory, taken by C code from malloc or mmap",
            _NATIVE,
        ),
        (more("pinned"), "pinned", "arena: memory of ended ticks, pinned by views", _PIN),
        (more("persisted"), "persisted", "arena: persisted memory", _PERSIST),
        (more("strays"), "strays", "arena: allocations of C code with no tick open", _TICK),
        (more("scratch"), "scratch", "arena: scratch of a tick that does not end", _TICK_END),
        (
            more("heap_free"),
            "retained",
            f"memory that is free inside {_heap(found)}",
            _TRIM,
        ),
        (more("file"), "file-mapped", _FILE_PAGES, _NOTHING),
        (
            more("shmem"),
            "shared-memory",
            _SHARED,
            "map: look for mmap.mmap(-1, n) and shared_memory that nobody closes, and in /dev/shm",
        ),
    ]
    if _in_cycles(found, freed) and freed >= python / 2:
        words = f"objects held in reference cycles {_since(found)}"
        causes.append((python, "cycles", words, _COLLECT))
    else:
        causes.append(
            (python, "python-objects", f"live Python objects{_mostly(found.types)}", _MAP)
        )
    return causes


_FILE_PAGES = "pages of mapped files, which the kernel drops when memory is short"
_SHARERS = "shared: look for who holds it: /dev/shm, or memfd in /proc/PID/maps"
_SHARED = "shared memory (mmap.mmap(-1, n), shared_memory, tmpfs, memfds), its own or others' too"


def _mostly(types: Sequence[Count]) -> str:
    most = [row for row in types if row.count > 0][:3]
    if not most:
        return ""
    return ", most of them " + ", ".join(f"{row.type} (+{row.count:,})" for row in most)


def _heap(found: Evidence) -> str:
    return "the C heap" if found.allocator == "none" else found.allocator


# What the level is made of


def _worth(found: Evidence) -> float:
    return max(WORTH, SHARE * found.last.resident)


def _freed(found: Evidence) -> int:
    """Bytes that the doctor's collection freed."""
    after = found.collected
    if after is None or found.collector is None or not found.collector.unreachable:
        return 0
    if found.last.heap_used is None:  # of large objects only resident memory tells
        small = (found.last.small_used or 0) - (after.small_used or 0)
        return max(0, small, found.last.resident - after.resident)
    return max(0, found.last.live - after.live)


def _in_cycles(found: Evidence, freed: int) -> bool:
    """Whether garbage lies about that the collector does not come to.

    It may wait a while: the oldest generation is visited when a quarter of it is new. So where it
    was visited while the doctor looked, it takes a quarter of all to be out of the ordinary.
    """
    collector = found.collector
    if collector is None or freed < _worth(found):
        return False
    return not collector.watched or freed > found.last.resident / 4


def _since(found: Evidence) -> str:
    collector = found.collector
    assert collector is not None
    limits = ", ".join(map(str, collector.thresholds))
    if not collector.enabled:
        return f"with the collector switched off (thresholds {limits})"
    if not collector.visits:
        since = "the process began"
        if collector.age is not None:
            since += f" {_time(collector.age)} ago"
    elif not collector.watched:
        since = f"the doctor began {found.seconds:.0f} s ago ({collector.visits:,} visits before)"
    else:
        return f"between the visits of the collector (thresholds {limits})"
    return f"that the collector has not visited since {since} (thresholds {limits})"


def _level(found: Evidence, growing: Sequence[Verdict]) -> list[Verdict]:
    """What the level holds that could be won back, the largest first."""
    told = {verdict.kind for verdict in growing}
    but = "besides," if growing else _but(found)
    parts = [*_level_cycles(found, but), *_level_heap(found, but), *_level_arena(found, but)]
    if not growing:
        parts += _level_files(found)
    parts.sort(key=lambda part: part[0], reverse=True)
    return [verdict for _, verdict in parts if verdict.kind not in told]


def _but(found: Evidence) -> str:
    moved = found.moved.get("resident", Moved("not yet"))
    return "flat, but" if found.worked and moved.state != "not yet" else "at rest:"


_Part = tuple[float, Verdict]


def _level_cycles(found: Evidence, but: str) -> list[_Part]:
    freed = _freed(found)
    if not _in_cycles(found, freed):
        return []
    assert found.collector is not None
    count = found.collector.unreachable or 0
    text = f"{but} {mb(freed)} were held in reference cycles {_since(found)}: "
    text += f"gc.collect() freed {count:,} objects"
    return [(freed, Verdict("cycles", text, _COLLECT, False, {"bytes": freed, "objects": count}))]


def _level_heap(found: Evidence, but: str) -> list[_Part]:
    """What is free inside the allocator: what a trim gives back, and what is stuck."""
    parts: list[_Part] = []
    before = found.collected or found.last
    free = before.heap_free
    after = found.trimmed
    if found.trim is None or after is None or not found.trim.walked:
        loose = _loose(before)
        if loose >= _worth(found):
            text = f"{but} up to {mb(loose)} are free inside {_heap(found)}; what a trim returns "
            text += "was not measured"
            parts.append((loose, Verdict("retained", text, _OTHER_TRIM, False, {"free": loose})))
        return parts
    returned = found.trim.returned
    # What the doctor's own collection freed was not free before.
    gained = 0
    if found.collected is not None and found.last.heap_used is not None:
        gained = max(0, found.last.heap_used - (found.collected.heap_used or 0))
    own = returned - min(gained, _freed(found))
    stuck = _loose(after)
    if own >= _worth(found):
        chunks = found.trim.chunks
        where = "in arena's own cached chunks" if chunks > own / 2 else f"inside {_heap(found)}"
        text = f"{but} {mb(own)} are free {where}: a trim returns it (measured: {mb(returned)} in "
        text += f"{found.trim.milliseconds:.0f} ms)"
        step = _TRIM
        if found.heaps and found.heaps > HEAPS and found.allocator == "glibc":
            text += f", or cap arenas: there are {found.heaps}"
            step = _TUNE
        if stuck >= own:
            text += f"; {mb(stuck)} more are free there and did not come back"
        figures: dict[str, float | None] = {
            "bytes": own,
            "returned": returned,
            "free": free,
            "stuck": stuck,
        }
        parts.append((own, Verdict("retained", text, step, False, figures)))
    # Where much came back, the rest may have been freed since, by those who work on.
    if stuck >= max(2 * _worth(found), 2 * own):
        share = max(0.0, own) / (max(0, own) + stuck)
        text = f"fragmented: {mb(stuck)} are free inside {_heap(found)} in pieces smaller than a "
        text += f"page: a trim cannot help, {100 * share:.0f} % would come back (measured)"
        figures = {"bytes": stuck, "returned": returned, "free": free, "share": round(share, 3)}
        parts.append((stuck, Verdict("fragmented", text, _TICK, False, figures)))
    small = (before.small_held or 0) - (before.small_used or 0)
    if before.small_used is not None and small >= 2 * _worth(found):
        text = f"fragmented: {mb(small)} are free inside Python's own arenas, each of which still "
        text += "holds something: a trim cannot help, it does not reach them"
        figures = {"bytes": small}
        parts.append((small, Verdict("fragmented", text, _ARENAS, False, figures)))
    return parts


def _loose(level: Level) -> int:
    """Bytes that are free inside the C heap and resident.

    What is counted as free may have gone back already, so it is no more than what resident memory
    has beyond what is in use.
    """
    if level.heap_free is None or level.heap_used is None:
        return 0
    if level.loose is not None:
        return max(0, min(level.heap_free, level.loose))
    used = level.heap_used + (level.small_held or 0) + level.chunks
    return max(0, min(level.heap_free, level.anonymous - used))


def _level_arena(found: Evidence, but: str) -> list[_Part]:
    last = found.last
    worth = min(_worth(found), 4 << 20)  # known to the byte, so there is no noise in it
    parts: list[_Part] = []
    if last.pinned >= worth:
        text = f"arena: {mb(last.pinned)} pinned by views into ticks that have ended"
        parts.append((last.pinned, Verdict("pinned", text, _PIN, False, {"bytes": last.pinned})))
    if last.strays >= worth:
        text = f"arena: {mb(last.strays)} were allocated by C code with no tick open, and live on"
        parts.append((last.strays, Verdict("strays", text, _TICK, False, {"bytes": last.strays})))
    return parts


def _level_files(found: Evidence) -> list[_Part]:
    file, resident = found.last.file, found.last.resident
    if file < FILES or file < resident / 2:
        return []
    return [(0.0, _files(file, resident))]  # nothing to win back: after all that has


def _files(file: int, resident: int) -> Verdict:
    text = f"flat: {mb(file)} of {mb(resident)} resident memory are {_FILE_PAGES}: no leak"
    return Verdict("file-mapped", text, _NOTHING, False, {"bytes": file, "resident": resident})


def _nothing_found(found: Evidence) -> Verdict:
    resident = found.last.resident
    moved = found.moved.get("resident", Moved("not yet"))
    figures = {"resident": resident}
    of = f" on {found.allocator}" if found.allocator not in ("none", "glibc") else ""
    if not found.worked:
        text = (
            f"level{of}: {mb(resident)}, but nothing else ran while the doctor looked, so nothing "
        )
        text += "could grow"
        step = (
            "doctor: call arena.doctor(work) with one turn of the loop, or from a thread beside it"
        )
        return Verdict("unknown", text, step, False, figures)
    if moved.state == "not yet":
        text = (
            f"not yet{of}: {mb(resident)}, and {found.seconds:.0f} s were too short to tell growth "
        )
        text += "from a start"
        return Verdict("unknown", text, _LONGER, False, figures)
    return Verdict("flat", _flat(resident, moved, found.seconds, of), _NOTHING, False, figures)


def _flat(resident: int, moved: Moved, seconds: float, of: str) -> str:
    least = max(GROWTH, moved.high) / seconds * 60
    text = f"flat{of} at {mb(resident)}: growth below {mb(least)} a minute would not show in "
    return f"{text}{seconds:.0f} s"


def _peak(last: Level, first: Level, growing: bool) -> list[Verdict]:
    level = max(last.resident, first.resident)
    if growing or last.peak < PEAK * level or last.peak < level + 2 * WORTH:
        return []
    text = f"peak, not level: it once had {mb(last.peak)} (what ru_maxrss shows), and has "
    text += f"{mb(level)} now"
    return [Verdict("peak", text, _NOTHING, False, {"peak": last.peak, "resident": level})]


# From outside


@dataclasses.dataclass(frozen=True, slots=True)
class Outside:
    """All that can be read of another process."""

    allocator: str
    """By what it has mapped: "glibc", "jemalloc", "mimalloc", "tcmalloc", "musl", "unknown"."""
    seconds: float
    first: Level
    last: Level
    moved: dict[str, Moved]
    """Of "resident", "anonymous", "file", "shmem"."""
    ticks: int | None = None
    limit: int | None = None


def judge_outside(found: Outside) -> tuple[Verdict, ...]:
    """Say what can be said of another process: growth and its kind of page, no more."""
    resident = found.moved["resident"]
    rows = [
        ("anonymous", "anonymous", "private memory: Python objects, native memory or memory that "
         "is free inside the allocator; from outside these look alike", _ASK_INSIDE),
        ("file", "file-mapped", _FILE_PAGES, _NOTHING),
        ("shmem", "shared-memory", _SHARED, _NOTHING),
    ]  # fmt: skip
    verdicts = []
    for name, kind, what, following in rows:
        moved = found.moved[name]
        if not moved.grew:
            continue
        pace = _pace(moved.bytes, found.seconds, found.ticks and (found.ticks, "tick"))
        pace += _left(moved.bytes, found.seconds, found.limit, found.last.resident)
        figures = {
            "bytes": round(moved.bytes),
            "per_minute": round(moved.bytes / found.seconds * 60),
        }
        text = f"growing: {what}: {mb(moved.bytes)} {pace}"
        verdicts.append(Verdict(kind, text, following, True, figures))
    verdicts.sort(key=lambda verdict: verdict.figures["bytes"] or 0, reverse=True)
    last = found.last
    if not verdicts:
        of = f" on {found.allocator}" if found.allocator not in ("unknown", "glibc") else ""
        if resident.state == "not yet":
            text = f"not yet{of}: {mb(last.resident)}, and {found.seconds:.0f} s were too short"
            verdicts = [Verdict("unknown", text, _LONGER, False, {"resident": last.resident})]
        elif last.file >= FILES and last.file >= last.resident / 2:
            verdicts = [_files(last.file, last.resident)]
        else:
            text = _flat(last.resident, resident, found.seconds, of)
            text += "; what the level is made of does not show from outside"
            verdicts = [Verdict("flat", text, _ASK_INSIDE, False, {"resident": last.resident})]
    return (*verdicts, *_peak(last, found.first, verdicts[0].growing))

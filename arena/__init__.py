"""arena: tick-scoped memory for long-running Python loops.

Everything that a tick allocates goes at its end in one step, unless it was explicitly persisted::

    import arena

    with arena.tick("awareness") as t:
        buf = t.strbuf()
        buf.append("scratch, gone when the tick ends")
        keep = buf.persist()
"""

from arena import _load as _load
from arena._native import (
    Block,
    Str,
    StrBuf,
    Tick,
    alloc,
    alloc_persist,
    begin,
    cleanup,
    current,
    end,
    persist,
    set_limit,
    strbuf,
    strbuf_persist,
    strdup,
    strdup_persist,
    tick,
)
from arena._version import __version__
from arena.debugging import Debug, debug
from arena.errors import (
    ArenaError,
    EscapeError,
    GrowthError,
    LimitError,
    StaleError,
    TickError,
    WrongThreadError,
)
from arena.escapes import Escape, EscapeMap, Frame, escapes
from arena.growth import assert_no_growth
from arena.loop import Ticks, ticks
from arena.memory import Stats, stats
from arena.objects import ObjectStats, object_stats
from arena.store import Store
from arena.tracing import Audit, Trace, audit, trace

__all__ = [
    "ArenaError",
    "Audit",
    "Block",
    "Debug",
    "Escape",
    "EscapeError",
    "EscapeMap",
    "Frame",
    "GrowthError",
    "LimitError",
    "ObjectStats",
    "StaleError",
    "Stats",
    "Store",
    "Str",
    "StrBuf",
    "Tick",
    "TickError",
    "Ticks",
    "Trace",
    "WrongThreadError",
    "__version__",
    "alloc",
    "alloc_persist",
    "assert_no_growth",
    "audit",
    "begin",
    "cleanup",
    "current",
    "debug",
    "end",
    "escapes",
    "object_stats",
    "persist",
    "set_limit",
    "stats",
    "strbuf",
    "strbuf_persist",
    "strdup",
    "strdup_persist",
    "tick",
    "ticks",
    "trace",
]

"""arena: tick-scoped memory for long-running Python loops.

Everything that a tick allocates goes at its end in one step, unless it was explicitly persisted::

    import arena

    with arena.tick("awareness") as t:
        buf = t.strbuf()
        buf.append("scratch, gone when the tick ends")
        keep = buf.persist()
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from arena import _later as _later
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
    trim,
)
from arena._version import __version__
from arena.counters import Stats, stats
from arena.debugging import Debug, debug
from arena.errors import (
    ArenaError,
    BodyLimitError,
    DisconnectError,
    EscapeError,
    GrowthError,
    LimitError,
    StaleError,
    TickError,
    TrimError,
    WrongThreadError,
)
from arena.escapes import Escape, EscapeMap, Frame, escapes
from arena.exporting import export_ticks
from arena.growth import assert_no_growth
from arena.heap import HeapFigures
from arena.loop import Ticks, ticks
from arena.objects import ObjectStats, object_stats
from arena.retention import Retention, set_retention
from arena.store import Store
from arena.tracing import Audit, Trace, audit, trace
from arena.trimming import TrimResult, trim_async

if _TYPE_CHECKING:
    from arena import aiohttp as aiohttp
    from arena import asgi as asgi
    from arena import requests as requests
    from arena.diagnosis import Diagnosis, Verdict, doctor
    from arena.reporting import MemoryReport, PythonHeap, memory
    from arena.requests import Request, Requests, RequestStats
    from arena.trimmer import Trimmer, TrimmerStats
    from arena.tuning import TuneResult, tune

__all__ = [
    "ArenaError",
    "Audit",
    "Block",
    "BodyLimitError",
    "Debug",
    "Diagnosis",
    "DisconnectError",
    "Escape",
    "EscapeError",
    "EscapeMap",
    "Frame",
    "GrowthError",
    "HeapFigures",
    "LimitError",
    "MemoryReport",
    "ObjectStats",
    "PythonHeap",
    "Request",
    "RequestStats",
    "Requests",
    "Retention",
    "StaleError",
    "Stats",
    "Store",
    "Str",
    "StrBuf",
    "Tick",
    "TickError",
    "Ticks",
    "Trace",
    "TrimError",
    "TrimResult",
    "Trimmer",
    "TrimmerStats",
    "TuneResult",
    "Verdict",
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
    "doctor",
    "end",
    "escapes",
    "export_ticks",
    "memory",
    "object_stats",
    "persist",
    "set_limit",
    "set_retention",
    "stats",
    "strbuf",
    "strbuf_persist",
    "strdup",
    "strdup_persist",
    "tick",
    "ticks",
    "trace",
    "trim",
    "trim_async",
    "tune",
]

# What a loop that ticks never needs is imported when it is named first: it would take as long as
# all the rest.
_LATER = {
    "Diagnosis": "diagnosis",
    "MemoryReport": "reporting",
    "PythonHeap": "reporting",
    "Request": "requests",
    "RequestStats": "requests",
    "Requests": "requests",
    "Trimmer": "trimmer",
    "TrimmerStats": "trimmer",
    "TuneResult": "tuning",
    "Verdict": "diagnosis",
    "doctor": "diagnosis",
    "memory": "reporting",
    "tune": "tuning",
}
_MODULES = ("aiohttp", "asgi", "requests")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return _later.load(f"{__name__}.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_later.load(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

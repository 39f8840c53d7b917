"""Python's own objects in ticks: the way to the module that captures them, and what it holds."""

from __future__ import annotations

import dataclasses
import sysconfig
import time
from types import ModuleType

from arena._version import __version__
from arena.errors import ArenaError

__all__ = ["ObjectStats", "connect", "object_stats"]


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectStats:
    """Counters of the whole process, in bytes unless the name says otherwise.

    All are 0 until the first tick with ``objects=True``.
    """

    open_count: int
    """Ticks open now that capture objects."""
    captured: int
    """What live blocks of open ticks asked for."""
    captured_count: int
    """How many blocks that is."""
    escaped: int
    """What live blocks that have outlived their tick asked for."""
    escaped_count: int
    """How many blocks that is."""
    spans: int
    """Memory that captured and escaped blocks lie in, with the gaps between them."""
    cached: int
    """Memory without a block that is kept for the next ticks."""
    given_back: int
    """What went back to the operating system, ever."""
    reserved: int
    """Addresses, which are not memory, that are reserved for all this."""


_module: ModuleType | None = None


def _load() -> ModuleType:
    try:
        import arena._objects as module
    except ModuleNotFoundError as error:
        if error.name != "arena._objects":
            raise
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            why = "objects=True does not work without the GIL: use a standard build of CPython"
        else:
            why = (
                "objects=True needs the module arena._objects, which this installation was built "
                "without (ARENA_NO_OBJECTS=1, or a wheel for every CPython): build it from source"
            )
        raise ImportError(why, name="arena._objects") from None
    compiled = module.ffi.string(module.lib.arena_objects_version()).decode()
    if compiled != __version__:
        raise ImportError(
            f"arena's module for objects=True is version {compiled}, its Python files are "
            f"{__version__}; build it again: `pip install -e .` in the source tree, "
            "or `pip install --force-reinstall tick-arena`",
            name="arena._objects",
        )
    return module


def connect(host: int) -> int:
    """Hook CPython's allocators and hand the tables of csrc/objects/link.h over.

    ``host`` is the address of the main module's table, or 0 for none; returns the address of the
    other one. Called once, at the first tick with ``objects=True``; a second call gives the host
    another table. Raises ImportError where the module is missing or stale, ArenaError where
    something makes the hooks unsafe. The hooks stay for as long as the process lives.
    """
    global _module
    module = _load()
    if module.lib.arena_objects_table() == module.ffi.NULL:
        import _tracemalloc  # it may have been started by the interpreter itself, with no import

        if _tracemalloc.is_tracing():
            raise ArenaError(
                "objects=True cannot begin under tracemalloc: its stop() would take out the hooks "
                "of blocks that live. Start tracemalloc after the first tick with objects=True"
            )
    code = module.lib.arena_objects_connect(module.ffi.cast("void *", host))
    if code == -1:
        raise ImportError(
            "arena's two compiled modules are not of the same build; build both again: "
            "`pip install -e .` in the source tree",
            name="arena._objects",
        )
    if code == -3:
        raise ArenaError("a tick with objects=True is open: its objects are of the host before")
    if code < 0:
        raise ArenaError("objects=True: the allocators of CPython could not be hooked")
    _module = module
    return int(module.ffi.cast("uintptr_t", module.lib.arena_objects_table()))


def object_stats() -> ObjectStats:
    """Return what ticks with ``objects=True`` hold now. Any thread may ask."""
    names = [field.name for field in dataclasses.fields(ObjectStats)]
    if _module is None:
        return ObjectStats(**dict.fromkeys(names, 0))
    raw = _module.ffi.new("arena_objects_stats *")
    _module.lib.arena_objects_stats_get(raw)
    return ObjectStats(**{name: getattr(raw, name) for name in names})


_SLICE = 16  # spans of 64 KiB at a time: under a millisecond


def give_back(deadline: float | None = None) -> int:
    """Give memory without a block back to the system, and return how many bytes.

    In slices, as what it goes through is guarded by the GIL: between them other threads run.
    ``deadline``, of time.perf_counter(), ends it early. Any thread may call it.
    C: arena_objects_trim.
    """
    if _module is None:
        return 0
    given = 0
    while deadline is None or time.perf_counter() < deadline:
        some = int(_module.lib.arena_objects_trim(_SLICE))
        if not some:
            break
        given += some
        time.sleep(0)
    return given

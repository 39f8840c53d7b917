"""Loads the compiled module, checks that it is this version's, and lends it what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from arena import errors
from arena._version import __version__

_NO_AUDIT = 2 * sys.maxsize + 1  # SIZE_MAX
_FIX = (
    "build it again: `pip install -e .` in the source tree, "
    "or `pip install --force-reinstall tick-arena`"
)

try:
    import arena._native as _native
except ModuleNotFoundError as _why:
    if _why.name != "arena._native":
        raise
    raise ImportError(f"arena's compiled module is missing; {_FIX}", name="arena._native") from None


def check_version(compiled: str) -> None:
    """Raise ImportError unless the compiled module has this package's version."""
    if compiled != __version__:
        raise ImportError(
            f"arena's compiled module is version {compiled}, its Python files are {__version__}; "
            f"{_FIX}",
            name="arena._native",
        )


def _decorate(
    fn: Callable[..., Any], name: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    from arena._decorate import decorate  # inspect and functools are wanted only here

    return decorate(fn, name, options)


def _connect() -> None:
    from arena.objects import connect  # the objects module is wanted only here

    _native._objects_connected(connect(_native._objects_host()))
    prepare()


def _trim(*args: Any, **kwargs: Any) -> Any:
    from arena.trimming import trim

    return trim(*args, **kwargs)


_walker_sought = False


def prepare() -> None:
    """Make ready for the recording of sites; the module that knows this CPython's frames reads
    them, if it was built. Raises MemoryError.
    """
    global _walker_sought
    _native._sites_ready()
    if _walker_sought:
        return
    _walker_sought = True
    try:
        from arena._objects import ffi, lib
    except ModuleNotFoundError:
        return
    _native._walker(int(ffi.cast("uintptr_t", lib.arena_objects_walker())))


check_version(_native.ffi.string(_native.lib.arena_version()).decode())
if _native.lib.arena_debug_words(os.environb.get(b"ARENA_DEBUG", b"")) < 0:
    raise ImportError(
        f"ARENA_DEBUG={os.environ['ARENA_DEBUG']!r} is not understood: it takes fill, noreuse and "
        "guard and sites=DEPTH, with commas between them",
        name="arena",  # by this name runpy tells it in one line
    )
if _native.lib.arena_trace_words(os.environb.get(b"ARENA_TRACE", b"")) < 0:
    raise ImportError(
        f"ARENA_TRACE={os.environ['ARENA_TRACE']!r} is not understood: it takes a number of frames "
        "from 0 to 32",
        name="arena",
    )
if _native.lib.arena_audit_words(os.environb.get(b"ARENA_AUDIT", b"")) == _NO_AUDIT:
    raise ImportError(
        f"ARENA_AUDIT={os.environ['ARENA_AUDIT']!r} is not understood: it takes 1 (256 MiB), 0, "
        "or a number of bytes",
        name="arena",
    )
if os.environ.get("ARENA_OBJECTS", "") not in ("", "0", "1"):
    raise ImportError(
        f"ARENA_OBJECTS={os.environ['ARENA_OBJECTS']!r} is not understood: it takes 0 or 1",
        name="arena",
    )
if os.environ.get("ARENA_EXPORT", "") not in ("", "0", "1"):
    raise ImportError(
        f"ARENA_EXPORT={os.environ['ARENA_EXPORT']!r} is not understood: it takes 0 or 1",
        name="arena",
    )
if os.environ.get("ARENA_TRIM", "").lower() not in ("", "on", "off"):
    raise ImportError(
        f"ARENA_TRIM={os.environ['ARENA_TRIM']!r} is not understood: it takes on or off",
        name="arena",
    )
match _native.lib.arena_py_register():
    case 0:
        pass
    case -2:
        raise ImportError("arena does not support sub-interpreters", name="arena._native")
    case _:
        raise ImportError("arena's native types could not be registered", name="arena._native")
_native._lend(
    **{name: getattr(errors, name) for name in errors.__all__},
    ClosedError=errors.ClosedError,
    thread_label=errors.thread_label,
    settle=errors.settle,
    decorate=_decorate,
    connect=_connect,
    prepare=prepare,
    trim=_trim,
)
_folder = os.path.dirname(os.path.abspath(__file__))
_native._own_folder(os.path.join(_folder, ""), os.path.join(_folder, "cli", "_mind.py"))
if _native.lib.arena_tracing():
    prepare()
if os.environ.get("ARENA_OBJECTS") == "1":
    _native._objects_always(True)

"""Loads the compiled module, checks that it is this version's, and lends it what it needs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from arena import errors
from arena._version import __version__

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


check_version(_native.ffi.string(_native.lib.arena_version()).decode())
if _native.lib.arena_debug_words(os.environb.get(b"ARENA_DEBUG", b"")) < 0:
    raise ImportError(
        f"ARENA_DEBUG={os.environ['ARENA_DEBUG']!r} is not understood: it takes fill, noreuse and "
        "guard, with commas between them",
        name="arena",  # by this name runpy tells it in one line
    )
if b"sites=" in os.environb.get(b"ARENA_DEBUG", b""):
    warnings.warn(
        "ARENA_DEBUG: sites is not in this version of arena; the other words are on",
        RuntimeWarning,
        stacklevel=2,
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
)

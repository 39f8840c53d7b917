"""``@arena.tick("name")``: a fresh tick around each call of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

from arena import _native


def decorate(
    fn: Callable[..., Any], name: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    """Wrap ``fn`` so that each call runs in a tick of its own, named after it unless named.

    ``options`` are the keyword arguments of ``tick()``.

    For ``async def`` the tick spans the whole coroutine, for a generator function the whole
    iteration. An async generator is refused: nothing ends it in time when its consumer stops early.
    """
    if isinstance(fn, (classmethod, staticmethod)):
        raise TypeError(f"put @arena.tick below @{type(fn).__name__}, next to the function")
    if inspect.isclass(fn) or not callable(fn):
        what = "the class " + fn.__name__ if inspect.isclass(fn) else type(fn).__name__
        raise TypeError(f"tick() decorates functions, not {what}")
    label = name if name is not None else getattr(fn, "__qualname__", type(fn).__name__)

    if inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"tick() cannot decorate the async generator function {label}: an async generator is "
            "finalized late, in another task; open the tick inside it, around each step"
        )
    called = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(called):

        @functools.wraps(fn)
        async def in_tick_async(*args: Any, **kwargs: Any) -> Any:
            with _native.tick(label, **options):
                return await fn(*args, **kwargs)

        return in_tick_async

    if inspect.isgeneratorfunction(fn):

        @functools.wraps(fn)
        def in_tick_generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with _native.tick(label, **options):
                return (yield from fn(*args, **kwargs))

        return in_tick_generator

    @functools.wraps(fn)
    def in_tick(*args: Any, **kwargs: Any) -> Any:
        with _native.tick(label, **options):
            return fn(*args, **kwargs)

    return in_tick

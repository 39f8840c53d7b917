"""Retention: how much memory of ended ticks is kept for the next ones, and by whose rule."""

from __future__ import annotations

import dataclasses

from arena import _native
from arena._native import ffi, lib
from arena.errors import ArenaError

__all__ = ["Retention", "retention", "set_retention"]

_WORDS = {
    "adaptive": lib.ARENA_RETAIN_ADAPTIVE,
    "all": lib.ARENA_RETAIN_ALL,
    "none": lib.ARENA_RETAIN_NONE,
}
_POLICIES = {number: word for word, number in _WORDS.items()}
_LONGEST = 31  # bytes of a name, in C
_ROOM = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Retention:
    """What is kept cached between ticks, in bytes."""

    name: str | None
    """Of the ticks that this is for; None: all those whose name has no policy of its own."""
    policy: str | int
    """"adaptive", "all", "none", or the most bytes."""
    cached: int
    """Kept now."""
    needed: int
    """The most that the ticks of the last two windows (10 to 20 ends of ticks) needed at once."""


def retention() -> tuple[Retention, ...]:
    """Return what is retained: of the process first, then of each name with a policy of its own.

    It is what ``stats().retention`` has. Any thread may ask. C: arena_retention.
    """
    rows = ffi.new("arena_retained[]", _ROOM)
    count = lib.arena_retention(rows, _ROOM)
    return tuple(
        Retention(
            name=ffi.string(row.name).decode("utf-8", "replace") or None,
            policy=row.most if row.policy == lib.ARENA_RETAIN_BYTES else _POLICIES[row.policy],
            cached=row.cached,
            needed=row.needed,
        )
        for row in rows[0:count]
    )


def set_retention(policy: str | int | None, name: str | None = None) -> str | int | None:
    """Set what is kept cached of ended ticks, for the process or for ticks of one name.

    ``"adaptive"``, the default: what the last ticks needed at their peak, so that a steady loop
    makes no system call and a spike is forgotten within 32 ticks. ``"all"``: everything, until a
    ``trim()``. ``"none"``: nothing, each tick maps its memory anew. A number of bytes (or ``"64
    MiB"``): up to so many, never forgotten. What is over the new policy goes back at once. Requests
    of more than 4 MiB have mappings of their own, which are never kept.

    With a ``name``: for the ticks of that name which begin from now on; their memory is then cached
    apart from the others'. At most 15 names in a process can have one at a time. None undoes that
    of a name. A name is told apart by its first 31 bytes. Returns the policy before, None for a
    name without one. Any thread may call it; figures are in ``stats().retention``. Raises
    TypeError, ValueError, ArenaError for a 16th name. C: arena_retain.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"the name of a tick is a str, or None for the process, not {name!r}")
    if name == "":
        raise ValueError("an empty name is no tick's: give None for the process")
    if policy is None and name is None:
        raise TypeError(f"the policy of the process is {_WHAT}, not None")
    kind, most = _parse(policy)
    key = ffi.NULL if name is None else _key(name)
    before = next((row.policy for row in retention() if _same(row.name, name)), None)
    code = lib.arena_retain(key, kind, most)
    if code == lib.ARENA_E_LIMIT:
        raise ArenaError(
            f"{_ROOM - 1} names have a policy of their own already, which is the most: "
            f"{name!r} gets none; give a name that needs its own no longer None, or use fewer"
        )
    return before


_WHAT = '"adaptive", "all", "none", or bytes such as 67108864 or "64 MiB"'


def _parse(policy: str | int | None) -> tuple[int, int]:
    if policy is None:
        return lib.ARENA_RETAIN_AS_PROCESS, 0
    if isinstance(policy, str) and policy in _WORDS:
        return _WORDS[policy], 0
    try:
        most = _native._size(policy, "retention")
    except (TypeError, ValueError, OverflowError) as error:
        kind = ValueError if isinstance(error, OverflowError) else type(error)
        raise kind(f"retention is {_WHAT}, not {policy!r}") from None
    return lib.ARENA_RETAIN_BYTES, most


def _key(name: str) -> bytes:
    """The name as the ticks have it in C."""
    try:
        key = name.encode()
    except UnicodeEncodeError:
        key = name.encode("unicode_escape")
    return key if b"\0" not in key else name.encode("unicode_escape")


def _same(shown: str | None, name: str | None) -> bool:
    if shown is None or name is None:
        return shown is name
    return shown == _key(name)[:_LONGEST].decode("utf-8", "replace")

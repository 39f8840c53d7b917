"""``export_ticks()``: the number of finished ticks, for those who watch from outside."""

from __future__ import annotations

from arena._native import lib
from arena.errors import ArenaError

__all__ = ["export_ticks"]


def export_ticks() -> None:
    """Let others read how many ticks of this process have finished, as `python -m arena watch`
    does.

    The number is in a memfd named "arena-ticks", which has an entry in /proc/PID/fd: it costs a
    file descriptor and a page, and is kept to within 10 ticks. Whoever may read /proc/PID/fd may
    read it. A child that is forked has one of its own. ARENA_EXPORT=1 in the environment does it at
    the start. Any thread may call it; a second call does nothing, unless the descriptor was closed
    meanwhile. Raises ArenaError where there are no memfds (other systems than Linux), OSError when
    there is no descriptor to be had. C: arena_export_ticks.
    """
    code = lib.arena_export_ticks()
    if code == lib.ARENA_E_NOMEM:
        raise OSError("no file descriptor or memory to show the ticks in: see `ulimit -n`")
    if code < 0:
        raise ArenaError("ticks cannot be exported here: this system has no memfd_create()")

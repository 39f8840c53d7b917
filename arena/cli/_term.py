"""Tells of the map when SIGTERM ends the program, which then dies of it as it would have."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
from collections.abc import Callable

__all__ = ["AtTerm"]

_PATIENCE = 8.0  # seconds for the map: Docker kills after 10


class AtTerm:
    """Calls ``tell`` in a thread of its own at SIGTERM, unless the program handles that itself.

    A handler that the program sets takes the place of this one, and children that it forks have
    none. A SIGTERM that comes meanwhile ends it at once.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def listen(self) -> None:
        """From now on, if SIGTERM is not ignored or handled already."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._ended)
            # A child that is busy in C code must be as easy to end as ever.
            os.register_at_fork(after_in_child=self.listen_no_more)

    def listen_no_more(self) -> None:
        """Let SIGTERM end the process at once again."""
        # Compared as methods: each access makes another object of it.
        if signal.getsignal(signal.SIGTERM) == self._ended:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _ended(self, *_: object) -> None:
        self.listen_no_more()
        # As at SIGUSR1 in another thread: this one may be in a tick. Not for ever: it may also be
        # in an import that the map needs.
        done = _thread.allocate_lock()
        done.acquire()
        with contextlib.suppress(RuntimeError):  # no more threads
            _thread.start_new_thread(self._tell_and_release, (done,))
            done.acquire(timeout=_PATIENCE)
        os.kill(os.getpid(), signal.SIGTERM)

    def _tell_and_release(self, done: _thread.LockType) -> None:
        try:
            self._tell()
        finally:
            done.release()

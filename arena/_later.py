"""Imports of what is wanted seldom, when it is wanted, and forks that do not meet them half done.

The child of a fork in the middle of an import, by another thread, waits for ever when it imports
the same: the lock of the module has an owner that is not there. So a fork waits until these are
done.
"""

from __future__ import annotations

import importlib
import os
import threading
from types import ModuleType

__all__ = ["load"]

_importing = threading.RLock()


def load(name: str) -> ModuleType:
    """Import a module by its full name, and return it."""
    with _importing:
        return importlib.import_module(name)


os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_importing.release,
)

"""What is compared: a store, and with what its server runs."""

from __future__ import annotations

import ctypes.util
import dataclasses

KEEP, DISCARD, TRIM, ARENA, OBJECTS = "keep", "discard", "discard+trim", "arena", "arena+objects"
NAIVE = "discard/no unblock"
SHORT = (KEEP, DISCARD, TRIM, ARENA, OBJECTS)  # of a quick run


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the server."""

    name: str
    arguments: tuple[str, ...]
    about: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    library: str | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        if self.library is not None and ctypes.util.find_library(self.library) is None:
            return f"lib{self.library} is not installed (Debian: lib{self.library}2 or the like)"
        return None

    def started_with(self) -> dict[str, str]:
        """Return what is added to the environment."""
        if self.library is None:
            return self.environment
        return {**self.environment, "LD_PRELOAD": ctypes.util.find_library(self.library) or ""}


def _all() -> list[Variant]:
    two = {"MALLOC_ARENA_MAX": "2"}
    found = [
        Variant(KEEP, ("keep",), "a dict; each body stays until its rollout ends"),
        Variant(DISCARD, ("discard",), "a dict; each goes when delivered, unblocked first"),
        Variant(TRIM, ("discard", "trim"), "the same, beside arena.Trimmer(every=10.0)"),
        Variant("discard+tune", ("discard", "tune"), "the same, after arena.tune()"),
        Variant(ARENA, ("arena",), "arena.Requests"),
        Variant("arena+tune", ("arena", "tune"), "the same, after arena.tune()"),
        Variant(OBJECTS, ("arena", "objects"), "arena.Requests, parsed in a tick(objects=True)"),
    ]
    for store in (DISCARD, ARENA):  # what bodies alone leave
        about = f"{store}, the body looked at and not parsed"
        found.append(Variant(f"{store}/unparsed", (store, "unparsed"), about))
    for store in (KEEP, DISCARD):
        for library in ("jemalloc", "mimalloc"):
            about = f"{store}, on {library}"
            found.append(Variant(f"{store}/{library}", (store,), about, library=library))
        found.append(
            Variant(f"{store}/2 heaps", (store,), f"{store}, with MALLOC_ARENA_MAX=2", two)
        )
    found.append(Variant(NAIVE, ("naive",), "discard as a finally alone: nobody unblocks"))
    return found


VARIANTS = {one.name: one for one in _all()}

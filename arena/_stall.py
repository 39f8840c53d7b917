"""How long a walk of the C heap will take: numbers in, milliseconds out.

A walk (``malloc_trim``) looks at every free piece of the heap and gives back the whole pages in it.
Measured on glibc 2.36 and a virtual machine (``python -m benchmarks trim``): 0.065 ms for each MB
that is free, as its pages go, and 2 to 2.6 us for each piece with a page in it, for the call to the
system. Pieces smaller than a page cost 40 ns each, and give nothing back. So 240 MB in 64 KB pieces
take 15 ms, and in 7.7 KB pieces 70.

To know how much is free and in how many pieces takes a look (``mallinfo2``), which goes through the
same list without a call to the system, under the same lock: 15 us for each MB of a process of which
each second block of 512 bytes is free. (Python's own allocator keeps smaller ones out of the heap.)
"""

from __future__ import annotations

import dataclasses

__all__ = ["Look", "Stall"]

_MB = 1e6
_PAGE = 4096
_MS_PER_MB = 0.065
_MS_PER_PIECE = 2.6e-3
_MS_PER_SMALL_PIECE = 40e-6
_LOOK_MS_PER_MB = 0.015
_SHARE = 0.3  # of the newest in the average
_LEAST = 0.25  # times what the measurements say: one lucky walk promises nothing
_MOST = 8.0
_KNOWN = 1.0  # ms: what took less says nothing about the rate


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What a look at the heap saw."""

    free: int
    """Bytes inside the allocator that nobody uses."""
    pieces: int
    """In how many pieces; 0 where the allocator does not tell."""


class Stall:
    """Predicts from the size of what is to be walked, and from how long it took before."""

    def __init__(self) -> None:
        self._walk = 1.0  # actual by expected, an exponentially weighted average
        self._look: float | None = None  # ms per MB of the process, the same
        self._looked_at = 0.0  # MB: how large the process was then

    @property
    def ms_per_mb(self) -> float:
        """Of free memory in large pieces, as it was seen here."""
        return _MS_PER_MB * self._walk

    def look(self, resident: int) -> float:
        """The most milliseconds of a look, for a process with so many bytes of its own.

        What it has grown by since the last look may all be small free pieces.
        """
        size = resident / _MB
        if self._look is None:
            return size * _LOOK_MS_PER_MB
        known = min(size, self._looked_at)
        return known * self._look + (size - known) * _LOOK_MS_PER_MB

    def walk(self, seen: Look) -> float:
        """Milliseconds of a walk."""
        return self._expected(seen) * self._walk

    def looked(self, resident: int, ms: float) -> None:
        """Learn from a look."""
        size = max(resident / _MB, 1.0)
        rate = ms / size
        self._look = rate if self._look is None else self._look + _SHARE * (rate - self._look)
        self._look = max(self._look, rate / 2)  # it has become slower: believe it at once
        self._looked_at = size

    def walked(self, seen: Look, ms: float) -> None:
        """Learn from a walk."""
        expected = self._expected(seen)
        if max(expected, ms) < _KNOWN:
            return
        factor = min(_MOST, max(_LEAST, ms / max(expected, 1e-3)))
        # Slower than was thought counts at once: a stall that is promised not to be must not be.
        self._walk = max(factor, self._walk + _SHARE * (factor - self._walk))

    @staticmethod
    def _expected(seen: Look) -> float:
        if seen.free < _PAGE * seen.pieces:  # on average less than a page
            large = seen.free / _PAGE / 4  # a guess: most of them give nothing back
            return seen.pieces * _MS_PER_SMALL_PIECE + large * _MS_PER_PIECE
        return seen.free / _MB * _MS_PER_MB + seen.pieces * _MS_PER_PIECE

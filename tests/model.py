"""What the models share: sizes around every boundary of the core, and bytes that tell their place.

Contents are slices of a fixed slab of random bytes: cheap to draw (two integers), and no two places
of it look alike, so a shifted, stale or foreign byte shows.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st

KIB = 1 << 10
MIB = 1 << 20
HEAD = 64  # bytes of a chunk's header, at the most
CHUNK = 64 * KIB  # the smallest chunk
LARGEST = 4 * MIB  # the largest chunk that is cached; what is larger is oversize

_random = random.Random(20240607)
SLAB = _random.randbytes(LARGEST + 3 * MIB)
ASCII = SLAB.translate(bytes(33 + byte % 94 for byte in range(256)))
_ALPHABET = "abcdefghijklmnop\0 éßπЖ√€漢🜁"
WIDE = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in SLAB[: 256 * KIB])

seeds = st.integers(0, 4095)


def data_of(seed: int, size: int) -> bytes:
    """Return ``size`` bytes that belong to this seed."""
    return SLAB[seed * 61 : seed * 61 + size]


def ascii_of(seed: int, size: int) -> str:
    """Return text of ``size`` characters, one byte each, without a NUL."""
    return ASCII[seed * 61 : seed * 61 + size].decode("ascii")


def wide_of(seed: int, size: int) -> str:
    """Return text of up to ``size`` characters of one to four bytes each, with NULs in it."""
    return WIDE[seed : seed + size]


def _around(*centres: int) -> list[int]:
    return sorted({centre + step for centre in centres for step in (-1, 0, 1)})


# Around the span of an alignment, a string's first capacity, the quarter of a chunk above which a
# block gets a chunk of its own, what fits the smallest chunk, and its double.
TINY = _around(1, 16, 32, 64, 239, 256)
MIDDLE = _around(4 * KIB, CHUNK // 4 - 1, CHUNK // 4)
LARGE = _around(CHUNK - HEAD - 1, CHUNK - HEAD, CHUNK, 2 * CHUNK - HEAD, 2 * CHUNK)
HUGE = _around(MIB - HEAD, MIB, LARGEST - HEAD - 1, LARGEST - HEAD, LARGEST)
OVERSIZE = [LARGEST + 1, LARGEST + 4096 - HEAD, LARGEST + MIB + 1]

# Most draws are small: what is large costs time to compare after each step, and has few boundaries.
_kinds = st.sampled_from("ttttttttttttmmmmllh")
_by_kind = {
    "t": st.sampled_from(TINY) | st.integers(0, 700),
    "m": st.sampled_from(MIDDLE) | st.integers(700, 20_000),
    "l": st.sampled_from(LARGE),
    "h": st.sampled_from([*HUGE, *OVERSIZE]),
}
sizes = _kinds.flatmap(_by_kind.__getitem__)
small_sizes = _by_kind["t"]
piece_sizes = st.sampled_from("ttttttmml").flatmap(_by_kind.__getitem__)

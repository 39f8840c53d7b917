"""A host for the objects module that records what it is told, and blocks by C's own functions."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from arena import _objects
from arena.objects import connect

SOURCE = Path(__file__).with_name("objects_host.c")
KINDS = {"Mem": 1, "Object": 2}


def build() -> ctypes.CDLL:
    """Compile and load objects_host.c."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "objects_host.so"
        subprocess.run(
            [
                *shlex.split(os.environ.get("CC", "cc")),
                "-std=c11",
                "-g",
                "-shared",
                "-fPIC",
                "-Wall",
                "-Wextra",
                "-Werror",
                str(SOURCE),
                "-o",
                str(path),
            ],
            check=True,
        )
        return ctypes.PyDLL(str(path))  # which keeps the GIL in calls


class _Row(ctypes.Structure):
    _fields_ = (
        ("tick", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("site", ctypes.c_uint32),
        ("live", ctypes.c_uint32),
        ("text", ctypes.c_char * 300),
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """An escape that the host was told of, as it is now."""

    tick: int
    size: int
    site: int
    live: bool
    text: str


def function(name: str, result: object, *arguments: object) -> ctypes._NamedFuncPointer:
    """Return a function of CPython's."""
    found = ctypes.pythonapi[name]  # an object of its own each time
    found.restype, found.argtypes = result, arguments
    return found


SIZE, POINTER = ctypes.c_size_t, ctypes.c_void_p
MALLOC = {kind: function(f"Py{kind}_Malloc", POINTER, SIZE) for kind in KINDS}
CALLOC = {kind: function(f"Py{kind}_Calloc", POINTER, SIZE, SIZE) for kind in KINDS}
REALLOC = {kind: function(f"Py{kind}_Realloc", POINTER, POINTER, SIZE) for kind in KINDS}
FREE = {kind: function(f"Py{kind}_Free", None, POINTER) for kind in KINDS}


class Host:
    """The recording host, and the objects module as the main module would use it."""

    def __init__(self) -> None:
        self.lib = build()
        self.address = ctypes.addressof(ctypes.c_char.in_dll(self.lib, "host"))
        table = ctypes.cast(connect(self.address), ctypes.POINTER(ctypes.c_void_p))
        self._begin = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(table[1] or 0)
        self._end = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(table[2] or 0)
        self.lib.row_at.restype = ctypes.POINTER(_Row)

    def begin(self, tick: int = 0) -> int:
        """Begin to capture the blocks of this thread."""
        return int(self._begin(tick))

    def end(self, capture: int) -> int:
        """End it; return how many blocks escaped."""
        return int(self._end(capture))

    @contextlib.contextmanager
    def tick(self, tick: int = 0) -> Iterator[None]:
        """Capture what the body allocates."""
        capture = self.begin(tick)
        try:
            yield
        finally:
            self.end(capture)

    def value(self, name: str) -> ctypes.c_uint32:
        """Return one of its variables."""
        return ctypes.c_uint32.in_dll(self.lib, name)

    @contextlib.contextmanager
    def site(self, number: int) -> Iterator[None]:
        """Let blocks be of this site."""
        now = self.value("site_now")
        now.value = number
        try:
            yield
        finally:
            now.value = 0

    def rows(self) -> list[Row]:
        """Return all that it was told of, in order."""
        made = self.value("rows_made").value
        raw = [self.lib.row_at(number)[0] for number in range(1, made + 1)]
        return [
            Row(row.tick, row.size, row.site, bool(row.live), row.text.decode(errors="replace"))
            for row in raw
        ]

    def of_site(self, number: int) -> list[Row]:
        """Return the live rows of a site."""
        return [row for row in self.rows() if row.site == number and row.live]

    def hook(self, kind: str) -> None:
        """Put another tool's hook over all others."""
        access = (ctypes.pythonapi.PyMem_GetAllocator, ctypes.pythonapi.PyMem_SetAllocator)
        self.lib.hook(*access, KINDS[kind])

    def unhook(self, kind: str) -> None:
        """Put back what that tool found."""
        self.lib.unhook(ctypes.pythonapi.PyMem_SetAllocator, KINDS[kind])


@contextlib.contextmanager
def connected() -> Iterator[Host]:
    """Connect a recording host for a while; before and after it the one that is connected now."""
    before = int(_objects.ffi.cast("uintptr_t", _objects.lib.arena_objects_host()))
    host = Host()
    yield host
    gc.collect()
    assert host.value("mistakes").value == 0
    connect(before)

"""The cffi builder of ``arena._objects``: the allocator behind ``arena.tick(objects=True)``.

A module of its own, for it looks inside CPython's objects and cannot be abi3. Run by setuptools
through ``cffi_modules`` in setup.py, which leaves it out with ARENA_NO_OBJECTS=1 in the
environment. ARENA_CFLAGS works here as in _build.py; ARENA_RELEASE_GIL does not.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType

from cffi import FFI

HEADER = "csrc/objects/register.h"


def load_build() -> ModuleType:
    """Return arena/_build.py, which is not to be had by an import of arena while arena is built."""
    path = Path(__file__).resolve().with_name("_build.py")
    spec = importlib.util.spec_from_file_location("_arena_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_builder() -> FFI:
    """Return the builder of ``arena._objects``."""
    build = load_build()  # raises where arena cannot be built at all: without a GIL, on Windows
    builder = FFI()
    builder.cdef(build.cdef_of(HEADER))
    flags = shlex.split(os.environ.get("ARENA_CFLAGS", ""))
    folder = build.ROOT / "csrc" / "objects"
    builder.set_source(
        "arena._objects",
        build.KEEP_GIL + '#include "objects/register.h"\n',  # all of it needs the GIL
        sources=sorted(str(path.relative_to(build.ROOT)) for path in folder.glob("*.c")),
        depends=sorted(
            str(path.relative_to(build.ROOT)) for path in (build.ROOT / "csrc").rglob("*.h")
        ),
        include_dirs=["csrc"],
        libraries=["pthread"] if sys.platform.startswith("linux") else [],
        extra_compile_args=[
            "-std=c11",
            "-O2",
            "-g0",
            "-fvisibility=hidden",
            "-fno-plt",
            *build.WARNINGS,
            *flags,
        ],
        extra_link_args=flags,
        py_limited_api=False,
    )
    return builder


ffibuilder = make_builder()

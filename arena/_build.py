"""The cffi builder: reads the marked regions of the headers and compiles one abi3 module.

Run by setuptools through ``cffi_modules`` in setup.py. It must not import arena, which needs what
is built here. Two switches of the environment, for people who work on arena itself:

ARENA_RELEASE_GIL=1   calls through ``lib`` release the GIL, as cffi's always do
ARENA_CFLAGS="..."    more flags for the compiler, such as -fsanitize=address
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("csrc/arena.h", "csrc/python/register.h")
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow"]

# cffi lets go of the GIL around every call: 35 ns when nobody waits for it, and the time slice of
# another thread (5 ms) when somebody does. Calls of this library are bounded and never block, so
# they keep it. The macros are those that cffi's generated code uses; arena_py_gil_held() tells
# whether the trick works, and a test asks it.
KEEP_GIL = """
#ifndef PYPY_VERSION
#undef Py_BEGIN_ALLOW_THREADS
#undef Py_END_ALLOW_THREADS
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS }
#endif
"""


def cdef_of(header: str) -> str:
    """Return what stands between the cdef marks of a header."""
    text = (ROOT / header).read_text(encoding="utf-8")
    _, _, rest = text.partition("/* cdef begin */")
    region, mark, _ = rest.partition("/* cdef end */")
    if not mark:
        raise RuntimeError(f"{header} has no region between the cdef marks")
    return region


def make_builder() -> FFI:
    """Return the builder of ``arena._native``."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise RuntimeError("arena does not support free-threaded Python yet: use a standard build")
    if sys.platform == "win32":
        raise RuntimeError("arena needs POSIX memory mappings: Windows is not supported")
    builder = FFI()
    for header in HEADERS:
        builder.cdef(cdef_of(header))
    keep_gil = os.environ.get("ARENA_RELEASE_GIL", "") in ("", "0")
    sources = sorted(
        str(path.relative_to(ROOT))
        for folder in ("csrc", "csrc/python")
        for path in (ROOT / folder).glob("*.c")
    )
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h"))
    builder.set_source(
        "arena._native",
        (KEEP_GIL if keep_gil else "")
        + "".join(f'#include "{Path(header).relative_to("csrc")}"\n' for header in HEADERS),
        sources=sources,
        depends=headers,
        include_dirs=["csrc"],
        libraries=["dl", "pthread"] if sys.platform.startswith("linux") else [],
        define_macros=[
            ("Py_LIMITED_API", "0x030b0000"),
            *([] if keep_gil else [("ARENA_RELEASE_GIL", None)]),
        ],
        extra_compile_args=[
            "-std=c11",
            "-O2",
            "-g0",
            "-fvisibility=hidden",
            "-fno-plt",  # calls of the limited API are most of a hot call: 3 % on extend and strdup
            *WARNINGS,
            *shlex.split(os.environ.get("ARENA_CFLAGS", "")),
        ],
        extra_link_args=shlex.split(os.environ.get("ARENA_CFLAGS", "")),
        py_limited_api=True,
    )
    return builder


ffibuilder = make_builder()

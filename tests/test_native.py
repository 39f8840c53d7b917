"""The compiled module: the header and the binary agree, the version is checked, the GIL is kept."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import arena
from arena import _build, _load, _native
from arena._native import ffi, lib

ROOT = Path(__file__).resolve().parent.parent
CDEF = "".join(_build.cdef_of(header) for header in _build.HEADERS)
CODE = re.sub(r"/\*.*?\*/", "", CDEF, flags=re.DOTALL)
FUNCTIONS = sorted(set(re.findall(r"\b(arena_\w+)\(", CODE)))
CONSTANTS = sorted(set(re.findall(r"\b(ARENA_\w+)\s*=", CODE)))


def test_every_function_and_constant_of_the_headers_is_in_the_module() -> None:
    assert len(FUNCTIONS) >= 40
    assert {name for name in dir(lib) if name.lower().startswith("arena")} == {
        *FUNCTIONS,
        *CONSTANTS,
    }
    for name in (*FUNCTIONS, *CONSTANTS):
        assert getattr(lib, name) is not None


def test_every_function_of_the_design_is_there() -> None:
    scratch = (
        "alloc zalloc realloc memdup strdup strndup printf strbuf_new".split()  # noqa: SIM905
    )
    named = {
        *(f"arena_{name}" for name in scratch),
        *(f"arena_{name}_persist" for name in scratch),
        *(f"arena_{n}" for n in "begin end current cleanup limit stats_get trim".split()),  # noqa: SIM905
        *(f"arena_strbuf_{n}" for n in "append puts printf data len clear".split()),  # noqa: SIM905
        "arena_free_persist",
    }
    assert named <= set(FUNCTIONS)


def test_the_structs_are_those_of_the_headers() -> None:
    fields = re.search(r"typedef struct arena_stats \{(.*?)\}", CODE, re.DOTALL)
    assert fields is not None
    names = re.findall(r"uint64_t (\w+);", fields.group(1))
    raw = ffi.new("arena_stats *")  # cffi compares size and offsets with the compiler's here
    assert ffi.sizeof("arena_stats") == 8 * len(names)
    assert [name for name, _ in ffi.typeof(raw[0]).fields] == names
    assert [field.name for field in dataclasses.fields(arena.Stats)] == [*names, "retention"]


def test_codes_have_texts() -> None:
    codes = [getattr(lib, name) for name in CONSTANTS if re.match("ARENA_(OK|E_)", name)]
    texts = {ffi.string(lib.arena_strerror(code)) for code in codes}
    assert len(texts) == len(codes) == 7
    assert ffi.string(lib.arena_strerror(12345)) == b"unknown code"


def test_the_version_is_one() -> None:
    header = re.search(r'#define ARENA_VERSION "(.*?)"', (ROOT / "csrc/arena.h").read_text())
    assert header is not None
    compiled = ffi.string(lib.arena_version()).decode()
    assert header.group(1) == compiled == arena.__version__
    assert importlib.metadata.version("tick-arena") == arena.__version__
    assert arena.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_a_stale_build_is_an_import_error_that_says_what_to_do() -> None:
    with pytest.raises(ImportError, match=r"module is version 0\.0\.9.*pip install -e \."):
        _load.check_version("0.0.9")


def test_a_missing_build_is_an_import_error_that_says_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "arena"
    package.mkdir()
    for path in (ROOT / "arena").glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    code = "import sys; sys.path.insert(0, '.'); import arena"
    done = subprocess.run(  # -S: without the finder of an editable installation
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ImportError: arena's compiled module is missing; build it again" in done.stderr


def test_the_module_is_one_abi3_binary() -> None:
    path = Path(_native.__file__)
    assert path.name == "_native.abi3.so"


def test_calls_through_lib_keep_the_gil() -> None:
    assert lib.arena_py_gil_held() == 1


def test_the_switch_lets_the_gil_go_and_our_sources_compile_without_a_warning(
    tmp_path: Path,
) -> None:
    for name in ("arena", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))
        else:
            shutil.copy(source, tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "ARENA_RELEASE_GIL": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^.*csrc/.*warning:.*$", done.stdout + done.stderr, re.MULTILINE) == []
    code = (
        f"import sys; sys.path[:0] = ['.', *{sys.path!r}]; import arena._native as n;"
        "print(n.__file__); print(n.lib.arena_py_gil_held());"
        "t = n.begin(); print(t.strdup('works')); t.end()"
    )
    done = subprocess.run(  # -S: without the finder of an editable installation
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[1:] == ["0", "works"], done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_the_core_knows_no_python() -> None:
    for path in (ROOT / "csrc").glob("*.[ch]"):
        assert "Python.h" not in path.read_text()


def test_registering_twice_is_harmless() -> None:
    types = (arena.Tick, arena.Block, arena.Str, arena.StrBuf)
    assert lib.arena_py_register() == 0
    assert (_native.Tick, _native.Block, _native.Str, _native.StrBuf) == types
    with pytest.raises(TypeError, match="_lend"):
        _native._lend()


@pytest.mark.parametrize("first", ["", "import arena"])
def test_a_sub_interpreter_gets_an_import_error_and_the_main_one_goes_on(first: str) -> None:
    code = f"""
import sys
try:
    import _interpreters as sub
    make = lambda: sub.create("legacy")
except ImportError:
    import _xxsubinterpreters as sub
    make = lambda: sub.create(isolated=False)
{first}
inner = make()
code = "import sys; sys.path[:0] = %r" % sys.path + chr(10) + "import arena"
try:
    told = sub.run_string(inner, code)  # 3.13 returns the error
except Exception as error:
    told = error
assert "does not support" in str(told) or "not support loading" in str(told), told
sub.destroy(inner)
import arena
with arena.tick() as t:
    print(t.strdup("fine"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


@pytest.mark.ends
def test_a_second_import_after_sys_modules_was_cleared_works_on() -> None:
    code = """
import sys, arena
kept = arena.strdup_persist("kept")
for name in [name for name in sys.modules if name.partition(".")[0] == "arena"]:
    del sys.modules[name]
import arena as again
with again.tick() as t:
    text = t.strdup("again")
try:
    bytes(text)
except again.StaleError:
    print(str(kept), again.Tick is arena.Tick)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("kept True\n", "")


def test_all_is_what_the_package_exports() -> None:
    assert sorted(arena.__all__) == arena.__all__
    for name in arena.__all__:
        assert getattr(arena, name) is not None


def test_the_core_depends_on_cffi_alone_and_imports_nothing_heavy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.match(r"\w+", d).group() for d in project["dependencies"]] == ["cffi"]  # type: ignore[union-attr]
    code = "import sys, arena; print([m for m in sys.modules if m in sys.argv[1:]])"
    heavy = ["cffi", "asyncio", "rich", "psutil", "matplotlib", "numpy"]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}", *heavy],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ast.literal_eval(done.stdout) == []


def test_c_code_that_allocates_in_the_current_tick_finds_pythons() -> None:
    before = arena.stats().strays_count
    with arena.tick() as outer:
        assert lib.arena_strdup(ffi.NULL, b"four") != ffi.NULL
        assert outer.used == 5
        c_tick = lib.arena_begin(b"c")
        lib.arena_alloc(ffi.NULL, 10)  # the C tick began later: it is the inner one
        assert (outer.used, lib.arena_used(c_tick)) == (5, 10)
        with arena.tick() as inner:
            lib.arena_alloc(ffi.NULL, 20)
            assert (inner.used, lib.arena_used(c_tick)) == (20, 10)
            assert lib.arena_end(lib.arena_current()) == lib.ARENA_E_INVALID  # Python ends its own
        assert lib.arena_end(c_tick) == 0
    assert arena.stats().strays_count == before


def test_another_threads_python_tick_is_not_cs_current_one() -> None:
    seen: list[bool] = []
    with arena.tick():
        thread = threading.Thread(target=lambda: seen.append(lib.arena_current() == ffi.NULL))
        thread.start()
        thread.join()
    assert seen == [True]


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native._lend(1),
        lambda: _native._lend(),
        lambda: _native._lend(ArenaError=3),
        lambda: _native._swap({}, "key"),
        lambda: _native._swap([], "key", 1),
        lambda: _native._swap({}, 1, 1),
    ],
)
def test_what_is_lent_and_swapped_inside_is_checked(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"_lend\(\)|_swap\(\)"):
        call()


def test_c_code_without_the_gil_finds_no_tick_of_python() -> None:
    address = int(ffi.cast("uintptr_t", ffi.addressof(lib, "arena_current")))
    keeps_gil, lets_it_go = ctypes.PYFUNCTYPE(ctypes.c_void_p), ctypes.CFUNCTYPE(ctypes.c_void_p)
    with arena.tick():
        assert keeps_gil(address)() is not None
        assert lets_it_go(address)() is None


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("_trim", (), TypeError),
        ("_trim", (0, 0), TypeError),
        ("_trim", ("0", 0, 0), TypeError),
        ("_heap_set", (-8,), TypeError),
        ("_heap_set", ("-8", 2), TypeError),
        ("_heap_set", (2**40, 2), OverflowError),
        ("_size", (1,), TypeError),
        ("_size", (1, 2), TypeError),
        ("_size", (None, "a size"), TypeError),
    ],
)
def test_what_the_python_side_calls_refuses_wrong_arguments(
    name: str, arguments: tuple[object, ...], error: type[Exception]
) -> None:
    before = arena.stats().cached
    with pytest.raises(error):
        getattr(_native, name)(*arguments)
    assert arena.stats().cached == before

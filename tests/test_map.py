"""``python -m arena map`` as a user runs it: real programs, each way out, and what can go wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

import arena
from arena.cli._ticked import Wanted

ENV = {**os.environ, "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
for name in ("FORCE_COLOR", "PYTHONDONTWRITEBYTECODE", "ARENA_TRACE", "ARENA_AUDIT"):
    ENV.pop(name, None)

LEAKY = """
import sys
import arena

kept = []

class Handler:
    def handle(self, n):
        kept.append(arena.strdup_persist("x" * 100))
        return n

def main():
    local = []
    for n in range(50):
        Handler().handle(n)
        local.append(arena.strdup_persist("y" * 100))
    return local

if __name__ == "__main__":
    main()
    print("the program's own", sys.argv, __name__, __file__, sys.path[0])
    if "raise" in sys.argv:
        raise ValueError("mine")
    if "exit" in sys.argv:
        sys.exit(7)
    if "message" in sys.argv:
        sys.exit("a message")
"""

CLEAN = """
import arena

for n in range(50):
    with arena.tick("clean") as t:
        t.strdup("scratch")
"""


def objects_are_built() -> bool:
    try:
        with arena.tick(objects=True):
            return True
    except ImportError:
        return False


WITHOUT = [] if objects_are_built() else ["--no-objects"]


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "arena", "map", *WITHOUT, *map(str, args)]


def run(folder: Path, *args: object, env: dict[str, str] = ENV) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), cwd=folder, capture_output=True, text=True, env=env, timeout=60
    )


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def start(folder: Path, *args: object) -> subprocess.Popen[str]:
    """Start a program that says "ready", and wait until it has."""
    process = subprocess.Popen(
        command(*args),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("python -m arena")
    for word in words:
        assert word in result.stderr


# ---- A program and its map --------------------------------------------------------------------


def test_an_unwrapped_script_is_run_as_python_does_and_mapped(tmp_path: Path) -> None:
    script = write(tmp_path, "sub/leaky.py", LEAKY)
    result = run(
        tmp_path,
        *("--tick", "leaky.py:Handler.handle", "--json", "map.json", "--html", "map.html"),
        *("sub/leaky.py", "-x", "--json", "mine", "--", "a b"),
    )
    assert result.returncode == 0, result.stderr
    own = ["sub/leaky.py", "-x", "--json", "mine", "--", "a b"]
    assert result.stdout == f"the program's own {own} __main__ {script} {script.parent}\n"
    assert "50 ticks in" in result.stderr
    assert "2 keep growing, by 200 B a tick" in result.stderr
    assert "sub/leaky.py:9 in Handler.handle" in result.stderr
    assert 'kept.append(arena.strdup_persist("x" * 100))' in result.stderr
    assert "from sub/leaky.py:15 in main" in result.stderr
    assert "tick 'Handler.handle', 50 ever" in result.stderr
    assert "runpy" not in result.stderr
    told = json.loads((tmp_path / "map.json").read_text())
    (row,) = (row for row in told["rows"] if row["tick"] == "Handler.handle")
    assert (row["count"], row["growing"], row["site"][0]["line"]) == (50, True, 9)
    assert "Handler.handle" in (tmp_path / "map.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.html", "map.json", "sub"]
    assert list(script.parent.iterdir()) == [script]


def test_a_module_is_run_as_python_does_and_mapped(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "print('init')\n")
    module = write(tmp_path, "pkg/leaky.py", LEAKY)
    result = run(tmp_path, "--tick", "pkg.leaky:Handler.handle", "-m", "pkg.leaky", "a")
    assert result.returncode == 0, result.stderr
    told = f"the program's own {[str(module), 'a']} __main__ {module} {tmp_path}"
    assert result.stdout == f"init\n{told}\n"
    assert "50 ticks in" in result.stderr
    write(tmp_path, "pkg/__main__.py", "from pkg.leaky import main; main(); print(__package__)\n")
    result = run(tmp_path, "--tick", "pkg/leaky.py:Handler.handle", "-m", "pkg")
    assert (result.returncode, result.stdout) == (0, "init\npkg\n"), result.stderr
    assert "50 ticks in" in result.stderr


def test_a_folder_a_zip_file_and_bytecode_are_programs_too(tmp_path: Path) -> None:
    main = write(tmp_path, "app/__main__.py", "import other; print(__name__, other.__name__)")
    other = write(tmp_path, "app/other.py", "")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(main, "__main__.py")
        archive.write(other, "other.py")
    import py_compile

    py_compile.compile(str(main), str(tmp_path / "app" / "main.pyc"))
    for program in ("app", "app.zip", "app/main.pyc"):
        result = run(tmp_path, program)
        assert (result.returncode, result.stdout) == (0, "__main__ other\n"), result.stderr


def test_a_wrapped_program_needs_no_tick_option(tmp_path: Path) -> None:
    write(tmp_path, "clean.py", CLEAN)
    result = run(tmp_path, "--fail-on-growth", "clean.py")
    assert result.returncode == 0, result.stderr
    assert "50 ticks in" in result.stderr
    assert "no tick was begun" not in result.stderr


def test_a_program_with_no_tick_is_told_how_to_name_one(tmp_path: Path) -> None:
    write(tmp_path, "plain.py", "print('plain')")
    result = run(tmp_path, "plain.py")
    assert (result.returncode, result.stdout) == (0, "plain\n")
    assert "no tick was begun: name the function" in result.stderr


@pytest.mark.skipif(bool(WITHOUT), reason="this build captures no objects")
def test_python_objects_of_an_unwrapped_program_are_mapped(tmp_path: Path) -> None:
    write(
        tmp_path,
        "plain.py",
        """
        import json

        log = []

        def step(n):
            document = json.loads('{"number": %d, "text": "%s"}' % (n, "t" * 2000))
            log.append(document["text"])

        for n in range(40):
            step(n)
        """,
    )
    result = run(tmp_path, "--tick", "plain.py:step", "--fail-on-growth", "plain.py")
    assert result.returncode == 1
    assert " object     40  " in result.stderr
    assert "plain.py:7 in step" in result.stderr
    result = run(tmp_path, "--tick", "plain.py:step", "--no-objects", "plain.py")
    assert "Nothing escapes." in result.stderr


def test_stale_handles_are_let_go_on_and_told(tmp_path: Path) -> None:
    write(
        tmp_path,
        "stale.py",
        """
        import arena
        with arena.tick("over") as t:
            late = t.strdup("late")
        print(bytes(late))
        """,
    )
    result = run(tmp_path, "stale.py")
    assert (result.returncode, result.stdout) == (0, "b'late'\n")
    assert "stale.py:4 in <module>" in result.stderr
    assert "used 1 time when stale, last at stale.py:5" in result.stderr
    result = run(tmp_path, "--budget", "0", "stale.py")
    assert result.returncode == 1
    assert "StaleError" in result.stderr


def test_the_table_is_coloured_on_a_terminal(tmp_path: Path) -> None:
    write(tmp_path, "leaky.py", LEAKY)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("--tick", "leaky.py:Handler.handle", "leaky.py"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**ENV, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    seen = b""
    with open(ours, "rb", buffering=0) as terminal:
        while select.select([terminal], [], [], 30)[0]:
            try:
                seen += terminal.read(65536)
            except OSError:  # the other end is closed
                break
    assert process.wait(timeout=30) == 0
    assert b"\x1b[" in seen
    assert b"keep growing" in seen


# ---- Ways out ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "status", "words"),
    [("exit", 7, ""), ("message", 1, "a message\n"), ("raise", 1, "ValueError: mine\n")],
)
def test_the_exit_status_is_the_programs_own(
    argument: str, status: int, words: str, tmp_path: Path
) -> None:
    write(tmp_path, "leaky.py", LEAKY)
    result = run(tmp_path, "--tick", "leaky.py:Handler.handle", "leaky.py", argument)
    assert result.returncode == status
    assert result.stderr.partition("python -m arena map:")[0].endswith(words)
    assert "50 ticks in" in result.stderr


def test_a_traceback_is_the_programs_own(tmp_path: Path) -> None:
    source = """
        def work(n):
            return 1 / n

        def main():
            try:
                work(0)
            except ZeroDivisionError as error:
                saved = error
            raise ExceptionGroup("two", [KeyError(0)]) from saved

        main()
        """
    write(tmp_path, "breaks.py", source)
    plain = subprocess.run(
        [sys.executable, "breaks.py"], cwd=tmp_path, capture_output=True, text=True, env=ENV
    )
    for args in (["breaks.py"], ["-m", "breaks"]):
        result = run(tmp_path, "--tick", "breaks.py:work", "--tick", "breaks.py:main", *args)
        assert result.returncode == 1
        assert result.stderr.startswith(plain.stderr + "python -m arena map: 2 ticks")


@pytest.mark.parametrize("how", ["script", "module", "imported"])
def test_a_syntax_error_is_told_as_python_tells_it(how: str, tmp_path: Path) -> None:
    write(tmp_path, "wrong.py", "x = = 1\n")
    write(tmp_path, "imports.py", "import wrong\n")
    args = {"script": ["wrong.py"], "module": ["-m", "wrong"], "imported": ["imports.py"]}[how]
    result = run(tmp_path, "--tick", "wrong.py:main", *args)
    assert result.returncode == 1
    told = result.stderr.partition("python -m arena map:")[0]
    assert "SyntaxError: invalid syntax" in told
    assert os.path.join("arena", "cli") not in told
    assert told.count('File "') == (2 if how == "imported" else 1), told


def test_an_excepthook_of_the_program_is_used(tmp_path: Path) -> None:
    write(
        tmp_path,
        "hooked.py",
        """
        import sys
        sys.excepthook = lambda kind, error, traceback: print("hooked", kind.__name__)
        raise OSError("mine")
        """,
    )
    result = run(tmp_path, "hooked.py")
    assert (result.returncode, result.stdout) == (1, "hooked OSError\n")
    assert "Traceback" not in result.stderr


LOOP = """
    import os, sys, time
    import arena

    kept = []

    def step():
        kept.append(arena.strdup_persist("x" * 100))

    def main():
        print("ready", flush=True)
        for n in range(3000):
            step()
            time.sleep(0.01)

    main()
    """


def test_ctrl_c_prints_the_map_and_exits_with_130(tmp_path: Path) -> None:
    write(tmp_path, "loop.py", LOOP)
    process = start(tmp_path, "--tick", "loop.py:step", "--json", "map.json", "loop.py")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "KeyboardInterrupt" in errors
    assert "arena/cli" not in errors
    assert "loop.py:8 in step" in errors.partition("KeyboardInterrupt")[2]
    assert json.loads((tmp_path / "map.json").read_text())["rows"]


def test_sigusr1_prints_the_map_and_the_program_goes_on(tmp_path: Path) -> None:
    write(tmp_path, "loop.py", LOOP)
    process = start(tmp_path, "--tick", "loop.py:step", "--json", "map.json", "loop.py")
    assert process.stderr
    for _ in range(2):
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR1)
        while "loop.py:8 in step" not in process.stderr.readline():
            assert process.poll() is None
    deadline = time.monotonic() + 20
    while not (tmp_path / "map.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads((tmp_path / "map.json").read_text())["rows"][0]["tick"] == "step"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert output == ""
    assert process.returncode == 130
    assert "ticks in" in errors


def test_garbage_in_cycles_is_collected_before_the_map_at_sigusr1(tmp_path: Path) -> None:
    program = """
        import gc, time
        import arena

        gc.disable()

        def step(n):
            cycle = [arena.alloc_persist(100)]
            cycle.append(cycle)

        for n in range(100):
            step(n)
        print("ready", flush=True)
        time.sleep(60)
        """
    write(tmp_path, "garbage.py", program)
    process = start(tmp_path, "--tick", "garbage.py:step", "garbage.py")
    process.send_signal(signal.SIGUSR1)
    assert process.stderr
    assert "100 ticks in" in process.stderr.readline()
    assert process.stderr.readline().startswith("Nothing escapes.")
    process.kill()
    process.communicate(timeout=30)


def test_sigterm_prints_the_map_and_ends_the_program_as_ever(tmp_path: Path) -> None:
    write(tmp_path, "loop.py", LOOP)
    ticks = ["--tick", "loop.py:step", "--tick", "loop.py:no"]
    process = start(tmp_path, *ticks, "--json", "map.json", "loop.py")
    time.sleep(0.5)
    process.terminate()
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (-signal.SIGTERM, "")
    assert errors.count("ticks in") == 1
    assert "loop.py:8 in step" in errors
    assert "error: --tick loop.py:no matched nothing" in errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "map.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("handler", "status", "maps"),
    [("signal.SIG_IGN", 0, 1), ("lambda *_: sys.exit(5)", 5, 1), ("signal.SIG_DFL", -15, 0)],
)
def test_what_the_program_does_at_sigterm_is_its_own_affair(
    handler: str, status: int, maps: int, tmp_path: Path
) -> None:
    write(
        tmp_path,
        "app.py",
        f"""
        import os, signal, sys
        signal.signal(signal.SIGTERM, {handler})
        def step(): pass
        step()
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    result = run(tmp_path, "--tick", "app.py:step", "app.py")
    assert (result.returncode, result.stderr.count("tick in")) == (status, maps)


def test_a_forked_child_dies_of_sigterm_at_once_and_prints_no_map(tmp_path: Path) -> None:
    write(
        tmp_path,
        "app.py",
        """
        import os, signal
        def step(): pass
        step()
        ready, tell = os.pipe()
        child = os.fork()
        if not child:
            os.write(tell, b"%d" % (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL))
            signal.pause()
        assert os.read(ready, 1) == b"1"
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    result = run(tmp_path, "--tick", "app.py:step", "app.py")
    assert result.stdout.split()[-1] == "-15"
    assert result.stderr.count("tick in") == 1


@pytest.mark.parametrize(
    ("ending", "status", "output", "maps"),
    [
        ("os._exit(5)", 5, "", 0),
        ("os.execv('/bin/echo', ['echo', 'executed'])", 0, "executed\n", 0),
        ("os.fork() and os.wait(); print('out'); sys.exit(3)", 3, "out\nout\n", 1),
        ("os.fork() and os._exit(4)", 4, "", 0),
        ("os.fork() or os._exit(4); os.wait()", 0, "", 1),
        ("os.close(2); sys.stderr = None", 0, "", 1),
        ("os.chdir('/')", 0, "", 1),
        ("threading.Thread(target=late).start(); print('first')", 0, "first\nlate\n", 1),
        ("ThreadPoolExecutor(2).submit(late)", 0, "late\n", 1),
        ("atexit.register(print, 'at exit')", 0, "at exit\n", 1),
        ("sys.exit(threading.Thread(target=late).start())", 0, "late\n", 1),
    ],
)
def test_one_map_is_printed_by_the_process_itself_whichever_way_it_ends(
    ending: str, status: int, output: str, maps: int, tmp_path: Path
) -> None:
    write(
        tmp_path,
        "ends.py",
        f"""
        import atexit, os, sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        import arena

        kept = []

        def step():
            kept.append(arena.strdup_persist("x" * 100))

        def late():
            time.sleep(0.3)
            step()
            print("late")

        step()
        {ending}
        """,
    )
    result = run(tmp_path, "--tick", "ends.py:step", "--json", "map.json", "ends.py")
    assert (result.returncode, result.stdout) == (status, output), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("python -m arena map:") == maps
    assert (tmp_path / "map.json").exists() == (maps == 1)
    if maps:
        late = " 2 ticks in" if "late" in output else " 1 tick in"
        assert late in result.stderr


def test_children_of_multiprocessing_work_and_print_no_map(tmp_path: Path) -> None:
    write(
        tmp_path,
        "pool.py",
        """
        import multiprocessing
        import arena

        def double(n):
            return 2 * n

        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(double, [1, 2]))
            double(1)
        """,
    )
    result = run(tmp_path, "--tick", "pool.py:double", "pool.py")
    assert (result.returncode, result.stdout) == (0, "[2, 4]\n[2, 4]\n"), result.stderr
    assert result.stderr.count("python -m arena map:") == 1


@pytest.mark.parametrize(
    ("program", "args", "status"),
    [(LEAKY, [], 1), (CLEAN, [], 0), (LEAKY, ["exit"], 7), (LEAKY, ["raise"], 1)],
)
def test_fail_on_growth_is_status_1_unless_the_program_has_one(
    program: str, args: list[str], status: int, tmp_path: Path
) -> None:
    write(tmp_path, "app.py", program)
    tick = ["--tick", "app.py:Handler.handle"] if program is LEAKY else []
    assert run(tmp_path, *tick, "--fail-on-growth", "app.py", *args).returncode == status


def test_growth_in_a_function_that_has_returned_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        "main.py",
        """
        import arena

        def main():
            local = []
            for n in range(100):
                with arena.tick("turn"):
                    local.append(arena.strdup_persist("x" * 100))

        main()
        """,
    )
    result = run(tmp_path, "--fail-on-growth", "main.py")
    assert result.returncode == 1
    assert "main.py:8 in main" in result.stderr
    assert "before it was freed" in result.stderr


TABLES = """
    import collections, functools, gc, sys

    kind, turns = sys.argv[1], int(sys.argv[2])
    seen, table, handles, window = [], {}, set(), collections.deque(maxlen=100)

    class Thing:
        def __init__(self, n):
            self.a, self.b = [n], {"n": n}

    @functools.lru_cache(None)
    def cached(n):
        return (n,)

    @functools.lru_cache(maxsize=128)
    def bounded(n):
        return (n,)

    def cycle(n):
        one = [b"x" * 2000 + b"%d" % n]
        one.append(one)

    if kind == "cycle": gc.disable()  # in a larger program the next full one may be far off

    def turn(n):
        if kind == "list": seen.append(Thing(n))
        if kind == "dict": table[n] = Thing(n)
        if kind == "set": handles.add(str(n))
        if kind == "lru_cache": cached(n)
        if kind == "bounded": bounded(n)
        if kind == "deque": window.append(Thing(n))
        if kind == "cycle": cycle(n)

    for n in range(turns):
        turn(n)
    """


@pytest.mark.skipif(bool(WITHOUT), reason="needs the module for Python objects")
@pytest.mark.parametrize("turns", [2_000, 20_000])
@pytest.mark.parametrize(
    ("kind", "grows"),
    [
        ("dict", True),
        ("set", True),
        ("list", True),
        ("lru_cache", True),
        ("bounded", False),
        ("deque", False),
        ("cycle", False),
    ],
)
def test_a_container_of_small_things_grows_unless_it_is_bounded_or_garbage(
    kind: str, grows: bool, turns: int, tmp_path: Path
) -> None:
    write(tmp_path, "one.py", TABLES)
    result = run(tmp_path, "--tick", "one.py:turn", "--fail-on-growth", "one.py", kind, turns)
    assert result.returncode == grows, result.stderr
    assert ("GROWS" in result.stderr, "GREW" in result.stderr) == (grows, False)


# ---- Which functions are ticks ----------------------------------------------------------------

FUNCTIONS = """
    import asyncio
    import contextlib
    import functools
    import inspect

    import arena

    registered = []

    def route(function):
        registered.append(function)
        return function

    def name():
        tick = arena.current()
        return tick and tick.name

    @route
    def handler():
        return name()

    class Thing:
        @property
        def prop(self):
            return name()

        @prop.setter
        def prop(self, value):
            print("setter", name())

        @staticmethod
        def static():
            return name()

        @classmethod
        def cls(cls):
            return name()

        @functools.cached_property
        def cached(self):
            return name()

        async def coroutine(self):
            await asyncio.sleep(0)
            return name()

        def generator(self):
            yield name()
            yield name()

        @contextlib.contextmanager
        def manager(self):
            yield

        class Inner:
            def method(self):
                def local():
                    return name()
                return local()

    def here():
        return inspect.stack()[1].frame.f_code

    def where():
        return inspect.stack()[0].lineno, here().co_firstlineno, inspect.getsource(where)

    thing = Thing()
    print([registered[0](), thing.prop, thing.static(), Thing.cls(), thing.cached])
    thing.prop = 1
    print([asyncio.run(thing.coroutine()), *thing.generator(), Thing.Inner().method(), name()])
    with thing.manager():
        print(name())
    print(where())
    """


def test_functions_of_each_kind_can_be_ticks_and_stay_what_they_are(tmp_path: Path) -> None:
    write(tmp_path, "kinds.py", FUNCTIONS)
    names = (
        *("handler", "Thing.prop", "Thing.static", "Thing.cls", "Thing.cached", "where"),
        *("Thing.coroutine", "Thing.generator", "Thing.manager", "Thing.Inner.method.local"),
    )
    plain = subprocess.run(
        [sys.executable, "kinds.py"], cwd=tmp_path, capture_output=True, text=True, env=ENV
    ).stdout.splitlines()
    result = run(tmp_path, *(f"--tick=kinds.py:{name}" for name in names), "kinds.py")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines == [
        "['handler', 'Thing.prop', 'Thing.static', 'Thing.cls', 'Thing.cached']",
        "setter Thing.prop",
        "['Thing.coroutine', 'Thing.generator', 'Thing.generator', "
        "'Thing.Inner.method.local', None]",
        "Thing.manager",
        plain[-1],  # each line has the number it had
    ]
    assert "11 ticks in" in result.stderr


def test_a_file_is_found_as_a_module_by_its_path_and_by_the_end_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, "pkg/deep/mod.py", "def f(): pass\n")
    package = write(tmp_path, "pkg/__init__.py", "def f(): pass\n")
    write(tmp_path, "app.py", "from pkg.deep.mod import f\nf()\nimport pkg\npkg.f()\n")
    for file in (
        *("pkg/deep/mod.py", "deep/mod.py", "mod.py", "./pkg/deep/mod.py", str(path)),
        *("pkg.deep.mod", "pkg", "pkg/__init__.py", str(package)),
    ):
        result = run(tmp_path, "--tick", f"{file}:f", "app.py")
        assert result.returncode == 0, (file, result.stderr)
        assert " 1 tick in" in result.stderr, file
    for file in ("od.py", "deep", "other/deep/mod.py", "mod.pyc", "/pkg/deep/mod.py", "deep.mod.f"):
        assert not Wanted(file, "f").matches(str(path), "pkg.deep.mod"), file


def test_no_bytecode_is_read_or_written_for_a_file_with_ticks(tmp_path: Path) -> None:
    module = write(tmp_path, "mod.py", "def f(): pass\n")
    write(tmp_path, "app.py", "import mod\nmod.f()\n")
    cache = Path(importlib.util.cache_from_source(str(module)))
    tick = ("--tick", "mod.py:f")
    assert " 1 tick in" in run(tmp_path, *tick, "app.py").stderr
    assert not cache.exists()
    assert " 0 ticks in" in run(tmp_path, "app.py").stderr
    assert cache.exists()
    compiled = cache.read_bytes()
    assert " 1 tick in" in run(tmp_path, *tick, "app.py").stderr
    assert cache.read_bytes() == compiled
    assert " 0 ticks in" in run(tmp_path, "app.py").stderr


@pytest.mark.parametrize(
    ("tick", "words"),
    [
        ("app.py:nothing", "the file has f, C.m, agen"),
        ("nothing.py:f", "the program imported no such file"),
        ("arena.cli:main", "was loaded before the program began"),
        ("app.py:agen", "is an async generator function, which cannot be a tick"),
    ],
)
def test_a_tick_that_matched_nothing_is_told_at_the_end(
    tick: str, words: str, tmp_path: Path
) -> None:
    write(
        tmp_path,
        "app.py",
        """
        import sys
        def f(): pass
        class C:
            def m(self): pass
        async def agen():
            yield 1
        print("ran")
        sys.exit(len(sys.argv) - 1)
        """,
    )
    result = run(tmp_path, "--tick", "app.py:f", "--tick", tick, "app.py")
    assert (result.returncode, result.stdout) == (2, "ran\n")
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert f"--tick {tick} " in errors[0]
    assert words in errors[0]
    assert run(tmp_path, "--tick", tick, "app.py", "a", "b", "c").returncode == 3


def test_a_function_that_the_file_has_not_is_told_before_the_file_runs(tmp_path: Path) -> None:
    write(tmp_path, "app.py", "import sys; print('ran', file=sys.stderr)\ndef f(): pass\nf()")
    result = run(tmp_path, "--tick", "app.py:f", "--tick", "app.py:g", "app.py")
    warning, ran, *_ = result.stderr.splitlines()
    assert (ran, result.returncode) == ("ran", 2)
    assert warning == (
        "python -m arena map: warning: --tick app.py:g matched nothing: the file has f"
    )
    assert result.stderr.count("app.py:g matched nothing") == 2
    assert "warning" not in run(tmp_path, "--tick", "app.py:f", "app.py").stderr


# ---- Wrong usage ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["SCRIPT"]),
        (["no.py"], ["no such script: 'no.py'"]),
        (["-m", "no.such"], ["no module named 'no.such'"]),
        (["-m", "app.sub"], ["no module named 'app.sub'"]),
        (["-m", "no such"], ["not the name of a module"]),
        (["-m", "empty"], ["no module named 'empty.__main__'"]),
        (["empty"], ["no __main__.py in 'empty'"]),
        (["--tick", "app.py", "app.py"], ["FILE:FUNCTION", "'app.py'"]),
        (["--tick", ":f", "app.py"], ["FILE:FUNCTION"]),
        (["--tick", "app.py:1f", "app.py"], ["FILE:FUNCTION"]),
        (["--depth", "99", "app.py"], ["--depth", "32"]),
        (["--depth", "x", "app.py"], ["--depth"]),
        (["--budget", "lots", "app.py"], ["--budget", "'lots'"]),
        (["--html", "no/map.html", "app.py"], ["--html", "No such file"]),
        (["--json", "/dev/null", "app.py"], ["--json", "not a regular file"]),
        (["--jso", "x", "app.py"], ["--jso"]),
    ],
)
def test_wrong_usage_is_one_line_and_nothing_runs(
    args: list[str], words: list[str], tmp_path: Path
) -> None:
    write(tmp_path, "app.py", "if __name__ == '__main__': print('ran')")
    write(tmp_path, "empty/__init__.py", "")
    result = run(tmp_path, *args)
    assert result.stdout == ""
    assert_one_line(result, *words)


def test_a_module_whose_own_import_fails_is_told_by_its_traceback(tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "import not_there\n")
    write(tmp_path, "pkg/mod.py", "")
    result = run(tmp_path, "-m", "pkg.mod")
    assert result.returncode == 1
    assert "ModuleNotFoundError: No module named 'not_there'" in result.stderr
    assert "arena/cli" not in result.stderr
    assert result.stderr.count('File "') == 1


def test_without_rich_the_extra_is_named_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, "app.py", "print('ran')")
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from arena.cli import main\n"
        "sys.exit(main(['map', 'app.py']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert_one_line(result, "pip install 'tick-arena[cli]'")
    assert result.stdout == ""


def test_the_help_says_what_happens_to_children_and_to_abrupt_ends() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "arena", "map", "--help"], capture_output=True, text=True, env=ENV
    )
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    for words in (
        "os._exit()",
        "SIGUSR1",
        "children that it forks",
        "--fail-on-growth",
        "-m MODULE",
    ):
        assert words in text

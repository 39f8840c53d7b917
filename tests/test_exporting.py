"""The number of finished ticks, as others read it from outside."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds are Linux's")


def shown(pid: int) -> list[int]:
    """What a process shows of its ticks: one number for each memfd of that name."""
    numbers = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("/memfd:arena-ticks"):
                continue
            magic, number = struct.unpack("=8sQ", entry.read_bytes()[:16])
        except OSError:
            continue
        assert magic == b"ARENAtk1"
        numbers.append(number)
    return numbers


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


SHOWN = f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); " + (
    "from test_exporting import shown; import arena\n"
)


def test_nothing_is_shown_unasked() -> None:
    assert python(SHOWN + "print(shown(os.getpid()))") == "[]\n"


def test_the_number_is_right_to_within_ten_ticks_and_shown_once() -> None:
    code = """
arena.export_ticks(); arena.export_ticks()
assert shown(os.getpid()) == [0]
for n in range(1, 200):
    with arena.tick(): pass
    (seen,) = shown(os.getpid())
    assert 0 <= n - seen < 10, (n, seen)
print(arena.stats().ticks_ended)
"""
    assert python(SHOWN + code) == "199\n"


def test_the_environment_asks_for_it() -> None:
    assert python(SHOWN + "print(shown(os.getpid()))", ARENA_EXPORT="1") == "[0]\n"
    assert python(SHOWN + "print(shown(os.getpid()))", ARENA_EXPORT="0") == "[]\n"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python("import arena", ARENA_EXPORT="yes")
    assert "ARENA_EXPORT='yes' is not understood: it takes 0 or 1" in caught.value.stderr


def test_a_child_shows_its_own_ticks_and_leaves_its_parents_alone() -> None:
    code = """
arena.export_ticks()
def ticks(n):
    for _ in range(n):
        with arena.tick(): pass
ticks(41)
before = shown(os.getpid())
if os.fork() == 0:
    (mine,) = shown(os.getpid())
    ticks(40)
    (after,) = shown(os.getpid())
    assert after - mine in (30, 40), (mine, after)
    assert shown(os.getppid()) == before
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
assert shown(os.getpid()) == before
"""
    python(SHOWN + code)


def test_a_program_that_closes_all_its_files_can_ask_again() -> None:
    code = """
arena.export_ticks()
os.closerange(3, 64)
assert shown(os.getpid()) == []
with open(os.devnull) as other:  # takes the number that is free
    if os.fork() == 0:
        other.fileno() and os.fstat(other.fileno())  # not closed in the child
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    arena.export_ticks()
for _ in range(20):
    with arena.tick(): pass
assert len(shown(os.getpid())) == 1 and shown(os.getpid())[0] >= 10
"""
    python(SHOWN + code)


def test_no_descriptor_left_is_an_error_that_says_so() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    arena.export_ticks()
except OSError as error:
    print(error)
"""
    assert "no file descriptor" in python("import arena\n" + code)


def test_it_is_not_passed_on_to_programs_that_are_started() -> None:
    code = """
import subprocess
arena.export_ticks()
assert len(shown(os.getpid())) == 1
child = "import os; os.system('ls -l /proc/self/fd')"
done = subprocess.run(
    [sys.executable, "-c", child], close_fds=False, capture_output=True, text=True, check=True
)
print(done.stdout)
"""
    out = python(SHOWN + code)
    assert " -> " in out
    assert "arena-ticks" not in out

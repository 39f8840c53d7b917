"""The README is true: its examples run, its error table is what happens, its commands are there."""

from __future__ import annotations

import asyncio
import builtins
import copy
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import arena

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
TABLE = README.partition("<!-- error table -->")[2].partition("\n\n")[0].strip().splitlines()[2:]
ROWS = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in TABLE]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.splitlines()[0])
def test_each_example_runs(example: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def in_thread(fn: Callable[..., object], *args: object) -> None:
    """Call fn in another thread and raise here what it raises there."""
    caught: list[BaseException] = []

    def work() -> None:
        try:
            fn(*args)
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise caught[0]


def leave_a_view() -> None:
    views = []
    with arena.tick("e", escapes="raise") as t:
        views.append(memoryview(t.alloc(1)))


def in_cleanup(fn: Callable[[arena.Tick], object]) -> None:
    """Call fn in a cleanup and raise what it raises there."""
    own = arena.begin("own")
    own.cleanup(fn, own)
    try:
        own.end()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def limited_process(fn: Callable[..., object], *args: object) -> None:
    """Call fn while the process may hold no more than it does."""
    now = arena.stats()
    arena.set_limit(now.scratch + now.persisted + now.strays)
    try:
        fn(*args)
    finally:
        arena.set_limit(None)


def open_twice(key: str) -> None:
    with arena.Requests("bodies") as reqs:
        reqs.open(key)
        reqs.open(key)


def read_body(body: bytes, more: bool = False, limit: int = 10) -> None:
    """Read what a client sends, who then goes away if there is more."""
    messages = [{"type": "http.request", "body": body, "more_body": more}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    with arena.Requests("bodies") as reqs:
        asyncio.run(arena.asgi.read_body(receive, reqs.open("k"), limit))


def second_trimmer() -> None:
    """Start one while another one runs."""
    with arena.Trimmer():
        arena.Trimmer().start()


@pytest.mark.ends
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_of_the_error_table_is_what_happens(row: tuple[str, str, str]) -> None:
    _, code, outcome = row
    expected = re.fullmatch(r"`(\w+)`:(.*)", outcome)
    assert expected is not None
    error = getattr(arena, expected[1], None) or getattr(builtins, expected[1])
    with arena.tick("over") as ended:
        stale = ended.strdup("text")
    freed, kept = arena.strdup_persist("x"), arena.strdup_persist("x")
    freed.free()
    with arena.tick("t") as t, arena.tick("small", limit=100) as small, arena.tick() as inner:
        viewed, buf = t.strbuf("viewed"), t.strbuf("as it was")
        views = [memoryview(viewed), memoryview(kept)]
        names: dict[str, Any] = {
            **locals(),
            "text": t.strdup("text"),
            "block": t.alloc(4),
            "store": arena.Store(),
            "thread": in_thread,
            "nowhere": in_thread,
            "leave_a_view": leave_a_view,
            "in_cleanup": in_cleanup,
            "limited_process": limited_process,
            "second_trimmer": second_trimmer,
            "open_twice": open_twice,
            "read_body": read_body,
            "arena": arena,
            "copy": copy,
        }
        with pytest.raises(error) as caught:
            eval(code.strip("`"), names)
        assert expected[2].strip().strip("`") in str(caught.value)
        assert (buf, viewed, kept, t.open) == ("as it was", "viewed", "x", True)
        assert (small.used, inner.used, small.open, inner.open) == (0, 0, True, True)
        for view in views:
            view.release()


def test_the_table_has_a_row_for_each_error_of_arena() -> None:
    named = {row[2].partition("`:")[0].strip("`") for row in ROWS}
    assert {name for name in arena.errors.__all__ if name != "ArenaError"} <= named
    assert len(ROWS) >= 34


def test_there_are_two_commands_of_one_line_each_and_ci_runs_the_test_command_as_it_stands() -> (
    None
):
    commands = re.findall(r"<!-- (\w+) command -->\n```sh\n(.*?)\n```", README)
    assert [name for name, _ in commands] == ["demo", "test"]
    assert commands[0][1].endswith("-m arena demo")
    script = (ROOT / ".ci/run").read_text()
    extract = re.search(r"command=\$\((.*)\)$", script, re.MULTILINE)
    assert extract is not None
    done = subprocess.run(
        ["bash", "-c", extract[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == commands[1][1]


def test_nothing_in_the_readme_is_left_to_be_filled_in() -> None:
    assert not re.search(r"@@|TBD|\?\?\?", README)


def test_what_the_readme_points_to_is_there() -> None:
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path

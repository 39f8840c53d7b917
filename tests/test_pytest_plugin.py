"""The marker ``@pytest.mark.arena``, in projects of its own that pytest runs as processes."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

HEAD = """
import arena
import pytest

kept = []

def leak(n=1, size=100):
    for _ in range(n):
        with arena.tick("work"):
            kept.append(arena.alloc_persist(size))

"""


def run(pytester: pytest.Pytester, tests: str, *args: str, leaks: bool = True) -> pytest.RunResult:
    """Run pytest on these tests; in a process of its own if they leak."""
    pytester.makepyfile(HEAD + tests)
    start = pytester.runpytest_subprocess if leaks else pytester.runpytest_inprocess
    return start("-p", "no:cacheprovider", "--strict-markers", *args)


def test_a_test_that_leaves_nothing_passes(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.arena
def test_clean():
    for _ in range(50):
        with arena.tick("work") as t:
            mine = t.strbuf("x").persist()

@pytest.mark.arena
def test_garbage_in_a_cycle():
    cycle = [arena.alloc_persist(10)]
    cycle.append(cycle)
""",
        "-W",
        "error",
        leaks=False,
    )
    result.assert_outcomes(passed=2)


def test_what_escapes_fails_the_test_with_the_map(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.arena
def test_leaks():
    leak(2)

@pytest.mark.arena(max_escapes=1)
def test_leaks_more_than_allowed():
    leak(2)

@pytest.mark.arena(max_escapes=2)
def test_leaks_what_is_allowed():
    leak(2)

@pytest.mark.arena(max_escapes=None)
def test_leaks_what_it_likes():
    leak(5)

def test_is_not_watched():
    leak(200)
""",
    )
    result.assert_outcomes(failed=2, passed=3)
    result.stdout.fnmatch_lines(
        [
            "arena: 2 new escapes alive after the test, 0 allowed",
            "*- arena: what escapes -*",
            "2 escapes more alive, 200 B, from 1 place; none keeps growing.",
            "kind     alive   bytes  a tick  where",
            "persist     +2  +200 B          test_what_escapes_*.py:9 in leak",
            "*kept.append(arena.alloc_persist(size))",
            "*from test_what_escapes_*.py:* in test_leaks",
            "*leak(2)",
            "*tick 'work', 2 ever*",
            "arena: 2 new escapes alive after the test, 1 allowed",
        ]
    )
    result.stdout.no_fnmatch_line("*_pytest/*")
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_what_keeps_growing_fails_the_test_even_if_its_end_frees_it(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
def loop(forget):
    mine = []
    for n in range(100):
        with arena.tick("work"):
            mine.append(arena.alloc_persist(100))
            del mine[:-forget]

@pytest.mark.arena
def test_grows():
    loop(forget=1000)

@pytest.mark.arena
def test_is_full():
    loop(forget=8)

@pytest.mark.arena(flat=False)
def test_may_grow():
    loop(forget=1000)

@pytest.mark.arena(max_escapes=None)
def test_grows_and_stays():
    leak(100)
""",
    )
    result.assert_outcomes(failed=2, passed=2)
    result.stdout.fnmatch_lines(
        [
            "arena: memory from 1 place keeps growing",
            "*- arena: what escapes -*",
            "No more is alive than before; 1 keeps growing, by * a tick.",
            "*GREW to * before it was freed",
            "*test_grows_and_stays*",
            "arena: memory from 1 place keeps growing",
            "100 escapes more alive*; 1 keeps growing*",
        ]
    )


def test_garbage_in_cycles_that_nobody_has_collected_does_not_grow(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
import gc

@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()

@pytest.mark.arena
def test_leaves_garbage(no_collector):
    for n in range(100):
        with arena.tick("work"):
            cycle = [arena.alloc_persist(100)]
            cycle.append(cycle)
    del cycle
""",
        leaks=False,
    )
    result.assert_outcomes(passed=1)


def test_what_fixtures_free_is_no_escape_and_what_they_leave_is_an_error(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
@pytest.fixture
def store():
    return arena.Store()

@pytest.fixture
def freed():
    mine = arena.alloc_persist(10)
    yield mine
    mine.free()

@pytest.fixture
def left():
    kept.append(arena.alloc_persist(10))

@pytest.fixture(scope="module")
def shared():
    store = arena.Store(made="once")
    yield store
    store.clear()

@pytest.fixture(scope="session")
def state(shared_session):
    return arena.Store(made="once")

@pytest.fixture(scope="session")
def shared_session():
    return arena.Store(made="first")

@pytest.mark.arena
def test_fills_a_store_of_its_own(store, freed):
    store["x"] = "y"

@pytest.mark.arena
def test_uses_what_is_shared(shared, state, request):
    assert shared["made"] == "once"

@pytest.mark.arena
def test_asks_for_it_late(request):
    request.getfixturevalue("shared")

@pytest.mark.arena
def test_adds_to_what_is_shared(state):
    state["more"] = "y"

@pytest.fixture(scope="session")
def another():
    return arena.Store(made="late")

@pytest.mark.arena
def test_leaks_beside_what_is_shared(another):
    leak(1)

@pytest.mark.arena
def test_has_a_fixture_that_leaves_something(left):
    pass

class TestClass:
    def setup_method(self):
        self.mine = arena.alloc_persist(10)

    def teardown_method(self):
        del self.mine

    @pytest.mark.arena
    def test_method(self):
        self.more = arena.alloc_persist(10)
        del self.more
""",
    )
    result.assert_outcomes(passed=5, failed=2, errors=1)
    result.stdout.no_fnmatch_line("* in another*")
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_has_a_fixture_that_leaves_something*",
            "arena: 1 new escape alive after the test, 0 allowed",
            "*- arena: what escapes -*",
            "persist     +1*in left",
        ]
    )
    result.stdout.fnmatch_lines(["*test_adds_to_what_is_shared*", "arena: 1 new escape alive*"])


def test_a_test_that_fails_by_itself_or_is_skipped_is_not_judged(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
@pytest.mark.arena
def test_fails():
    leak()
    assert False, "mine"

@pytest.mark.arena
def test_skips():
    leak()
    pytest.skip("mine")

@pytest.mark.arena
@pytest.mark.xfail(strict=True)
def test_is_known_to_leak():
    leak()

@pytest.fixture
def broken():
    leak()
    raise ValueError("mine")

@pytest.mark.arena
def test_has_a_broken_fixture(broken):
    pass

@pytest.mark.arena
def test_is_clean_after_all_that():
    pass
""",
    )
    result.assert_outcomes(failed=1, skipped=1, xfailed=1, errors=1, passed=1)
    assert "new escape" not in result.stdout.str().replace("XFAIL", "")


def test_parametrized_tests_classes_and_modules_are_judged_one_by_one(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
pytestmark = pytest.mark.arena(max_escapes=1)

@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_leaks(n):
    leak(n)

class TestIt:
    @pytest.mark.arena(max_escapes=3)
    def test_the_closest_marker_counts(self):
        leak(3)

import unittest

class TestCase(unittest.TestCase):
    @pytest.mark.arena
    def test_leaks(self):
        leak(1)

    @pytest.mark.arena
    def test_clean(self):
        pass
""",
        "-v",
    )
    result.stdout.fnmatch_lines(
        [
            "*test_leaks?0? PASSED*",
            "*test_leaks?1? PASSED*",
            "*test_leaks?2? FAILED*",
            "*test_leaks?3? FAILED*",
            "*closest_marker_counts PASSED*",
            "*TestCase::test_clean PASSED*",
        ]
    )
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] + outcomes["failed"] >= 6
    assert "arena: 1 new escape alive after the test, 0 allowed" in result.stdout.str()


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("arena(3)", "its arguments have names, unlike 3"),
        ("arena(escapes=3)", "there is no argument 'escapes'"),
        ("arena(max_escapes=-1)", "a whole number from 0, or None for any number, not -1"),
        ("arena(max_escapes=True)", "not True"),
        ("arena(max_escapes='1')", "not '1'"),
        ("arena(flat=1)", "flat is True or False, not 1"),
    ],
)
def test_a_wrong_argument_is_one_clear_line_and_other_tests_run(
    marker: str, words: str, pytester: pytest.Pytester
) -> None:
    result = run(
        pytester,
        f"""
@pytest.mark.{marker}
def test_is_marked_wrong():
    raise AssertionError("it never runs")

@pytest.mark.arena
def test_is_marked_right():
    pass
""",
        leaks=False,
    )
    result.assert_outcomes(errors=1, passed=1)
    # Where CI is set, pytest's closing summary repeats the line whole.
    told = (line for line in result.outlines if words in line)
    (line,) = (line for line in told if not line.startswith("ERROR "))
    assert line.startswith("@pytest.mark.arena(max_escapes=0, flat=True): ")
    assert "it never runs" not in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_the_marker_is_listed_and_strict(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.arena(max_escapes=0, flat=True): fail the test*"])
    result = run(pytester, "@pytest.mark.arena\ndef test_it(): pass\n", "-p", "no:arena")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*'arena' not found in `markers` configuration option*"])


def test_a_project_without_the_marker_never_imports_arena(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_imported():
            assert [name for name in sys.modules if name.split(".")[0] == "arena"] == []

        def test_nobody_watches(request):
            plugins = request.config.pluginmanager
            assert plugins.has_plugin("arena")
            assert not plugins.has_plugin("arena-watch")
        """
    )
    monkeypatch.setenv("ARENA_DEBUG", "nonsense")  # which would stop the import
    pytester.runpytest_subprocess().assert_outcomes(passed=2)


def test_a_marker_that_a_plugin_adds_counts(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.arena)
        """
    )
    run(pytester, "def test_leaks():\n    leak()\n").assert_outcomes(failed=1)


def test_a_rerun_is_judged_anew(pytester: pytest.Pytester) -> None:
    """What pytest-rerunfailures does: the whole protocol of one item, again."""
    pytester.makeconftest(
        """
        from _pytest.runner import runtestprotocol

        def pytest_runtest_protocol(item, nextitem):
            for attempt in range(2):
                if hasattr(item, "_initrequest"):
                    item._initrequest()
                item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
                if all(report.passed for report in reports):
                    break
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            return True
        """
    )
    result = run(
        pytester,
        """
@pytest.fixture
def own():
    return []

@pytest.mark.arena
def test_leaks_the_first_time(own):
    if not kept:
        leak()

@pytest.mark.arena
def test_leaks_each_time(own):
    leak()
""",
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks_each_time*"])


def test_an_async_test_is_run_by_its_plugin_and_judged(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import asyncio
        import inspect

        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            if inspect.iscoroutinefunction(pyfuncitem.function):
                asyncio.run(pyfuncitem.function())
                return True
        """
    )
    result = run(
        pytester,
        """
import asyncio

@pytest.mark.arena
async def test_leaks():
    await asyncio.sleep(0)
    leak()

@pytest.mark.arena
async def test_clean():
    await asyncio.sleep(0)
""",
    )
    result.assert_outcomes(passed=1, failed=1)


@pytest.mark.as_ever
def test_recording_is_as_it_was_after_the_test(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
from arena._native import lib

BEFORE = lib.arena_tracing()

@pytest.mark.arena
def test_is_recorded():
    assert lib.arena_tracing() == 4

def test_is_not():
    assert lib.arena_tracing() == BEFORE

@pytest.mark.arena
def test_leaks():
    leak()

def test_is_not_either():
    assert lib.arena_tracing() == BEFORE
""",
    )
    result.assert_outcomes(passed=3, failed=1)

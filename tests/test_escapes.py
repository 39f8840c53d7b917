"""The map of what escapes: what it says grows, how it is shown, and that it is true."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import arena
from arena import _native
from arena._rising import _rises_as_a_table, keeps_rising, slope, summed
from arena.escapes import as_it_ran

# ---- What grows -------------------------------------------------------------------------------


def recorded(lows: Sequence[int], now: int | None = None) -> list[tuple[int, int]]:
    """The history that is recorded of a row with these lowest bytes in turns 1, 2, 3, ..."""
    points = [(turn, low) for turn, low in enumerate(lows, 1)]
    while len(points) > 63:
        points = [
            (points[at][0], min(low for _, low in points[at : at + 2]))
            for at in range(0, len(points), 2)
        ]
    return [*points, (len(lows), lows[-1] if now is None else now)]


turns = st.integers(20, 3000)


@given(st.integers(8, 3000), st.integers(1, 10**9), st.integers(0, 10**12))
def test_a_leak_in_each_tick_grows(turns: int, step: int, base: int) -> None:
    assert keeps_rising(recorded([base + step * turn for turn in range(turns)]))


@given(st.integers(1, 60), st.integers(16, 60), st.integers(0, 59))
def test_a_leak_each_nth_tick_grows_once_each_part_of_the_history_has_some(
    every: int, leaks: int, phase: int
) -> None:
    assert keeps_rising(
        recorded([(turn + phase % every) // every for turn in range(every * leaks)])
    )


@given(turns, st.integers(1, 1000), st.randoms(use_true_random=False))
def test_a_leak_under_noise_smaller_than_what_a_part_of_it_leaks_grows(
    turns: int, step: int, noise: random.Random
) -> None:
    loud = step * turns // 20
    assume(turns >= 100)
    assert keeps_rising(recorded([step * turn + noise.randint(0, loud) for turn in range(turns)]))


@given(st.integers(50, 3000), st.integers(1, 10**6), st.integers(1, 80))
def test_a_cache_that_fills_and_is_then_full_does_not_grow(
    turns: int, step: int, percent: int
) -> None:
    full = turns * percent // 100
    assert not keeps_rising(recorded([step * min(turn, full) for turn in range(turns)]))


@given(turns, st.integers(1, 10**6), st.integers(2, 3000), st.integers(0, 3000))
def test_a_cache_that_is_emptied_now_and_then_does_not_grow(
    turns: int, step: int, period: int, phase: int
) -> None:
    assume(period <= turns // 2)
    lows = [step * ((turn + phase) % period) for turn in range(turns)]
    assert not keeps_rising(recorded(lows))


@given(turns, st.integers(0, 10**9), st.integers(0, 10**9))
def test_what_each_tick_fills_and_empties_does_not_grow_wherever_it_is_now(
    turns: int, base: int, now: int
) -> None:
    assert not keeps_rising(recorded([base] * turns, base + now))


@given(turns, st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_what_is_allocated_once_or_a_few_times_does_not_grow(turns: int, when: list[int]) -> None:
    lows = [sum(turn >= turns * at // 100 for at in when) for turn in range(turns)]
    assert not keeps_rising(recorded(lows))


@given(st.integers(9, 3000), st.integers(1, 1000))
def test_what_is_given_back_at_the_end_does_not_grow_but_did_as_it_ran(
    turns: int, step: int
) -> None:
    assume(turns >= 40)
    history = recorded([step * turn for turn in range(turns)] + [0], 0)
    assert not keeps_rising(history)
    before = arena.EscapeMap((escape(history=history, growing=False),))
    assert as_it_ran(before, before)[0].growing
    flat = arena.EscapeMap((escape(history=recorded([step] * turns), growing=False),))
    assert as_it_ran(flat, flat) == flat


def test_what_the_collector_freed_at_the_end_did_not_grow() -> None:
    history = recorded([100 * turn for turn in range(100)] + [0], 0)
    after = arena.EscapeMap((escape(history=history, count=0, bytes=0),))
    garbage = arena.EscapeMap((escape(history=history, count=99, bytes=9_000),))
    assert not as_it_ran(after, garbage).growing
    little = arena.EscapeMap((escape(history=history, count=1, bytes=100),))
    assert as_it_ran(after, little).growing


def test_a_table_that_was_full_long_before_it_was_freed_did_not_grow() -> None:
    full = [(turn, 50 * turn) for turn in (10, 20, 40, 80, 160)]
    (row,) = after = arena.EscapeMap((escape(history=[*full, (2000, 0), (2000, 0)]),))
    assert not as_it_ran(after, after).growing
    soon = dataclasses.replace(row, history=(*full, (200, 0), (200, 0)))
    assert as_it_ran(arena.EscapeMap((soon,)), after).growing


def test_a_handful_of_turns_tells_nothing() -> None:
    for turns in range(1, 8):
        assert not keeps_rising(recorded(list(range(turns)), 100))
    assert keeps_rising(recorded(list(range(8)), 100))
    assert not keeps_rising([])
    assert not keeps_rising([(5, 100), (1000, 100)])


def test_noise_about_a_level_looks_like_growth_once_in_some_720_histories() -> None:
    noise = random.Random(2026)
    seen = sum(
        keeps_rising(recorded([noise.randint(0, 10**6) for _ in range(turns)]))
        for turns in range(20, 2020)
    )
    assert seen <= 9


def test_a_few_points_far_apart_count_as_well_as_many() -> None:
    """A history may have points only where something happened."""
    assert keeps_rising([*((turn, turn) for turn in range(0, 200, 10)), (199, 190)])
    assert not keeps_rising([(0, 1), (100, 2), (101, 3), (102, 4), *[(103, 5)] * 6])
    assert not keeps_rising([*((turn, turn) for turn in range(50)), (1000, 49)])


@given(st.integers(50, 60), st.integers(0, 59))
def test_what_is_given_back_once_starts_anew(turns: int, when: int) -> None:
    assume(when < 12 or when > 24)
    lows = list(range(1, turns + 1))
    lows[min(when, turns - 1)] = 0
    assert keeps_rising(recorded(lows)) == (when < 12)


def filled(kind: Callable[[], Any], turns: int, full: int | None = None) -> list[int]:
    """The bytes of a real table over 512 bytes after each turn that put one thing in."""
    table = kind()
    put = {dict: lambda n: table.update({n: n}), set: lambda n: table.add(n)}.get(
        kind, lambda n: table.append(n)
    )
    empty = sys.getsizeof(table)
    sizes = []
    for turn in range(turns):
        if full is None or turn < full:
            put(turn)
        held = sys.getsizeof(table) - empty
        sizes.append(held if held > 512 else 0)
    return sizes


def since_its_first(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The history that is recorded of a row which begins with the first of its bytes."""
    first = next(at for at, live in enumerate(sizes) if live)
    return [(turn + first, live) for turn, live in recorded(sizes[first:])]


@pytest.mark.parametrize("kind", [dict, set, list])
@pytest.mark.parametrize("turns", [1_500, 2_000, 6_000, 15_000, 20_000])
def test_a_table_that_is_filled_on_grows(kind: Callable[[], Any], turns: int) -> None:
    sizes = filled(kind, turns)
    assert keeps_rising(since_its_first(sizes))
    each_seventh = [(7 * turn, live) for turn, live in since_its_first(sizes)]
    assert keeps_rising(each_seventh)


@pytest.mark.parametrize(("kind", "times"), [(dict, 3), (set, 6), (list, 2)])
@pytest.mark.parametrize("full", [100, 128, 500, 1_000, 3_000])
def test_a_table_that_is_full_stops_growing_once_its_next_rise_is_overdue(
    kind: Callable[[], Any], times: int, full: int
) -> None:
    assert not keeps_rising(since_its_first(filled(kind, times * full, full)))


def doubling(turn: int) -> int:
    return 100 * 2 ** turn.bit_length()


@pytest.mark.parametrize("turns", range(100, 1_000, 70))
def test_what_falls_or_is_filled_ever_more_slowly_is_no_table(turns: int) -> None:
    assert keeps_rising(recorded([doubling(turn) for turn in range(turns)]))
    for period in (turns // 2, turns // 3, turns // 10):
        assert not keeps_rising(recorded([doubling(turn % period) for turn in range(turns)]))
    # A cache that meets a new key at the turns 1, 2, 4, 8, ...
    assert not keeps_rising(recorded([700 * turn.bit_length() for turn in range(turns)]))
    # Three rises, or rises to less than eight times the first size, are too few to tell.
    assert not keeps_rising(recorded([100 * 3 ** (turn * 3 // turns) for turn in range(turns)]))
    assert not keeps_rising(recorded([100 + doubling(turn) // turns for turn in range(turns)]))


def test_a_small_dip_of_a_table_is_let_go_on_and_a_large_one_is_not() -> None:
    table = [(10 * 2**n, 100 * 2**n) for n in range(8)]
    for kept, grows in ((0.95, True), (0.5, False)):
        dip = [*table[:6], (400, int(3_200 * kept)), *table[6:], (1_500, 12_800)]
        assert keeps_rising(dip) == grows


def test_the_bounds_of_what_a_table_is() -> None:
    def table(times: float, rises: int, longer: float = 2, late: int = 0) -> bool:
        points = [(int(100 * longer**n), int(1000 * times**n)) for n in range(rises)]
        return _rises_as_a_table([(0, 0), *points, (points[-1][0] + late, points[-1][1])])

    assert table(2, 6, longer=2)
    assert not table(2, 6, longer=4)  # by the power 0.5 of the turns
    assert table(1.5, 7, longer=1.5)
    assert not table(1.5, 5, longer=1.5)  # to five times the first size
    assert table(1.125, 30, longer=1.125)
    # Its next rise is due 3,200 turns after the one in turn 3,200.
    assert table(2, 6, late=3_900)
    assert not table(2, 6, late=5_500)


def test_noise_and_walks_are_no_tables() -> None:
    noise = random.Random(2026)
    walks = []
    for turns in range(100, 900, 2):
        at, walk = 0, []
        for _ in range(turns):
            at = max(0, at + noise.randint(-1000, 1000))
            walk.append(at)
        walks.append(walk)
    assert sum(_rises_as_a_table(recorded(walk)) for walk in walks) <= 2
    level = [[noise.randint(0, 10**6) for _ in walk] for walk in walks]
    assert not any(_rises_as_a_table(recorded(lows)) for lows in level)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), min_size=1, max_size=20))
def test_the_slope_is_that_of_the_least_squares_line(points: list[tuple[int, int]]) -> None:
    points.sort()
    assert slope([(turn, 7) for turn, _ in points]) == 0
    assert slope([(turn, 3 * turn + 5) for turn, _ in points]) == pytest.approx(
        3.0 if points[0][0] != points[-1][0] else 0.0
    )


def test_two_histories_are_summed_turn_by_turn() -> None:
    assert summed([(1, 5), (4, 7), (6, 8)], [(3, 10), (5, 20), (6, 25)]) == (
        (1, 5),
        (3, 15),
        (4, 17),
        (5, 27),
        (6, 33),
    )


# ---- How it is shown --------------------------------------------------------------------------

HERE = __file__
LEAK = [(turn, turn * 100) for turn in range(1, 21)]


def raw(**given: Any) -> dict[str, Any]:
    """A row as the native module gives it."""
    row = {
        "kind": "persist",
        "site": (("/srv/app/mind.py", "remember", 12), ("/srv/app/loop.py", "turn", 99)),
        "used": (),
        "tick": "mind",
        "count": 2,
        "bytes": 2048,
        "count_ever": 30,
        "bytes_ever": 40_000,
        "uses": 0,
        "first": 1,
        "last": 19,
        "age": 2.5,
        "example": "<arena.Str 'x'>",
        "turn": 20,
        "history": [(1, 2048), (20, 2048)],
    }
    return {**row, **given}


def escape(**given: Any) -> arena.Escape:
    row = arena.Escape(**{**raw(), "site": (), "slope": 0.0, "growing": False, **given})
    return dataclasses.replace(row, history=tuple(row.history))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., arena.EscapeMap]:
    """Take a map of the given rows in place of what there is."""

    def take(*rows: dict[str, Any]) -> arena.EscapeMap:
        monkeypatch.setattr(_native, "_rows", lambda: list(rows))
        return arena.escapes()

    return take


def printed(shown: arena.EscapeMap, encoding: str = "utf-8", **options: Any) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    shown.print(file, **options)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_a_row_has_what_was_recorded_and_what_follows_from_it(taken) -> None:
    used = ((HERE, "reader", 3),)
    shown = taken(raw(kind="stale", used=used, uses=4, history=LEAK))
    (row,) = shown
    assert row == shown[0]
    assert row.site == (
        arena.Frame("/srv/app/mind.py", 12, "remember"),
        arena.Frame("/srv/app/loop.py", 99, "turn"),
    )
    assert row.used == (arena.Frame(HERE, 3, "reader"),)
    assert (row.kind, row.tick, row.count, row.bytes, row.uses) == ("stale", "mind", 2, 2048, 4)
    assert row.history == tuple(LEAK)
    assert row.slope == pytest.approx(100)
    assert row.growing
    assert shown.growing == shown.live == (row,)
    assert hash(row) == hash(dataclasses.replace(row))


def test_what_grows_comes_first_the_fastest_before_the_others_then_the_largest_then_the_freed(
    taken,
) -> None:
    steep = [(turn, turn * 900) for turn in range(1, 21)]
    shown = taken(
        raw(tick="freed", count=0, bytes=0, history=[(1, 10**9), (20, 0)]),
        raw(tick="small", bytes=10, history=[(1, 10), (20, 10)]),
        raw(tick="large", bytes=10**6, history=[(1, 10**6), (20, 10**6)]),
        raw(tick="slow", bytes=2000, history=LEAK),
        raw(tick="fast", bytes=1000, history=steep),
        raw(tick=None, bytes=100, history=[(1, 100), (20, 100)]),
    )
    assert [row.tick for row in shown] == ["fast", "slow", "large", None, "small", "freed"]
    assert [row.tick for row in shown.growing] == ["fast", "slow"]
    assert len(shown.live) == 5
    assert [row.tick for row in shown[1:3]] == ["slow", "large"]
    assert repr(shown) == "<arena.EscapeMap of escapes: 6 rows, 2 growing>"


def test_two_rows_of_one_line_are_one(taken) -> None:
    half = [(turn, turn * 50) for turn in range(1, 21)]
    shown = taken(
        raw(history=half, example="", first=5),
        raw(history=half, count=1, bytes=5, uses=2, used=((HERE, "f", 1),), age=9.0, last=50),
        raw(tick="other"),
    )
    assert len(shown) == 2
    row = shown.growing[0]
    assert (row.count, row.bytes, row.count_ever, row.bytes_ever) == (3, 2053, 60, 80_000)
    assert (row.first, row.last, row.age, row.uses) == (1, 50, 9.0, 2)
    assert row.example == raw()["example"]
    assert row.used[0].file == HERE
    assert row.history == tuple(LEAK)
    assert row.slope == pytest.approx(100)


def test_a_freed_row_does_not_grow(taken) -> None:
    assert not taken(raw(count=0, bytes=0, history=LEAK)).growing


def test_the_text_says_what_where_how_much_and_whether_it_grows(taken) -> None:
    line = next(n for n, text in enumerate(Path(HERE).read_text().split("\n"), 1) if "def" in text)
    shown = taken(
        raw(site=((HERE, "here", line),), history=LEAK),
        raw(kind="pin", tick=None, site=(), example="", bytes=5, count=1, history=[(1, 5), (9, 5)]),
        raw(kind="stale", uses=3, used=((HERE, "late", line),), count=0, bytes=0, age=0.0),
        raw(kind="stray", tick=None, count=0, bytes=0),
    )
    lines = str(shown).split("\n")
    assert lines[0] == (
        "3 escapes alive, 2.0 KiB, from 2 places; 1 keeps growing, by 100 B a tick."
    )
    assert lines[1].split() == ["kind", "alive", "bytes", "a", "tick", "where"]
    body = "\n".join(lines[2:])
    for words in (
        f"persist      2  2.0 KiB  +100 B  {HERE}:{line} in here",
        "    def recorded(lows",
        "tick 'mind', 30 ever, alive for 2 s, GROWS",
        "such as <arena.Str 'x'>",
        "pin          1      5 B          place unknown (turn on arena.trace())",
        "ticks without a name, 30 ever",
        "/srv/app/mind.py:12 in remember",
        "  from /srv/app/loop.py:99 in turn",
        f"used 3 times when stale, last at {HERE}:{line} in late",
    ):
        assert words.replace(str(Path.cwd()) + "/", "") in body
    assert lines[-1] == "(1 freed row not shown)"
    assert "stray" not in str(shown)


def test_freed_rows_are_printed_when_asked_for(taken) -> None:
    shown = taken(raw(), raw(kind="stray", count=0, bytes=0))
    assert "(1 freed row not shown)" in printed(shown)
    assert "stray" not in printed(shown)
    assert "stray" in printed(shown, freed=True)
    assert "not shown" not in printed(shown, freed=True)


def test_what_grew_before_it_was_freed_comes_right_after_what_grows(taken) -> None:
    rows = taken(raw(tick="large", bytes=10**6), raw(tick="grows", history=LEAK)).rows
    grew = escape(tick="grew", count=0, bytes=0, history=LEAK, growing=True, slope=10**6)
    shown = arena.EscapeMap((*rows, grew))
    assert [row.tick for row in shown] == ["grows", "grew", "large"]


def test_the_20_largest_places_are_printed_and_the_rest_is_summed_up(taken) -> None:
    flat = [(1, 10), (20, 10)]
    importing = (
        ("/srv/lib/big.py", "<module>", 3),
        ("<frozen importlib._bootstrap>", "_load", 9),
        ("<frozen importlib._bootstrap>", "_find_and_load", 7),
        ("/srv/app/loop.py", "turn", 8),
    )
    shown = taken(
        raw(tick="grows", history=LEAK, bytes=1),
        raw(tick="used", kind="stale", uses=1, count=0, bytes=0),
        *(raw(tick=f"n{n:02}", bytes=1024 * (100 - n), history=flat, last=n) for n in range(50)),
        raw(tick="import", site=importing, bytes=10**7, last=4),
        raw(tick="import too", site=importing[1:], bytes=10**6, last=5),
        raw(tick="gone", count=0, bytes=0),
    )
    for text in (str(shown), printed(shown)):
        for tick in ("grows", "used", *(f"n{n:02}" for n in range(20))):
            assert repr(tick) in text
        for tick in ("'n20'", "'import'", "'gone'"):
            assert tick not in text
        lines = text.rstrip().split("\n")
        assert lines[-4:] == [
            "+ 30 more places, 1.9 MiB, last changed in tick 49",
            "+ 2 places within imports, 10.5 MiB, last changed in tick 5, "
            "most at /srv/lib/big.py:3 in <module>",
            "(1 freed row not shown)",
            lines[0],
        ]
    whole = printed(shown, rows=None)
    assert "'n49'" in whole
    assert "more places" not in whole
    assert "frozen" not in whole
    assert whole.count("from an import") == 1
    assert whole.count("  an import") == 1
    assert "+ 49 more places" in printed(shown, rows=1)
    assert len(json.loads(shown.to_json())["rows"]) == 55
    assert "n49" in shown.to_html()


def test_the_headline_stands_once_where_the_map_is_short(taken) -> None:
    shown = taken(raw())
    assert str(shown).count("escapes alive") == 1
    assert printed(shown).count("escapes alive") == 1


def test_a_slope_is_shown_only_of_what_grows(taken) -> None:
    leap = [(1, 0), (2, 2000), (20, 2000)]
    assert taken(raw(history=leap))[0].slope > 0
    for shown in (str, printed, arena.EscapeMap.to_html):
        assert re.search(r"\+[0-9.]+ B", shown(taken(raw(history=leap)))) is None
        assert "+100 B" in shown(taken(raw(history=LEAK)))


def test_the_headline_says_what_of_objects_is_not_seen(taken) -> None:
    assert "512" not in str(taken(raw()))
    assert "over 512 bytes" in str(taken(raw(kind="object"))).split("\n")[0]


def test_an_empty_map_says_so(taken) -> None:
    shown = taken()
    assert str(shown) == "Nothing escapes."
    assert printed(shown) == "Nothing escapes.\n"
    assert json.loads(shown.to_json())["rows"] == []
    assert "Nothing escapes." in shown.to_html()
    assert str(shown.diff(shown)) == "Nothing changed."
    assert list(shown) == []


def test_the_table_is_plain_in_a_file_and_coloured_where_a_terminal_is_forced(
    taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = taken(raw(history=LEAK))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert "\x1b" not in printed(shown)
    assert max(map(len, printed(shown).splitlines())) <= 140
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, printed(shown).splitlines()[1:])) <= 70
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in printed(shown)


def test_print_goes_to_stdout_by_itself(taken, capsys: pytest.CaptureFixture[str]) -> None:
    taken(raw()).print()
    assert "mind.py:12 in remember" in capsys.readouterr().out


def test_without_rich_print_names_the_extra_in_one_line_and_all_else_works() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "import arena\n"
        "kept = arena.strdup_persist('x')\n"
        "shown = arena.escapes()\n"
        "str(shown), shown.to_html(), shown.to_json(), shown.diff(shown)\n"
        "try: shown.print()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "pip install 'tick-arena[cli]'" in done.stdout


def test_importing_arena_imports_nothing_of_what_shows_the_map() -> None:
    code = (
        "import sys, arena\n"
        "print(sorted({'rich', 'pytest', 'statistics', 'json', 'html', 'hashlib'}"
        " & set(sys.modules)), [name for name in sys.modules if 'arena._map' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[] []\n", "")


def test_json_has_every_field(taken, tmp_path: Path) -> None:
    shown = taken(raw(history=LEAK))
    text = shown.to_json(tmp_path / "map.json")
    assert (tmp_path / "map.json").read_text() == text
    told = json.loads(text)
    assert (told["arena"], told["changes"]) == (arena.__version__, False)
    (row,) = told["rows"]
    assert set(row) == {field.name for field in dataclasses.fields(arena.Escape)}
    assert row["site"][0] == {"file": "/srv/app/mind.py", "line": 12, "function": "remember"}
    assert row["history"] == [list(point) for point in LEAK]
    assert row["growing"] is True


class Page(HTMLParser):
    """What a browser makes of a page: its tags, its text, and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_the_page_has_rows_curves_and_the_source_around_each_site(taken, tmp_path: Path) -> None:
    program = tmp_path / "<app> & co.py"
    program.write_text("".join(f"line_{n} = '<b>{n}</b>'\n" for n in range(1, 21)))
    shown = taken(
        raw(site=((str(program), "<module>", 10),), history=LEAK),
        raw(kind="stray", count=0, bytes=0),
    )
    text = shown.to_html(tmp_path / "map.html")
    assert (tmp_path / "map.html").read_text(encoding="utf-8") == text
    page = Page(text)
    assert page.count("tr") == 3
    assert page.count("svg") == page.count("polyline") == 2
    assert page.count("script") == 1
    assert "line_10 = '<b>10</b>'" in page.text
    assert "line_7 =" in page.text
    assert "line_13 =" in page.text
    assert "line_6 =" not in page.text
    assert "line_14 =" not in page.text
    assert "<app> & co.py:10 in <module>" in page.text
    assert page.count("b") == 1  # the line itself, and none of the program's
    assert {attrs.get("class") for tag, attrs in page.tags if tag == "tr"} == {
        None,
        "grows",
        "freed",
    }


def test_the_page_loads_nothing_and_runs_no_script_but_its_own(taken) -> None:
    nasty = "</script><script>alert(1)</script><img src=http://x onerror=alert(1)>\"'"
    shown = taken(
        raw(tick=nasty, example=nasty, site=((nasty, nasty, 1),), used=((nasty, nasty, 1),))
    )
    text = shown.to_html()
    page = Page(text)
    assert page.count("script") == 1
    assert page.count("img") == 0
    for _, attrs in page.tags:
        assert not {"src", "href", "onerror", "onclick"} & attrs.keys()
    policy = next(attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline'; script-src 'sha256-" in policy
    assert nasty in page.text


def test_source_lines_are_those_of_the_file_as_it_is_now(taken, tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text("first = 1\n")
    shown = taken(raw(site=((str(program), "f", 1),)))
    assert "first = 1" in str(shown)
    program.write_text("second = 2222\n")
    assert "second = 2222" in str(shown)
    assert "first" not in str(shown)
    program.unlink()
    assert "second = 2222" in str(shown)  # the last that was known


def test_no_pipe_is_read_for_source_lines(taken, tmp_path: Path) -> None:
    import os

    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    shown = taken(raw(site=((str(pipe), "f", 1), ("<string>", "g", 1), ("", "h", 0))))
    assert f"{pipe}:1 in f" in str(shown)
    assert "<string>:1 in g" in shown.to_html().replace("&lt;", "<").replace("&gt;", ">")


odd = st.text(st.characters(), max_size=400) | st.sampled_from(
    ["\ud800", "a\nb\r\x1b[31mred\x00", "[red]x[/red]", "x" * 5000, "\u202e\u200f", "%s{}", ""]
)


@given(odd, odd, odd, odd)
def test_no_text_breaks_an_output(tick: str, example: str, file: str, function: str) -> None:
    frame = arena.Frame(file, 1, function)
    shown = arena.EscapeMap(
        (
            escape(tick=tick, example=example, site=(frame,), used=(frame,), uses=1, growing=True),
            escape(kind="stray", count=0, bytes=0, uses=0),
        )
    )
    for text in (str(shown), str(shown.diff(arena.EscapeMap(())))):
        assert "\x1b" not in text
        assert all(line.isprintable() for line in text.split("\n"))
        assert len(text) < 4000
        text.encode()
    for encoding in ("utf-8", "ascii", "cp1252"):
        assert "\x1b" not in printed(shown, encoding)
    assert json.loads(shown.to_json())["rows"][0]["example"] == example
    page = shown.to_html()
    page.encode()
    assert Page(page).count("tr") == 3


@pytest.mark.parametrize("path", ["map.json", "map.html"])
def test_a_file_that_cannot_be_written_is_an_os_error(taken, path: str, tmp_path: Path) -> None:
    shown = taken(raw())
    write = shown.to_json if path.endswith("json") else shown.to_html
    with pytest.raises(OSError, match="No such file"):
        write(tmp_path / "no" / path)


# ---- What changed -----------------------------------------------------------------------------


def test_a_difference_has_the_rows_that_changed_and_their_changes(taken) -> None:
    before = taken(raw(), raw(tick="same"), raw(tick="more", bytes=100, count=1, turn=10))
    after = taken(
        raw(count=1, bytes=1024),
        raw(tick="same", turn=90, age=99.0),
        raw(tick="more", bytes=600, count=1, count_ever=31, turn=20, history=LEAK),
        raw(tick="new", turn=8, count=4, bytes=80, count_ever=4, bytes_ever=80, history=[(5, 80)]),
    )
    changes = after.diff(before)
    assert changes.changes
    rows = {row.tick: row for row in changes}
    assert set(rows) == {"mind", "more", "new"}
    more = rows["more"]
    assert (more.count, more.bytes, more.count_ever, more.turn) == (0, 500, 1, 10)
    assert more.slope == 50
    assert more.history == ((10, 100), *LEAK[10:])
    assert (rows["mind"].count, rows["mind"].bytes) == (-1, -1024)
    assert not rows["mind"].growing
    new = rows["new"]
    assert (new.count, new.bytes, new.count_ever, new.turn) == (4, 80, 4, 4)
    assert new.slope == 20
    assert [row.tick for row in changes.live] == ["more", "new"]
    assert "+500 B" in str(changes)
    assert "-1" in str(changes)


def test_a_row_that_is_gone_altogether_is_told_as_freed(taken) -> None:
    before = taken(raw())
    (row,) = taken().diff(before)
    assert (row.count, row.bytes, row.count_ever) == (-2, -2048, 0)


def test_growth_in_a_difference_is_that_since_the_earlier_map(taken) -> None:
    filled = [(turn, min(turn, 50) * 100) for turn in range(1, 51)]
    before = taken(raw(turn=50, bytes=5000, history=[*filled, (50, 5000)]))
    assert before.growing
    after = taken(raw(turn=52, bytes=5001, history=[*filled, (51, 5000), (52, 5001)]))
    assert after.growing
    assert not after.diff(before).growing
    rest = [*filled, *((turn, turn * 100) for turn in range(51, 63)), (63, 6300)]
    assert taken(raw(turn=63, bytes=6300, history=rest)).diff(before).growing


def test_a_difference_to_something_else_is_a_type_error(taken) -> None:
    with pytest.raises(TypeError, match="EscapeMap, not list"):
        taken().diff([])


# ---- The real thing ---------------------------------------------------------------------------


def of(tick: str, **wanted: object) -> list[arena.Escape]:
    """The rows of the ticks of this name that have these fields."""
    gc.collect()
    return [
        row
        for row in arena.escapes()
        if row.tick == tick and all(getattr(row, name) == value for name, value in wanted.items())
    ]


def line_of(mark: str) -> int:
    """The line of this file that ends in this comment."""
    lines = Path(HERE).read_text().split("\n")
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {mark}"))


def test_a_leak_of_persisted_memory_is_found_at_its_line_and_grows() -> None:
    kept = []
    with arena.trace(2):
        for _ in range(40):
            with arena.tick("leaks") as t:
                kept.append(t.strbuf("x" * 100).persist())  # persisted
    (row,) = of("leaks", kind="persist")
    assert row.site[0] == arena.Frame(
        HERE, line_of("persisted"), "test_a_leak_of_persisted_memory_is_found_at_its_line_and_grows"
    )
    assert len(row.site) == 2
    assert (row.count, row.count_ever) == (40, 40)
    assert row.bytes >= 4000
    assert row.growing
    assert row.slope == pytest.approx(row.bytes / 40, rel=0.1)
    assert "kept.append" in str(arena.escapes())
    kept.clear()
    (row,) = of("leaks", kind="persist")
    assert (row.freed, row.bytes, row.growing, row.age) == (True, 0, False, 0.0)


def test_a_cache_that_is_full_does_not_grow() -> None:
    cache: dict[int, arena.Str] = {}
    with arena.trace():
        for n in range(100):
            with arena.tick("cache"):
                cache[n % 8] = arena.strdup_persist("y" * 500)
    (row,) = of("cache", kind="persist")
    assert (row.count, row.growing) == (8, False)
    cache.clear()


@pytest.mark.ends
def test_pins_stale_handles_and_their_uses_have_rows() -> None:
    with arena.trace():
        with arena.tick("ends") as t:
            view = memoryview(t.alloc(100))  # pinned
            late = t.strdup("late")  # stale
        with pytest.raises(arena.StaleError):
            bytes(late)  # used
    (pin,) = of("ends", kind="pin")
    assert (pin.site[0].line, pin.count) == (line_of("pinned"), 1)
    assert pin.bytes >= 100
    (stale,) = of("ends", kind="stale")
    assert (stale.site[0].line, stale.used[0].line) == (line_of("stale"), line_of("used"))
    assert (stale.count, stale.bytes, stale.uses) == (1, 4, 1)
    view.release()
    del late, view
    assert all(row.freed for row in of("ends"))
    assert "used 1 time when stale" in str(arena.escapes())


def test_the_map_may_be_taken_in_one_thread_while_others_allocate() -> None:
    stop = threading.Event()

    def work() -> None:
        kept: list[Any] = []
        while not stop.is_set():
            with arena.tick("busy"):
                kept.append(arena.strdup_persist("x"))
                del kept[:-50]

    threads = [threading.Thread(target=work) for _ in range(2)]
    with arena.trace():
        for thread in threads:
            thread.start()
        maps = [arena.escapes() for _ in range(30)]
        stop.set()
        for thread in threads:
            thread.join()
    for before, after in pairwise(maps):
        str(after.diff(before))
    assert all(row.freed for row in of("busy"))

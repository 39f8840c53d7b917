"""StrBuf as a drop-in sink: what io.StringIO, io.BytesIO and bytearray are commonly used for."""

from __future__ import annotations

import csv
import gc
import hashlib
import io
import json
import logging
import re
import socket
import string
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

import arena


@pytest.fixture(params=["scratch", "persisted"])
def buf(request: pytest.FixtureRequest) -> Iterator[arena.StrBuf]:
    """A StrBuf of either kind: both must behave alike."""
    if request.param == "persisted":
        made = arena.strbuf_persist()
        yield made
        made.free()
    else:
        t = arena.begin("sink")
        yield t.strbuf()
        t.end()


def test_it_is_the_target_of_print(buf: arena.StrBuf) -> None:
    print("a", 1, None, sep="-", end="!\n", file=buf, flush=True)
    assert str(buf) == "a-1-None!\n"


def test_it_is_the_target_of_json_dump(buf: arena.StrBuf) -> None:
    value = {"text": "naïve ✓", "numbers": [1, 2.5, None, True], "nested": {"a": []}}
    json.dump(value, buf, ensure_ascii=False)
    assert json.loads(str(buf)) == value
    assert orjson.loads(memoryview(buf)) == value


def test_it_is_the_target_of_csv_writers(buf: arena.StrBuf) -> None:
    rows = [["a", "b,c", 'd"e'], [1, None, "ü"]]
    expected = io.StringIO()
    for target in (buf, expected):
        writer = csv.writer(target)
        for row in rows:
            writer.writerow(row)
    assert buf.getvalue() == expected.getvalue()


def test_it_is_the_target_of_template_loops(buf: arena.StrBuf) -> None:
    template = string.Template("$name has $n\n")
    for i in range(3):
        buf.write(template.substitute(name=f"row {i}", n=i * i))
    assert str(buf) == "row 0 has 0\nrow 1 has 1\nrow 2 has 4\n"


def test_it_is_the_stream_of_a_logging_handler(buf: arena.StrBuf) -> None:
    logger = logging.Logger("test")
    handler = logging.StreamHandler(buf)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.warning("über %d", 5)
    handler.close()
    assert str(buf) == "WARNING über 5\n"


def test_a_socket_sends_it(buf: arena.StrBuf) -> None:
    buf.append("x" * 10_000)
    near, far = socket.socketpair()
    with near, far:
        near.sendall(buf)
        near.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: far.recv(4096), b""))
    assert received == b"x" * 10_000


def test_files_hashes_codecs_and_arrays_read_it(buf: arena.StrBuf, tmp_path: Path) -> None:
    data = bytes(range(256)) * 8
    buf.append(data)
    with (tmp_path / "out").open("wb") as file:
        file.write(buf)
    assert (tmp_path / "out").read_bytes() == data
    assert hashlib.sha256(buf).digest() == hashlib.sha256(data).digest()
    assert zlib.decompress(zlib.compress(buf)) == data
    assert struct.unpack_from("<I", buf, 4) == struct.unpack_from("<I", data, 4)
    assert re.search(rb"\x10\x11(.)", buf).group(1) == b"\x12"  # type: ignore[union-attr]
    digest = hashlib.sha256()
    digest.update(buf)
    assert digest.digest() == hashlib.sha256(data).digest()
    array = np.frombuffer(buf, dtype=np.uint8)
    assert array.tobytes() == data
    array[0] = 7  # a view is writable, as of a bytearray
    assert buf[0] == 7
    del array
    gc.collect()


def test_json_loads_takes_its_text(buf: arena.StrBuf) -> None:
    buf.append('{"a": 1}')
    with pytest.raises(TypeError):
        json.loads(buf)  # type: ignore[arg-type]
    assert json.loads(str(buf)) == {"a": 1}


def test_every_way_of_adding(buf: arena.StrBuf) -> None:
    buf.append("a")
    buf += "b"
    buf += b"c"
    assert buf.write("dé") == 2
    assert buf.write("é".encode()) == 2
    buf.extend(["f", b"g", bytearray(b"h"), memoryview(b"i")])
    buf.extend(piece for piece in "jk")
    buf.extend("lm")
    buf.extend(b"no")
    buf.writelines(("p", "q"))
    buf.join(", ", ["r", b"s"])
    buf.join(b"", iter("tu"))
    buf.join("never used", [])
    assert str(buf) == "abcdéé" + "fghijklmnopqr, stu"


def test_it_may_be_added_to_itself(buf: arena.StrBuf) -> None:
    buf.append("0123456789" * 10)
    for _ in range(10):  # through several moves
        buf.append(buf)
    buf += buf
    buf.extend([buf, "!"])
    assert bytes(buf) == b"0123456789" * 10 * 4096 + b"!"
    buf.clear()
    buf.append("ab")
    buf.join(buf, ["x", "y", buf])
    assert str(buf) == "abxabyab" + "abxabyab"


def test_reading_position_and_state(buf: arena.StrBuf) -> None:
    assert (len(buf), buf.tell(), str(buf), bytes(buf), bool(buf)) == (0, 0, "", b"", False)
    buf.append("añb")
    assert (len(buf), buf.tell(), buf.nbytes) == (4, 4, 4)
    assert buf == "añb"
    assert buf == "añb".encode()
    assert buf == bytearray("añb".encode())
    assert buf != "añ"
    assert buf != 4
    assert buf != "a\ud800b"
    assert "ñ" in buf
    assert b"a" in buf
    assert "z" not in buf
    assert ord("b") in buf
    assert (buf[0], buf[-1], buf[1:3], buf[::2]) == (97, 98, "ñ".encode(), b"a\xb1")
    assert buf.getvalue() == "añb"
    with buf.getbuffer() as view:
        assert view == "añb".encode()
    assert (buf.writable(), buf.readable(), buf.seekable(), buf.isatty()) == (True,) + (False,) * 3
    assert (buf.closed, buf.flush()) == (False, None)
    assert f"{buf}" == "añb"
    with pytest.raises(TypeError, match="unhashable"):
        hash(buf)
    assert list(buf) == list("añb".encode())


def test_truncate_and_clear(buf: arena.StrBuf) -> None:
    buf.append("0123456789")
    assert buf.truncate() == 10
    assert buf.truncate(20) == 20  # as in the io classes, nothing is added
    assert len(buf) == 10
    assert buf.truncate(3) == 3
    assert str(buf) == "012"
    buf.clear()
    assert str(buf) == ""
    buf.append("again")
    assert str(buf) == "again"
    for wrong in (-1, 2**63):
        with pytest.raises(ValueError, match="size to truncate to"):
            buf.truncate(wrong)
    with pytest.raises(TypeError):
        buf.truncate("3")  # type: ignore[arg-type]


def test_bytes_may_be_set_in_place(buf: arena.StrBuf) -> None:
    buf.append("0123456789")
    buf[0] = ord("x")
    buf[-1] = 0
    buf[1:4] = b"abc"
    buf[4:8:2] = "-+"
    assert bytes(buf) == b"xabc-5+78\0"
    buf[::-1] = buf
    assert bytes(buf) == b"xabc-5+78\0"[::-1]
    for key, value in [(0, 256), (0, -1), (slice(0, 2), b"x")]:
        with pytest.raises(ValueError, match="byte"):
            buf[key] = value
    with pytest.raises(IndexError):
        buf[10] = 1
    with pytest.raises(IndexError):
        buf[-11]
    with pytest.raises(TypeError, match="cannot be deleted"):
        del buf[0]  # type: ignore[attr-defined]


def test_an_embedded_nul_is_data(buf: arena.StrBuf) -> None:
    buf.append("a\0b")
    buf.append(b"\0")
    assert (len(buf), str(buf), bytes(buf)) == (4, "a\0b\0", b"a\0b\0")


@pytest.mark.parametrize("text", ["\ud800", "long enough " * 500 + "\udfff", "a\udc80b"])
def test_a_lone_surrogate_is_an_encode_error_that_leaves_the_buffer(
    buf: arena.StrBuf, text: str
) -> None:
    buf.append("before")
    ways: list[Callable[[], object]] = [
        lambda: buf.append(text),
        lambda: buf.write(text),
        lambda: buf.extend(["fine", text]),
        lambda: buf.extend(iter(["fine", text])),
        lambda: buf.writelines(["fine", text, "more"]),
        lambda: buf.join(",", ["fine", text]),
        lambda: buf.join(text, ["fine", "more"]),
        lambda: buf.__iadd__(text),
    ]
    for way in ways:
        with pytest.raises(UnicodeEncodeError):
            way()
        assert buf == "before"


@pytest.mark.parametrize("piece", [3, None, 2.5, ["a"], object()])
def test_a_wrong_piece_is_a_type_error_that_leaves_the_buffer(
    buf: arena.StrBuf, piece: object
) -> None:
    buf.append("before")
    for way in (
        buf.append,
        buf.write,
        buf.__iadd__,
        lambda p: buf.extend(["fine", p]),
        lambda p: buf.join("-", ["fine", "fine", p]),
        lambda p: buf.join(p, ["fine", "fine"]),
    ):
        with pytest.raises(TypeError):
            way(piece)  # type: ignore[operator]
        assert buf == "before"
    with pytest.raises(TypeError, match=r"for one byte: bytes\(\[n\]\)"):
        buf.append(3)  # type: ignore[arg-type]


def test_an_iterable_that_fails_half_way_leaves_the_buffer(buf: arena.StrBuf) -> None:
    def pieces() -> Iterator[str]:
        yield "one"
        raise LookupError

    buf.append("before")
    for way in (buf.extend, buf.writelines, lambda p: buf.join(", ", p)):
        with pytest.raises(LookupError):
            way(pieces())
        assert buf == "before"


def test_what_the_iterable_itself_appends_is_not_taken_back_when_it_fails(
    buf: arena.StrBuf,
) -> None:
    def pieces() -> Iterator[str]:
        yield "a"
        buf.append("KEEP")
        yield "b"
        raise LookupError

    for way in (buf.extend, lambda p: buf.join("-", p)):
        with pytest.raises(LookupError):
            way(pieces())
    assert "KEEP" in buf


@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 511, 513, 1000])
@pytest.mark.parametrize("odd", ["", "é", b"\xff", "x" * 3000, "ü" * 3000])
@pytest.mark.parametrize("make", [list, tuple, iter])
def test_many_pieces_come_out_in_order_however_they_are_read(
    buf: arena.StrBuf, count: int, odd: str | bytes, make: Callable[[list[object]], object]
) -> None:
    pieces: list[str | bytes] = [f"{i} " for i in range(count)]
    if count > 1:
        pieces[count * 3 // 4] = odd
    encoded = [p.encode() if isinstance(p, str) else p for p in pieces]
    buf.append("start ")
    buf.extend(make(pieces))  # type: ignore[arg-type]
    for separator in ("", ", ", b"-", "→"):
        buf.join(separator, make(pieces))  # type: ignore[arg-type]
    expected = b"start " + b"".join(encoded)
    for mark in (b"", b", ", b"-", "→".encode()):
        expected += mark.join(encoded)
    assert bytes(buf) == expected


@pytest.mark.parametrize("wrong", ["\ud800", 3])
def test_a_wrong_piece_after_many_good_ones_leaves_the_buffer(
    buf: arena.StrBuf, wrong: object
) -> None:
    buf.append("before")
    for count in (0, 1, 256, 300, 512, 1000):
        pieces = [*(["piece"] * count), wrong, "more"]
        for way in (buf.extend, lambda p: buf.join(", ", p), lambda p: buf.join(b",", p)):
            with pytest.raises((UnicodeEncodeError, TypeError)):
                way(pieces)  # type: ignore[operator]
            assert buf == "before"


def test_a_limit_that_many_pieces_would_pass_leaves_the_buffer() -> None:
    with arena.tick(limit=1000) as t:
        buf = t.strbuf("before")
        for way in (buf.extend, lambda p: buf.join(", ", p)):
            with pytest.raises(arena.LimitError):
                way(["0123456789"] * 700)  # type: ignore[operator]
            assert (buf, t.used) == ("before", 6)
        buf.join("", ["7"] * 994)
        assert t.used == 1000


def test_it_refuses_to_change_size_while_a_view_lives(buf: arena.StrBuf) -> None:
    buf.append("0123456789")
    view = memoryview(buf)
    part = view[2:5]
    view.release()
    for change in (
        lambda: buf.append("x"),
        lambda: buf.write(b"x"),
        lambda: buf.extend(["x"]),
        lambda: buf.join(",", ["x"]),
        lambda: buf.__iadd__("x"),
        buf.clear,
        lambda: buf.truncate(1),
    ):
        with pytest.raises(BufferError, match="1 live view"):
            change()
        assert buf == "0123456789"
    buf[2] = ord("X")
    assert bytes(part) == b"X34"
    part.release()
    buf.append("x")
    assert buf == "01X3456789x"


def test_a_non_contiguous_view_is_appended_in_order(buf: arena.StrBuf) -> None:
    buf.append(memoryview(b"0123456789")[::-3])
    buf.append(np.arange(6, dtype=np.uint8).reshape(2, 3).T)
    assert bytes(buf) == b"9630" + bytes([0, 3, 1, 4, 2, 5])


def test_long_text_is_appended_without_a_second_copy_inside_the_str(buf: arena.StrBuf) -> None:
    text = "ü" * 100_000
    before = sys.getsizeof(text)
    buf.append(text)
    assert str(buf) == text
    assert sys.getsizeof(text) == before  # CPython would keep the UTF-8 as long as the str


def test_views_of_an_empty_buffer(buf: arena.StrBuf) -> None:
    view = memoryview(buf)
    assert view.nbytes == 0
    with pytest.raises(BufferError):
        buf.append("x")
    view.release()
    buf.append("x")
    assert buf == "x"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="__buffer__ in Python is new in 3.12")
def test_a_buffer_export_that_ends_the_tick_is_a_stale_error_and_no_crash() -> None:
    class Evil:
        def __init__(self, act: Callable[[], object]) -> None:
            self.act = act

        def __buffer__(self, flags: int) -> memoryview:
            self.act()
            return memoryview(b"payload")

    t = arena.begin("evil")
    b = t.strbuf("content")
    block = t.alloc(4)
    b.append(Evil(lambda: b.append("!")))
    assert b == "content!payload"
    held = []
    with pytest.raises(BufferError):
        b.append(Evil(lambda: held.append(memoryview(b))))
    held.clear()
    with pytest.raises(arena.StaleError):
        block[0:4] = Evil(t.end)
    with pytest.raises(arena.StaleError):
        b.append(b"x")


class Ends:
    """Bytes whose view ends the tick."""

    def __init__(self, tick: arena.Tick) -> None:
        self.tick = tick

    def __buffer__(self, flags: int) -> memoryview:
        self.tick.end()
        return memoryview(b"cont")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="__buffer__ in Python is new in 3.12")
@pytest.mark.parametrize(
    "use",
    [
        lambda t, buf, evil: buf == evil,
        lambda t, buf, evil: buf != evil,
        lambda t, buf, evil: evil in buf,
        lambda t, buf, evil: buf.append(evil),
        lambda t, buf, evil: buf.extend([evil]),
        lambda t, buf, evil: buf.join(evil, ["a", "b"]),
        lambda t, buf, evil: buf.join(",", ["a", evil]),
        lambda t, buf, evil: buf.__setitem__(slice(0, 4), evil),
        lambda t, buf, evil: buf.__setitem__(slice(0, 7, 2), evil),
        lambda t, buf, evil: t.strdup(evil),
        lambda t, buf, evil: t.strbuf(evil),
        lambda t, buf, evil: arena.strdup(evil),
    ],
)
def test_an_operand_whose_view_ends_the_tick_is_an_error_and_no_crash(use: Any) -> None:
    t = arena.begin("evil")
    buf = t.strbuf("content")
    with pytest.raises((arena.StaleError, arena.TickError)):
        use(t, buf, Ends(t))
    assert (t.open, buf.stale, arena.stats().scratch) == (False, True, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda buf: buf.join(","),
        lambda buf: buf.join(",", [], []),
        lambda buf: buf.join(",", "one piece"),
        lambda buf: buf.truncate(1, 2),
        lambda buf: buf.truncate("1"),
    ],
)
def test_a_wrong_number_or_kind_of_arguments_is_a_type_error(buf: arena.StrBuf, call: Any) -> None:
    buf.append("as it was")
    with pytest.raises(TypeError):
        call(buf)
    assert buf == "as it was"


@pytest.mark.parametrize("value", [256, -1, 2**80, -(2**80)])
def test_a_byte_out_of_range_is_a_value_error(buf: arena.StrBuf, value: int) -> None:
    buf.append("as it was")
    with pytest.raises(ValueError, match="from 0 to 255"):
        buf[0] = value
    if abs(value) < 2**60:
        with pytest.raises(ValueError, match="from 0 to 255"):
            value in buf  # noqa: B015
    assert buf == "as it was"

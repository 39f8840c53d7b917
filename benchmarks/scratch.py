"""Building text and handing it over as UTF-8 bytes, and small copies, in a tick.

Each contender hands its result to `len`, arena as a memoryview inside the tick, which it begins
and ends itself. Everybody has the same input objects, and bound methods where there are any.
Text goes in as "append", piece by piece, or as "extend", all pieces in one call.
- limit of an append case: the same loop calling a native bound method that takes one argument
  and does nothing (METH_O, noop.c), then one copy of the whole result into memory that is there.
- limit of an extend case: a loop in C that copies each piece, encoded beforehand, into memory that
  is there.
- limit of the last two cases: a list made by calls that do nothing, then one copy or one memset.
- "fresh" text has never been encoded before: CPython keeps the UTF-8 of a str that is not ASCII
  inside it once a C function asked for it, so the same str again costs less, for all contenders.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import arena
from benchmarks import _noop
from benchmarks._report import BEST, Options, Report, Target
from benchmarks._timing import FULL, QUICK, Contender, Kind, race

Piece: TypeAlias = str | bytes
Sink: TypeAlias = Callable[[Any], object]
Job: TypeAlias = Callable[[Sequence[Any], Sink], object]

JOIN_ENCODE = '"".join(l).encode()'


def arena_append(pieces: Sequence[Piece], sink: Sink) -> None:
    with arena.tick() as tick:
        buf = tick.strbuf()
        append = buf.append
        for piece in pieces:
            append(piece)
        sink(memoryview(buf))


def arena_iadd(pieces: Sequence[Piece], sink: Sink) -> None:
    with arena.tick() as tick:
        buf = tick.strbuf()
        for piece in pieces:
            buf += piece
        sink(memoryview(buf))


def arena_write(pieces: Sequence[Piece], sink: Sink) -> None:
    with arena.tick() as tick:
        buf = tick.strbuf()
        write = buf.write
        for piece in pieces:
            write(piece)
        sink(memoryview(buf))


def arena_extend(pieces: Sequence[Piece], sink: Sink) -> None:
    with arena.tick() as tick:
        buf = tick.strbuf()
        buf.extend(pieces)
        sink(memoryview(buf))


def arena_join(pieces: Sequence[Piece], sink: Sink) -> None:
    with arena.tick() as tick:
        buf = tick.strbuf()
        buf.join("", pieces)
        sink(memoryview(buf))


def stringio(pieces: Sequence[str], sink: Sink) -> None:
    out = io.StringIO()
    write = out.write
    for piece in pieces:
        write(piece)
    sink(out.getvalue().encode())


def list_join(pieces: Sequence[str], sink: Sink) -> None:
    parts: list[str] = []
    append = parts.append
    for piece in pieces:
        append(piece)
    sink("".join(parts).encode())


def bytearray_iadd(pieces: Sequence[str], sink: Sink) -> None:
    out = bytearray()
    for piece in pieces:
        out += piece.encode()
    sink(out)


def bytesio(pieces: Sequence[str], sink: Sink) -> None:
    out = io.BytesIO()
    write = out.write
    for piece in pieces:
        write(piece.encode())
    sink(out.getbuffer())


def stringio_mixed(pieces: Sequence[Piece], sink: Sink) -> None:
    out = io.StringIO()
    write = out.write
    for piece in pieces:
        write(piece if isinstance(piece, str) else piece.decode())
    sink(out.getvalue().encode())


def list_join_mixed(pieces: Sequence[Piece], sink: Sink) -> None:
    parts: list[bytes] = []
    append = parts.append
    for piece in pieces:
        append(piece.encode() if isinstance(piece, str) else piece)
    sink(b"".join(parts))


def bytearray_mixed(pieces: Sequence[Piece], sink: Sink) -> None:
    out = bytearray()
    for piece in pieces:
        out += piece.encode() if isinstance(piece, str) else piece
    sink(out)


def bytesio_mixed(pieces: Sequence[Piece], sink: Sink) -> None:
    out = io.BytesIO()
    write = out.write
    for piece in pieces:
        write(piece.encode() if isinstance(piece, str) else piece)
    sink(out.getbuffer())


def join_encode(pieces: Sequence[str], sink: Sink) -> None:
    sink("".join(pieces).encode())


def stringio_writelines(pieces: Sequence[str], sink: Sink) -> None:
    out = io.StringIO()
    out.writelines(pieces)
    sink(out.getvalue().encode())


def encode_join(pieces: Sequence[str], sink: Sink) -> None:
    sink(b"".join([piece.encode() for piece in pieces]))


def bytesio_writelines(pieces: Sequence[str], sink: Sink) -> None:
    out = io.BytesIO()
    out.writelines([piece.encode() for piece in pieces])
    sink(out.getbuffer())


def encode_join_mixed(pieces: Sequence[Piece], sink: Sink) -> None:
    sink(b"".join([piece.encode() if isinstance(piece, str) else piece for piece in pieces]))


def bytesio_writelines_mixed(pieces: Sequence[Piece], sink: Sink) -> None:
    out = io.BytesIO()
    out.writelines([piece.encode() if isinstance(piece, str) else piece for piece in pieces])
    sink(out.getbuffer())


def strdup_each(pieces: Sequence[str], sink: Sink) -> None:
    with arena.tick() as tick:
        strdup = tick.strdup
        sink([strdup(piece) for piece in pieces])


def encode_each(pieces: Sequence[str], sink: Sink) -> None:
    sink([piece.encode() for piece in pieces])


def bytes_each(pieces: Sequence[str], sink: Sink) -> None:
    sink([bytes(piece, "utf-8") for piece in pieces])


def bytearray_each(pieces: Sequence[str], sink: Sink) -> None:
    sink([bytearray(piece, "utf-8") for piece in pieces])


def alloc_each(sizes: Sequence[int], sink: Sink) -> None:
    with arena.tick() as tick:
        alloc = tick.alloc
        sink([alloc(size) for size in sizes])


def bytearray_of_each(sizes: Sequence[int], sink: Sink) -> None:
    sink([bytearray(size) for size in sizes])


APPEND: dict[str, Job] = {
    "arena append": arena_append,
    "arena +=": arena_iadd,
    "arena write": arena_write,
}
APPEND_PEERS: dict[str, Job] = {
    "StringIO + encode": stringio,
    "list + join + encode": list_join,
    "bytearray += encoded": bytearray_iadd,
    "BytesIO.write encoded": bytesio,
}
APPEND_PEERS_MIXED: dict[str, Job] = {
    "StringIO of decoded + encode": stringio_mixed,
    "list of encoded + join": list_join_mixed,
    "bytearray += encoded": bytearray_mixed,
    "BytesIO.write encoded": bytesio_mixed,
}
EXTEND: dict[str, Job] = {"arena extend": arena_extend, "arena join": arena_join}
EXTEND_PEERS: dict[str, Job] = {
    JOIN_ENCODE: join_encode,
    "StringIO.writelines + encode": stringio_writelines,
    "join of encoded": encode_join,
    "BytesIO.writelines encoded": bytesio_writelines,
}
EXTEND_PEERS_MIXED: dict[str, Job] = {
    "join of encoded": encode_join_mixed,
    "BytesIO.writelines encoded": bytesio_writelines_mixed,
}
STRDUP: dict[str, Job] = {"arena strdup": strdup_each}
STRDUP_PEERS: dict[str, Job] = {
    "str.encode": encode_each,
    "bytes(str, 'utf-8')": bytes_each,
    "bytearray(str, 'utf-8')": bytearray_each,
}
ALLOC: dict[str, Job] = {"arena alloc": alloc_each}
ALLOC_PEERS: dict[str, Job] = {"bytearray(n)": bytearray_of_each}


def texts(count: int, low: int, high: int, letters: str) -> list[str]:
    """Return ``count`` pieces of about low to high bytes in UTF-8, always the same ones."""
    rng = random.Random(f"{count} {low} {high}")
    width = len(letters.encode()) / len(letters)
    sizes = [round(rng.randint(low, high) / width) for _ in range(count)]
    return ["".join(rng.choices(letters, k=size)) for size in sizes]


def encoded(pieces: Sequence[Piece]) -> list[bytes]:
    """Return the pieces as UTF-8, made without leaving an encoded copy in any str."""
    return [piece.encode() if isinstance(piece, str) else piece for piece in pieces]


def loop_and_copy(whole: bytes) -> Job:
    """Return the limit of a piece by piece case."""
    target = memoryview(bytearray(len(whole)))

    def limit(pieces: Sequence[object], sink: Sink) -> None:
        take = _noop.load().make().take
        for piece in pieces:
            take(piece)
        target[:] = whole
        sink(target)

    return limit


def gather(ready: list[bytes], size: int) -> Job:
    """Return the limit of an all at once case."""
    target = memoryview(bytearray(size))

    def limit(pieces: Sequence[object], sink: Sink) -> None:
        _noop.load().gather(ready, target)
        sink(target)

    return limit


def list_and_copy(whole: bytes) -> Job:
    """Return the limit of a case that makes a list with one copy for each piece."""
    target = memoryview(bytearray(len(whole)))

    def limit(pieces: Sequence[object], sink: Sink) -> None:
        take = _noop.load().make().take
        made = [take(piece) for piece in pieces]
        target[:] = whole
        sink([target, *made[1:]])

    return limit


def list_and_clear(size: int) -> Job:
    """Return the limit of a case that makes a list with one zeroed block for each size."""
    target = bytearray(size)

    def limit(sizes: Sequence[object], sink: Sink) -> None:
        take = _noop.load().make().take
        made = [take(one) for one in sizes]
        _noop.load().clear(target)
        sink([target, *made[1:]])

    return limit


def result_of(job: Job, pieces: Sequence[Any]) -> bytes:
    """Return what a contender makes of the pieces, as bytes."""
    made: list[bytes] = []

    def keep(result: Any) -> None:
        if isinstance(result, list):  # of handles; of no-ops, which are None
            made.extend(bytes(one) for one in result if one is not None)
        else:
            made.append(bytes(result))

    job(pieces, keep)
    return b"".join(made)


def contend(
    jobs: dict[Kind, dict[str, Job]], pieces: Sequence[Any], whole: bytes, fresh: bool = False
) -> list[Contender]:
    """Check that each job makes ``whole`` of the pieces, and return them all as contenders."""
    contenders = []
    ready = encoded(pieces) if fresh else []
    for kind, group in jobs.items():
        for name, job in group.items():
            if result_of(job, pieces) != whole:
                raise AssertionError(f"{name} does not make what the others make")
            names: dict[str, Any] = {"job": job, "pieces": pieces, "sink": len, "ready": ready}
            if fresh:
                setup = "pop = [[p.decode() for p in ready] for _ in range(number)].pop"
                contenders.append(Contender(name, kind, "job(pop(), sink)", names, setup))
            else:
                contenders.append(Contender(name, kind, "job(pieces, sink)", names))
    return contenders


def run(options: Options, report: Report) -> None:
    """Time all cases."""
    effort = QUICK if options.quick else FULL

    def case(
        title: str,
        mine: dict[str, Job],
        peers: dict[str, Job],
        limit: tuple[str, Job],
        pieces: Sequence[Any],
        whole: bytes,
        targets: Sequence[Target] = (),
        fresh: bool = False,
    ) -> None:
        jobs = {Kind.ARENA: mine, Kind.LIMIT: dict([limit]), Kind.PEER: peers}
        report.race(title, "us", race(contend(jobs, pieces, whole, fresh), effort), targets)

    short = texts(1000, 8, 60, "abcdefghij klmnopq rstuvwxyz, 0123456789")
    mixed = [piece.encode() if index % 2 else piece for index, piece in enumerate(short)]
    long = texts(50, 4000, 4200, "abcdefghij klmnopq rstuvwxyz, 0123456789")
    foreign = texts(1000, 8, 60, "aeiou äöüß éèñ 漢字かな \N{SNOWMAN}\N{GRINNING FACE}")
    no_slower = [Target("arena append", BEST)]
    as_join = [Target("arena extend", JOIN_ENCODE, ratio=1.5)]

    texts_of: list[tuple[str, Sequence[Piece], bool]] = [
        ("1000 pieces", short, False),
        ("50 long pieces", long, False),
        ("1000 non-ASCII pieces, fresh", foreign, True),
        ("1000 non-ASCII pieces, same again", foreign, False),
        ("1000 mixed str/bytes", mixed, False),
    ]
    for title, pieces, fresh in texts_of:
        ready = encoded(pieces)
        whole = b"".join(ready)
        is_text = pieces is not mixed
        case(
            f"{title}, append",
            APPEND,
            APPEND_PEERS if is_text else APPEND_PEERS_MIXED,
            ("no-op calls + copy", loop_and_copy(whole)),
            pieces,
            whole,
            no_slower,
            fresh,
        )
        case(
            f"{title}, extend",
            EXTEND,
            EXTEND_PEERS if is_text else EXTEND_PEERS_MIXED,
            ("bare copies of ready bytes", gather(ready, len(whole))),
            pieces,
            whole,
            as_join if is_text else (),
            fresh,
        )
    whole = b"".join(encoded(short))
    calls = ("no-op calls + copy", list_and_copy(whole))
    case("1000 pieces, strdup one by one", STRDUP, STRDUP_PEERS, calls, short, whole)
    sizes = [4096] * 100
    total = sum(sizes)
    calls = ("no-op calls + memset", list_and_clear(total))
    case("100 x alloc(4096)", ALLOC, ALLOC_PEERS, calls, sizes, bytes(total))

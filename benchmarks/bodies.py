"""Resident memory of a server while a large body comes in, in fragments, read from outside.

Real servers (uvicorn and aiohttp) in processes of their own, a client that sends chunks of 64 KiB
on loopback, with no Content-Length. "whole": 256 of them, 16 MiB, become one body. "refused": 1,024
of them, 64 MiB, against a cap of 16 MiB. Beside arena: ``body += piece`` with the cap looked at for
each piece, and what the framework has: Starlette's ``request.body()``, which knows no cap, so that
its result is looked at, and aiohttp's ``request.read()`` under ``client_max_size``. The peak is the
system's own (VmHWM, set back before each body), so none is missed; base is what was resident then,
after a small body. "after" is what is left over it once another small body was answered.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import threading

from benchmarks import UnavailableError
from benchmarks._child import Child
from benchmarks._report import Options, Report

FRAGMENT = 64 << 10
CAP = 16 << 20
WHOLE, REFUSED = 256, 1024
MOST_REFUSED_MB, MOST_WHOLE = 20, 1.25
CONTENDERS = {
    "arena.asgi": "asgi-arena",
    "body += piece, ASGI": "asgi-bytes",
    "starlette request.body()": "asgi-body",
    "arena.aiohttp": "aiohttp-arena",
    "body += piece, aiohttp": "aiohttp-bytes",
    "aiohttp request.read()": "aiohttp-read",
}


def send(port: int, fragments: int) -> int:
    """Post a body of so many fragments, and return the status of the answer."""
    chunk = b"%x\r\n%s\r\n" % (FRAGMENT, b"x" * FRAGMENT)
    with socket.create_connection(("127.0.0.1", port)) as to:

        def upload() -> None:
            try:
                to.sendall(b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(fragments):
                    to.sendall(chunk)
                to.sendall(b"0\r\n\r\n")
            except OSError:  # refused, and closed
                pass

        sender = threading.Thread(target=upload)
        sender.start()
        answer = to.makefile("rb").readline()
        sender.join()
    return int(answer.split()[1]) if answer else 0


@dataclasses.dataclass(frozen=True)
class Seen:
    """Bytes over the base."""

    peak: int
    after: int


def measure(way: str, fragments: int, expected: int) -> Seen:
    """Let a new server take one body."""
    with Child("_bodies_child", way, f"{CAP}") as child:
        port = child.ask("port")
        assert send(port, 2) == 200
        child.forget_peak()
        base = child.resident()
        status = send(port, fragments)
        if status != expected:
            raise UnavailableError(f"{way}: the answer was {status}, not {expected}")
        peak = child.peak()
        assert send(port, 2) == 200  # the client may have the answer before the server is done
        return Seen(peak - base, child.resident() - base)


def compare(case: str, fragments: int, expected: int, rounds: int, report: Report) -> None:
    """Report what all contenders needed for one body."""
    size = fragments * FRAGMENT
    table = report.table(
        f"{case}: {fragments} fragments of {FRAGMENT >> 10} KiB, {size / 1e6:.1f} MB",
        ("MB over the base", "peak", "worst peak", "x body", "after"),
    )
    worst: dict[str, int] = {}
    for name, way in CONTENDERS.items():
        seen = [measure(way, fragments, expected) for _ in range(rounds)]
        peak = statistics.median(one.peak for one in seen)
        after = statistics.median(one.after for one in seen)
        worst[name] = max(one.peak for one in seen)
        report.add(f"{case}: peak over the base", name, peak / 1e6, "MB")
        report.add(f"{case}: worst peak over the base", name, worst[name] / 1e6, "MB")
        report.add(f"{case}: left over the base", name, after / 1e6, "MB")
        table.add_row(
            f"[bold]{name}[/]" if name.startswith("arena") else name,
            f"{peak / 1e6:.1f}",
            f"{worst[name] / 1e6:.1f}",
            f"{peak / size:.2f}",
            f"{after / 1e6:.1f}",
        )
    report.console.print(table)
    for name in (name for name in CONTENDERS if name.startswith("arena")):
        if case == "whole":
            wanted = f"at most {MOST_WHOLE} times the body"
            got, met = f"{worst[name] / size:.3f}", worst[name] <= MOST_WHOLE * size
        else:
            wanted = f"refused at most {MOST_REFUSED_MB} MB over the base"
            got, met = f"{worst[name] / 1e6:.1f}", worst[name] <= MOST_REFUSED_MB * 10**6
        verdict = "[green]met[/]" if met else "[red]not met[/]"
        report.say(f"target: {name}: {wanted}, worst of {rounds}: {got}: {verdict}")


def run(options: Options, report: Report) -> None:
    """One body that is taken, and one that is refused, by every contender."""
    rounds = 1 if options.quick else 3
    compare("whole", WHOLE, 200, rounds, report)
    compare("refused", REFUSED, 413, rounds, report)

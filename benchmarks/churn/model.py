"""The stub of a model: a process of its own that reads a request and answers in pieces.

The answer says how many bytes came in, and their CRC: who asked can tell that they arrived as they
were sent. It is a line of JSON for each piece of text, and one with the usage at the end. With the
header ``X-Fail`` it fails: ``before`` the first byte, in the ``middle`` of the answer, ``after``
it.
``X-Delay``: how long it thinks, in seconds.
"""

from __future__ import annotations

import asyncio
import zlib

import orjson
from aiohttp import web

from benchmarks.churn import _loop

PIECES = 12
WORDS = "the button is next to the field that you have filled, so press it and look again "


async def generate(request: web.Request) -> web.StreamResponse:
    size, crc = 0, 0
    async for piece in request.content.iter_any():
        size += len(piece)
        crc = zlib.crc32(piece, crc)
    await asyncio.sleep(float(request.headers.get("X-Delay", "0.01")))
    fail = request.headers.get("X-Fail")
    if fail == "before":
        raise web.HTTPServiceUnavailable(text="overloaded")
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    for number in range(PIECES):
        if fail == "middle" and number == PIECES // 2:
            return drop(request, response)
        text = f"{size} bytes, crc {crc}: " if number == 0 else WORDS
        await response.write(orjson.dumps({"text": text}) + b"\n")
        await asyncio.sleep(0.002)
    await response.write(
        orjson.dumps({"usage": {"input": size // 4, "output": 20 * PIECES}}) + b"\n"
    )
    if fail == "after":
        await asyncio.sleep(0.02)  # so that the usage is there before the end that is not clean
        return drop(request, response)
    return response


def drop(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Let the connection go in the middle of an answer, as a process that dies does."""
    if request.transport is not None:
        request.transport.abort()
    return response


def application() -> web.Application:
    """Return the model as an application."""
    app = web.Application(client_max_size=0)
    app.router.add_post("/generate", generate)
    return app


if __name__ == "__main__":
    _loop.run(application(), {})

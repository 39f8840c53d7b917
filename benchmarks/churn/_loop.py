"""An aiohttp application in a child process that is told by its standard input what to answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from benchmarks._child import serve


async def start(app: web.Application) -> tuple[web.AppRunner, int]:
    """Serve it on loopback; return what cleans it up, and the port."""
    # A handler whose client has gone away is cancelled; by default it would go on for nobody.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, runner.addresses[0][1]


def run(app: web.Application, commands: dict[str, Callable[..., Any]]) -> None:
    """Serve until the standard input ends. The commands run in a thread; ``port`` is one."""

    async def main() -> None:
        runner, port = await start(app)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def listen() -> None:
            serve({"port": lambda: port, **commands})
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=listen, daemon=True).start()
        await ended.wait()
        await runner.cleanup()

    asyncio.run(main())

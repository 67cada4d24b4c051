"""Threads for what would hold the loop: so many at a time, and none for a client that has gone."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from vllm_lite.server.openai.errors import ApiError

T = TypeVar("T")


class Workers:
    """At most `count` pieces of work run at a time, the others wait in the order in which they came."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[Callable[[], None]], T], receive: Receive) -> T:
        """What `work(check)` returns. It never starts if the client goes before; later `check()` raises, so that it can
        stop. Raises ApiError when the client has gone."""
        gone = threading.Event()

        def check() -> None:
            if gone.is_set():
                raise left()

        working = asyncio.wrap_future(self._pool.submit(work, check))
        watch = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait((working, watch), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise left()
            return working.result()
        finally:
            gone.set()
            working.cancel()
            watch.cancel()


def left() -> ApiError:
    """What ends the work for a client that has gone; nobody reads it."""
    return ApiError(400, "the client has gone")


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

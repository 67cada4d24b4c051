"""Threads: work in threads, which is cancelled when its client disconnects."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from vllm_lite.server.openai.errors import ApiError

T = TypeVar("T")


class Threads:
    """A pool of `count` threads; further work waits in order of arrival."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[Callable[[], None]], T], receive: Receive) -> T:
        """Run `work(check)` in a thread and return its result. If the client disconnects, the work does not start, or
        `check()` raises, so that it can stop. Raises ApiError when the client has disconnected."""
        gone = threading.Event()

        def check() -> None:
            if gone.is_set():
                raise disconnected()

        working = asyncio.wrap_future(self._pool.submit(work, check))
        watch = asyncio.ensure_future(until_disconnected(receive))
        try:
            await asyncio.wait((working, watch), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise disconnected()
            return working.result()
        finally:
            gone.set()
            working.cancel()
            watch.cancel()


def disconnected() -> ApiError:
    """Make the error that ends work for a disconnected client. Nobody reads it."""
    return ApiError(400, "the client has gone")


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

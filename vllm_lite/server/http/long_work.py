"""Work over long bodies, in one thread beside the event loop.

Decoding and encoding hold the GIL. With one such thread the loop runs after each piece of work; with several it would
wait for all of them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_BYTES = 256 * 1024
"""Work over more bytes is done in the thread."""

T = TypeVar("T")
_thread = ThreadPoolExecutor(1, thread_name_prefix="long-bodies")


async def through(num_bytes: int, work: Callable[[], T]) -> T:
    """Call `work`, in the thread if it processes more than LONG_BYTES."""
    if num_bytes <= LONG_BYTES:
        return work()
    return await asyncio.wrap_future(_thread.submit(work))

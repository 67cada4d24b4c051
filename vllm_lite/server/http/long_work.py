"""Work that goes through a long body, beside the loop: one piece of it at a time.

Decoding and encoding let no other Python run. In one thread the loop gets its turn behind each piece of work; behind
several threads it would wait for all of them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_BYTES = 256 * 1024
"""What goes through more bytes is done in the thread."""

T = TypeVar("T")
_thread = ThreadPoolExecutor(1, thread_name_prefix="long-bodies")


async def through(num_bytes: int, work: Callable[[], T]) -> T:
    """Do `work`, which goes through so many bytes."""
    if num_bytes <= LONG_BYTES:
        return work()
    return await asyncio.wrap_future(_thread.submit(work))

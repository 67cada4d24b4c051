"""A replica ends when Ray's process of its node, the raylet, has ended: Ray counts the replica as lost and starts
another one elsewhere, but does not end this one, which would keep its GPUs."""

import asyncio
import os
import signal

from vllm_lite.runtime import log

LOOK_S = 1.0
GRACE_S = 30.0
"""Ray notices a lost node within 10 to 20 s, and sends requests here until then. Streams that are open after this time
move."""

logger = log.get(__name__)


async def end_without_raylet() -> None:
    """Watch the parent process, forever. This one's children end with it."""
    raylet = os.getppid()
    while os.getppid() == raylet:  # noqa: ASYNC110 - there is no event for its end
        await asyncio.sleep(LOOK_S)
    logger.warning("the raylet of this node has ended; this replica ends in %g s", GRACE_S)
    await asyncio.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)

"""A replica ends by itself when Ray's process of its node, the raylet, has ended: Ray counts it as lost and starts
another one elsewhere, but does not end this one, which would keep its GPUs."""

import asyncio
import os
import signal

from vllm_lite.runtime import log

LOOK_S = 1.0
GRACE_S = 30.0
"""Ray notices within 10 to 20 s that a node is lost. Until then requests are sent here; the streams that are left after
this time move."""

logger = log.get(__name__)


async def end_without_raylet() -> None:
    """Watch the process that has started this one, for ever. What this one has started ends with it."""
    raylet = os.getppid()
    while os.getppid() == raylet:  # noqa: ASYNC110 - nothing says when it ends
        await asyncio.sleep(LOOK_S)
    logger.warning("the raylet of this node has ended; this replica ends in %g s", GRACE_S)
    await asyncio.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)

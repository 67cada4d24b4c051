"""Progress of a worker for its heartbeat, also while weights are loaded, and a guard against garbage collections."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_lite.config import GIB
from vllm_lite.runtime import log

LOG_EVERY_S = 5.0

logger = log.get(__name__)


class Progress:
    """A counter that grows with every computed layer, loaded shard and finished step, to show that a worker is alive.

    The worker's thread writes it, the heartbeat's thread reads it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_idle = False
        """Whether the worker waits for the engine's next message."""
        self.expert_tokens: Callable[[], list[list[int]]] | None = None
        """Returns WorkerHeartbeat's tokens per layer and expert; None: they are not counted here."""

    def advance(self) -> None:
        self.count += 1


class LoadReport:
    """Reports loaded bytes as heartbeat progress, and as a log line every LOG_EVERY_S."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.next_line_s = time.monotonic() + LOG_EVERY_S

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self.progress.advance()
        if time.monotonic() >= self.next_line_s:
            self.next_line_s = time.monotonic() + LOG_EVERY_S
            logger.info("loading weights: %.1f of %.1f GiB", done_bytes / GIB, total_bytes / GIB)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the body, for work that no pause may interrupt."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

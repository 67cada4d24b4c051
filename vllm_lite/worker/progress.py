"""Signs of life of a worker, and work that a garbage collection may not interrupt."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """A counter that grows with every layer computed, shard loaded and step done, to show that a worker is not hung.

    The worker's thread writes it, the heartbeat's thread reads it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_idle = False
        """It waits for the engine's next message."""
        self.expert_tokens: Callable[[], list[list[int]]] | None = None
        """What WorkerHeartbeat says of the experts; None if that is not counted here."""

    def advance(self) -> None:
        self.count += 1


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the body: for work that no pause may interrupt."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Progress of a worker for its heartbeat, and a guard against garbage collections."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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

"""Recovery: replaces lost workers, from the moment at which the engine notices the loss until new workers serve.

The engine's loop runs meanwhile: it answers clients, accepts and ends requests, and checks deadlines. So recovery is
a generator: advance() is called in every pass of the loop and never blocks.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from vllm_lite.config import ResolvedConfig
from vllm_lite.engine.client_port import ClientPort
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.request import Produced
from vllm_lite.engine.workers.groups import WorkerGroups
from vllm_lite.errors import ConfigError, EngineDeadError, EngineError, ModelError
from vllm_lite.executor.base import Failure, WorkersLostError
from vllm_lite.runtime import log
from vllm_lite.runtime.restarts import RestartLimit

logger = log.get(__name__)


class Recovery:
    """Replaces lost worker groups, at most `max_restarts` times within the window of a RestartLimit."""

    def __init__(
        self,
        core: EngineCore,
        groups: WorkerGroups,
        port: ClientPort,
        config: ResolvedConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._groups = groups
        self._port = port
        self._max_restarts = config.max_restarts
        self._limit = RestartLimit(config.max_restarts)
        self._clock = clock
        self._counters = core.meter.counters
        self._stages: Iterator[None] | None = None
        self._produced: list[Produced] = []
        self._waiting: set[str] = set()
        self._began_s = 0.0
        self._attempt = 0
        self._cause = ""

    @property
    def is_on(self) -> bool:
        """Whether workers are being replaced."""
        return self._stages is not None

    def begin(self, error: WorkersLostError) -> None:
        """Begin to replace the workers, which are lost; `error` has what is known of the cause so far."""
        self._began_s, self._attempt = self._clock(), 0
        self._cause = self._counters.recovering = str(error)
        self._stages = self._pass_stages()

    def advance(self, produced: list[Produced]) -> bool:
        """Advance without blocking. Returns whether workers serve. Requests that end are appended to `produced`.

        Raises EngineError or ModelError, which ends all requests, if the workers cannot be replaced, or have been
        replaced too often.
        """
        if self._stages is None:
            return True
        try:
            next(self._stages)
        except StopIteration:
            self._stages = None
        produced += self._produced
        self._produced = []
        return self._stages is None

    def _pass_stages(self) -> Iterator[None]:
        """All stages of a recovery, in order. Yields whenever it has to wait."""
        groups = self._groups
        blocks_per_s = None
        while blocks_per_s is None:
            if self._max_restarts:
                with self._explained():
                    groups.prepare_next()  # at once, before the cause is known
            while (failure := groups.executor.failure()) is None:
                yield
            self._on_lost(failure)
            with suppress(WorkersLostError), self._explained():
                blocks_per_s = yield from groups.replace()
        self._core.resume(groups.executor, groups.generation, blocks_per_s)
        self._on_served()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the cause of the recovery to an error that ends it."""
        try:
            yield
        except WorkersLostError:  # there is another attempt
            raise
        except (EngineError, ModelError, ConfigError) as error:
            raise EngineDeadError(self._cannot_start(error)) from error

    def _cannot_start(self, error: Exception) -> str:
        return f"the workers cannot be started again: {error}; they were restarted because {self._cause}"

    def _on_lost(self, failure: Failure) -> None:
        """Handle a loss whose cause is known. Raises the error that ends the engine, if no workers may replace them."""
        error, counters = failure.error, self._counters
        self._attempt += 1
        if isinstance(error, ModelError):
            raise error if self._attempt == 1 else EngineDeadError(self._cannot_start(error))
        if not self._limit.allows(str(error), self._clock()):
            raise EngineDeadError(self._limit.causes)
        counters.restarts[failure.cause] = counters.restarts.get(failure.cause, 0) + 1
        counters.recovering = str(error)
        if self._attempt == 1:
            self._cause = str(error)
            self._produced += self._core.lose_workers(str(error))
            self._waiting = set(self._core.scheduler.requests)
        self._port.say_recovering(str(error), self._attempt)
        logger.warning("%s; the workers are replaced, %s waiting", error, _count(self._core.scheduler.requests))

    def _on_served(self) -> None:
        counters, generation = self._counters, self._groups.generation
        lost_s = self._clock() - self._began_s
        going_on = self._waiting & self._core.scheduler.requests.keys()
        counters.generation, counters.recovering = generation, ""
        counters.recovered_requests += len(going_on)
        counters.lost_s += lost_s
        self._waiting = set()
        self._port.say_recovered(generation, lost_s)
        logger.info("workers of generation %d serve after %.2f s; %s continue", generation, lost_s, _count(going_on))


def _count(requests: Collection[object]) -> str:
    return f"{len(requests)} request{'s' * (len(requests) != 1)}"

"""WorkerGroups: the groups of workers of one engine, one after the other, and the one on standby.

At any time one group computes, or is to be replaced. The processes of the next one start before the end of the one
before it is understood, let alone complete: importing torch takes longer than both. They take no memory of a device
until they are to load the model.
"""

import time
from collections.abc import Callable, Generator
from contextlib import suppress

from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import EngineError
from vllm_lite.executor import blocking
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.control import Ready
from vllm_lite.runtime import log
from vllm_lite.runtime.restarts import RestartLimit
from vllm_lite.transport import Wakeup

MAX_STANDBY_DEATHS = 3
"""How many groups that only waited may die in the window of a RestartLimit before no other is started."""
STANDBY_LOOK_S = 1.0
MUST_STAY = ("groups", "max_model_len", "vocab_size", "eos_token_ids", "block_bytes")
"""Fields of Ready in which no group may differ from the first: requests go on where they were."""
ROOM_TOLERANCE = 0.01
"""How much less room, as a share, is no reason to give up: two profiles of a GPU differ a little, and its memory is not
handed out to the last part. If the pools really do not fit, their allocation says so."""
Waiting = Generator[None, None, float]
"""It yields whenever there is something to wait for, and returns blocks per second that move between the KV pools."""

logger = log.get(__name__)

MakeExecutor = Callable[[int], Executor]
"""Makes the executor of the group with a number, its generation. No worker is started yet."""


class WorkerGroups:
    """`executor` is the group that computes, or did so last; its number is `generation`. Numbers grow, with gaps."""

    def __init__(self, make: MakeExecutor, config: ResolvedConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises EngineError if the first group cannot be made."""
        self._make = make
        self._config = config
        self._clock = clock
        self._wants_standby = config.standby_workers and not config.single_process
        self._standby_limit = RestartLimit(MAX_STANDBY_DEATHS)
        self._look_s = 0.0
        self._next: Executor | None = None
        self._ready: Ready | None = None
        self.num_blocks = self._num_host_blocks = 0
        self._newest = self.generation = 1
        self.model = config.model
        """The folder of the checkpoint that the groups load from now on."""
        self.executor = make(1)

    # ---- the first group

    def start(self, stop: Wakeup) -> Ready:
        """Block until the model is loaded. `stop` ends the wait. Raises what an executor's start raises."""
        self._ready = blocking.load(self.executor, self._config.ready_timeout_s, stop)
        return self._ready

    def allocate(self, num_blocks: int, num_host_blocks: int, stop: Wakeup) -> float:
        """Block until the KV pools are there, or raise as start() does. Returns blocks per second that move between
        them."""
        self.num_blocks, self._num_host_blocks = num_blocks, num_host_blocks
        return blocking.allocate(self.executor, num_blocks, num_host_blocks, self._config.ready_timeout_s, stop)

    # ---- those that follow

    def prepare_next(self) -> None:
        """Have the processes of the next group start, if they have not yet. Raises EngineError if they cannot."""
        if self._next is not None and (reason := self._next_died()) is not None:
            logger.warning("the group on standby is not there: %s", reason)
            self._drop_next()
        if self._next is None:
            self._newest += 1
            try:
                self._next = self._make(self._newest)
                self._next.spawn()
            except OSError as error:
                raise EngineError(f"a worker cannot be started: {error}") from error

    @property
    def sizes(self) -> tuple[Ready | None, int, int]:
        """The first group's answer, and the blocks of the pools on the device and on the host."""
        return self._ready, self.num_blocks, self._num_host_blocks

    def adopt(self, ready: Ready, num_blocks: int, num_host_blocks: int) -> None:
        """Know of a group of an earlier engine, in place of start() and allocate(): the next one has to be like it."""
        self._ready, self.num_blocks, self._num_host_blocks = ready, num_blocks, num_host_blocks

    def await_next(self) -> Generator[None, None, None]:
        """Wait until the processes of the next group have imported what they need, or have died of it."""
        until_s = self._clock() + self._config.ready_timeout_s
        with suppress(EngineError):
            while self._next is not None and not self._next.is_prepared() and self._clock() < until_s:
                yield

    def replace(self) -> Waiting:
        """End the group that is lost, and let the one that is prepared take its place, with pools of the same sizes.

        Raises what an executor's start raises, and EngineError if the lost workers cannot be ended or the new ones
        cannot do what those could.
        """
        yield from self.end()
        self._take_next()
        timeout_s = self._config.ready_timeout_s
        self.executor.begin_load(timeout_s, self.model)
        while (ready := self.executor.ready()) is None:
            yield
        self.check_stays(ready)
        self.executor.begin_allocate(self.num_blocks, self._num_host_blocks, timeout_s)
        while (blocks_per_s := self.executor.started()) is None:
            yield
        self._look_s = self._clock() + STANDBY_LOOK_S  # those who go on need the cores first
        return blocks_per_s

    def end(self) -> Generator[None, None, None]:
        """End the group that computes, or did so last. Raises EngineError if it cannot be ended."""
        self.executor.end()
        while not self.executor.has_ended():
            yield

    def dismiss_next(self) -> Generator[None, None, None]:
        """End the group on standby, or that was prepared."""
        if self._next is not None:
            self._next.end()
            while not self._next.has_ended():
                yield
            self._drop_next()

    def _take_next(self) -> None:
        following, self._next = self._next, None
        if following is not None:
            self.executor.close()
            self.executor, self.generation = following, self._newest

    def check_stays(self, ready: Ready) -> None:
        for name in MUST_STAY:
            now, before = getattr(ready, name), getattr(self._ready, name)
            if now != before:
                raise EngineError(f"the model is not what it was: its {name} is {now!r} and was {before!r}")
        if ready.num_blocks < (1 - ROOM_TOLERANCE) * self.num_blocks:
            raise EngineError(
                f"there is room for {ready.num_blocks} KV blocks now, and the engine counts on {self.num_blocks}"
            )

        num_slots = 0 if self._ready is None else self._ready.num_state_slots
        if ready.num_state_slots < num_slots:
            raise EngineError(
                f"there is room for {ready.num_state_slots} state slots now, and the engine counts on {num_slots}"
            )

    def look_after_standby(self) -> None:
        """See that a group is on standby, where the user wants one. To be called often while the workers are well."""
        now_s = self._clock()
        if not self._wants_standby or now_s < self._look_s:
            return
        self._look_s = now_s + STANDBY_LOOK_S
        try:
            if self._next is None:
                self.prepare_next()
            reason = self._next_died()
        except EngineError as error:
            reason = str(error)
        if reason is None:
            return
        self._drop_next()
        self._wants_standby = self._standby_limit.allows(reason, now_s)
        what_next = "another one is started" if self._wants_standby else "no other one is started"
        logger.warning("a worker on standby has ended, %s: %s", what_next, reason)

    def _next_died(self) -> str | None:
        """Why the next group cannot be used; None as long as it is well."""
        if self._next is None:
            return None
        try:
            self._next.ready()
        except EngineError as error:
            return str(error)
        return None

    def _drop_next(self) -> None:
        following, self._next = self._next, None
        if following is not None:
            following.close()

    def close(self) -> None:
        """End all workers, those on standby too."""
        self.executor.end()
        if self._next is not None:
            self._next.end()
        self._drop_next()
        self.executor.close()

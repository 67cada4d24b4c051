"""WorkerGroups: the successive worker groups of one engine, and the group on standby.

At any time one group computes or is being replaced. The processes of the next group start before the cause of the old
one's death is known and its processes have ended, since importing torch takes longer than both. They take no device
memory until they load the model.
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
"""Maximum deaths of standby groups, within the window of a RestartLimit, before no more are started."""
STANDBY_LOOK_S = 1.0
MUST_STAY = ("groups", "max_model_len", "vocab_size", "eos_token_ids", "block_bytes")
"""Fields of Ready in which every group must equal the first one, since its requests continue."""
ROOM_TOLERANCE = 0.01
"""Tolerated relative loss of KV blocks: two memory profiles of a GPU differ a little, and some of its memory is kept in
reserve. If the pools really do not fit, their allocation fails."""
Waiting = Generator[None, None, float]
"""Yields whenever it has to wait, and returns the rate of block moves between the KV pools, in blocks per second."""

logger = log.get(__name__)

MakeExecutor = Callable[[int], Executor]
"""Makes the executor of the group with this generation. No worker process is started yet."""


class WorkerGroups:
    """`executor` is that of the current group, or the last one; its number is `generation`. Numbers grow, with gaps."""

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
        """Checkpoint folder that groups load from now on."""
        self.executor = make(1)

    # ---- the first group

    def start(self, stop: Wakeup) -> Ready:
        """Block until the model is loaded, or `stop` is set. Raises the errors of an executor's start."""
        self._ready = blocking.load(self.executor, self._config.ready_timeout_s, stop)
        return self._ready

    def allocate(self, num_blocks: int, num_host_blocks: int, stop: Wakeup) -> float:
        """Block until the KV pools are allocated. Raises as start() does. Returns the rate of block moves between them,
        in blocks per second."""
        self.num_blocks, self._num_host_blocks = num_blocks, num_host_blocks
        return blocking.allocate(self.executor, num_blocks, num_host_blocks, self._config.ready_timeout_s, stop)

    # ---- later groups

    def prepare_next(self) -> None:
        """Start the processes of the next group, unless they run already. Raises EngineError if they cannot start."""
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
        """The first group's Ready, and the numbers of blocks of the device and host pools."""
        return self._ready, self.num_blocks, self._num_host_blocks

    def adopt(self, ready: Ready, num_blocks: int, num_host_blocks: int) -> None:
        """Take over the sizes of an earlier engine's group, in place of start() and allocate(); the next group has to
        match them."""
        self._ready, self.num_blocks, self._num_host_blocks = ready, num_blocks, num_host_blocks

    def await_next(self) -> Generator[None, None, None]:
        """Wait until the processes of the next group have finished their imports, or have died."""
        until_s = self._clock() + self._config.ready_timeout_s
        with suppress(EngineError):
            while self._next is not None and not self._next.is_prepared() and self._clock() < until_s:
                yield

    def replace(self) -> Waiting:
        """End the lost group and start the prepared one in its place, with pools of the same sizes.

        Raises the errors of an executor's start, and EngineError if the lost workers cannot be ended or the new ones
        differ from them.
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
        self._look_s = self._clock() + STANDBY_LOOK_S  # requests that continue need the cores first
        return blocks_per_s

    def end(self) -> Generator[None, None, None]:
        """End the current group. Raises EngineError if it cannot be ended."""
        self.executor.end()
        while not self.executor.has_ended():
            yield

    def dismiss_next(self) -> Generator[None, None, None]:
        """End the standby or prepared group, if there is one."""
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
                raise EngineError(f"the model has changed: its {name} is {now!r} and was {before!r}")
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
        """Keep a group on standby, if the user wants one. Called often while the workers are well."""
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
        """Reason why the next group cannot be used, or None."""
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
        """End all workers, those on standby included."""
        self.executor.end()
        if self._next is not None:
            self._next.end()
        self._drop_next()
        self.executor.close()

"""Operations: pause, sleep, weight updates and profiles, while the engine's loop runs.

Operations run one after the other, as generators: advance() is called in every pass of the loop and never blocks.
Nothing is scheduled while the engine is paused or asleep, but requests can still be added, aborted and expire. A
sleeping engine has no workers: waking up starts a new group that loads the files, and a weight update starts a group
that loads another folder. The scheduler sees both as workers that were lost and replaced, so that every sequence
continues after its tokens, and replays make the same decisions.

The resulting state is kept in a file, so that an engine which replaces this one is paused or asleep as well and serves
the same weights. A pause or sleep is stored when it begins: if the engine dies while requests have still to end, the
next engine completes it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_lite.config import ResolvedConfig
from vllm_lite.engine.client_port import ClientPort
from vllm_lite.engine.core import EngineCore
from vllm_lite.engine.kept_state import KeptState
from vllm_lite.engine.transfers import LAST_WRITES_S, SLEEP_WRITES_S
from vllm_lite.engine.workers.groups import WorkerGroups
from vllm_lite.errors import ConfigError, EngineError, ModelError, VllmLiteError
from vllm_lite.executor.base import WorkersLostError
from vllm_lite.protocol import api
from vllm_lite.protocol import operations as wire
from vllm_lite.protocol.control import BeginProfile, EndProfile
from vllm_lite.runtime import log

if TYPE_CHECKING:
    from vllm_lite.checkpoint.replacement import Weights

MAX_LOADS = 3
"""Number of times that workers are started before dying during the load becomes the operation's error."""
PROFILE_TIMEOUT_S = 300.0
"""Seconds for workers to begin a profile, or to write it."""
REATTACH_S = 2.0
"""Seconds for clients to connect to an engine that replaces another one, and to send it their unfinished requests."""
REST_S = 1.0
"""Seconds after falling asleep before a worker process imports torch for the wake-up: a router loads another model in
that time, and needs the cores."""
_MEMORY = frozenset({"weights", "kv_cache"})

logger = log.get(__name__)

T = TypeVar("T")
Stages = Generator[None, None, None]
"""An operation in progress; it yields whenever it has to wait."""


class Operations:
    """Queue and progress of the operations that clients request."""

    def __init__(
        self,
        core: EngineCore,
        groups: WorkerGroups,
        port: ClientPort,
        config: ResolvedConfig,
        keep_state: Callable[[KeptState], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._groups = groups
        self._port = port
        self._config = config
        self._keep_state = keep_state
        self._clock = clock
        self._counters = core.meter.counters
        self._asked: deque[tuple[bytes, wire.Operation]] = deque()
        self._stages: Iterator[None] | None = None
        self._awake: set[str] = set()
        """Tags of the WakeUp messages since the engine fell asleep."""
        self._prepares_s: float | None = None
        """Time at which to start the processes for the wake-up; None: do not."""
        self._served: Weights | None = None
        """The served weights, if a check has read them."""
        self._counters.model = groups.model

    @property
    def is_on(self) -> bool:
        """Whether an operation runs or is queued."""
        return self._stages is not None or bool(self._asked)

    @property
    def looks_soon(self) -> bool:
        """Whether advance() has to be called soon, even without a message."""
        return self.is_on or self._prepares_s is not None

    def restore(self, state: KeptState) -> None:
        """Take over the state of an earlier engine, and complete its pending operation. A sleeping engine was started
        without workers."""
        counters = self._counters
        counters.is_paused, counters.sleep_level = state.is_paused, state.sleep_level
        if state.ready is not None:
            self._core.lose_workers("the engine before was asleep", are_ended=True)
        self._settle(state.asked)
        if state.asked is not None:
            self._stages = self._go_on(state.asked)

    def ask(self, peer: bytes, message: wire.Operation) -> None:
        """Queue a client's operation; an OperationDone is its answer."""
        self._asked.append((peer, message))

    def advance(self) -> bool:
        """Advance the operations without blocking. Returns whether there are workers that compute."""
        while self.is_on:
            self._stages = self._stages or self._answer(*self._asked.popleft())
            try:
                next(self._stages)
            except StopIteration:
                self._stages = None
            else:
                break
        if self._prepares_s is not None and not self.is_on and self._clock() >= self._prepares_s:
            self._prepare_wake()
        has_workers = self._core.scheduler.has_workers
        if not has_workers and not self.is_on:
            self._groups.executor.has_ended()  # reads messages that would otherwise end every wait at once
        return has_workers

    def _go_on(self, message: wire.PauseGeneration | wire.Sleep) -> Stages:
        """Complete an operation of an earlier engine. First wait REATTACH_S for the clients to send its requests again;
        new requests that arrive in that time are treated alike."""
        until_s = self._clock() + REATTACH_S
        while message.mode != "keep" and self._clock() < until_s and not self._is_called_off:
            yield
        yield from self._answer(None, message)

    @property
    def _is_called_off(self) -> bool:
        """Whether a ResumeGeneration is queued."""
        return any(isinstance(message, wire.ResumeGeneration) for _, message in self._asked)

    def _answer(self, peer: bytes | None, message: wire.Operation) -> Stages:
        done = wire.OperationDone()
        name = type(message).__name__
        began_s = time.monotonic()
        try:
            yield from self._stages_of(message)
            logger.info("%s: done after %.2f s", name, time.monotonic() - began_s)
        except (ModelError, ConfigError) as error:
            done = wire.OperationDone(str(error), bad_input=True)
        except EngineError as error:
            done = wire.OperationDone(str(error))
        if done.error is not None:
            logger.warning("%s: %s", name, done.error)
        self._settle()
        if peer is not None:
            self._port.send(peer, done)

    def _stages_of(self, message: wire.Operation) -> Stages:
        match message:
            case wire.PauseGeneration():
                return self._pause(message)
            case wire.ResumeGeneration():
                return self._resume()
            case wire.Sleep():
                return self._sleep(message)
            case wire.WakeUp():
                return self._wake_up(message)
            case wire.UpdateWeights():
                return self._update_weights(message)
            case wire.StartProfile():
                return self._profile(BeginProfile())
            case wire.StopProfile():
                return self._profile(EndProfile())

    # ---- the operations

    def _pause(self, message: wire.PauseGeneration) -> Stages:
        self._keep(message)
        yield from self._empty(message.mode)
        self._counters.is_paused = True
        if message.clear_cache and message.mode != "keep":
            self._core.reset_prefix_cache()

    def _resume(self) -> Stages:
        self._counters.is_paused = False
        yield from ()

    def _sleep(self, message: wire.Sleep) -> Stages:
        level, counters = message.level, self._counters
        self._keep(message)
        yield from self._empty(message.mode)
        self._awake.clear()
        if not level:  # an engine in a deeper sleep stays in it
            counters.sleep_level = counters.sleep_level or 0
            return
        counters.sleep_level = level
        if self._core.scheduler.has_workers:
            yield from self._end_workers(f"sleep of level {level}", SLEEP_WRITES_S)
        self._prepares_s = self._clock() + REST_S if level == 1 else None
        if level != 1:
            yield from self._groups.dismiss_next()

    def _prepare_wake(self) -> None:
        self._prepares_s = None
        try:
            self._groups.prepare_next()
        except EngineError as error:
            logger.warning("the wake will take longer: %s", error)

    def _wake_up(self, message: wire.WakeUp) -> Stages:
        if self._counters.sleep_level is None:
            return
        self._awake |= set(message.tags) or _MEMORY
        if not self._core.scheduler.has_workers:
            if not self._awake >= _MEMORY:
                return
            self._awake.clear()
            yield from self._load()
        self._counters.sleep_level, self._counters.is_paused = None, False

    def _update_weights(self, message: wire.UpdateWeights) -> Stages:
        folder, before, groups = str(Path(message.model).absolute()), self._groups.model, self._groups
        found = yield from _in_thread(lambda: self._check_folder(folder))
        if not self._core.scheduler.has_workers:  # asleep: the weights are loaded by the wake-up
            groups.model, self._served = folder, found
            return
        groups.prepare_next()  # the old ones serve while these import what they need
        yield from groups.await_next()
        yield from self._empty(message.mode)
        self._counters.recovering = "the weights are being replaced"
        yield from self._end_workers("other weights", LAST_WRITES_S)
        groups.model = folder
        try:
            yield from self._load()
        except (EngineError, ModelError, ConfigError) as error:
            groups.model = before
            logger.warning("%s: the previous weights are loaded again", error)
            yield from self._load_again(error)
            raise
        self._served = found

    def _profile(self, message: BeginProfile | EndProfile) -> Stages:
        """Let the workers begin or end a profile. Steps continue, except while a profile is written."""
        profiler, executor = self._config.profiler_config, self._groups.executor
        if profiler is None or profiler.profiler is None:
            raise ConfigError(
                "the engine was started without a profiler: give --profiler-config "
                """'{"profiler":"torch","torch_profiler_dir":"FOLDER"}'"""
            )
        if not self._core.scheduler.has_workers:
            raise EngineError("there are no workers to profile: the engine sleeps")
        until_s = self._clock() + PROFILE_TIMEOUT_S
        executor.profile(message)
        while (answers := executor.profiled()) is None:
            if self._clock() > until_s:
                raise EngineError(f"the workers have not answered within {PROFILE_TIMEOUT_S:g} s")
            yield
        if errors := dict.fromkeys(answer.error for answer in answers if answer.error is not None):
            raise ConfigError("; ".join(errors))

    def _load_again(self, cause: VllmLiteError) -> Stages:
        """Load the previous weights again after an update failed of `cause`. If that fails, too, the engine sleeps."""
        try:
            yield from self._load()
        except (EngineError, ModelError, ConfigError) as error:
            self._counters.sleep_level = 2
            raise ModelError(
                f"{cause}; the previous weights cannot be loaded again: {error}; the engine sleeps, until /wake_up or "
                "other weights"
            ) from error

    # ---- parts of operations

    def _empty(self, mode: wire.PauseMode) -> Stages:
        """Pause the scheduler after requests have ended ("wait"), were aborted ("abort") or were kept ("keep"), and
        wait for the steps in flight. Raises EngineError if the engine is resumed before the requests have ended."""
        core = self._core
        if mode == "wait" and not core.scheduler.is_paused:
            core.hold_newcomers(are_held=True)
            while not all(map(core.scheduler.queues.is_newcomer, core.scheduler.requests.values())):
                if self._is_called_off:
                    raise EngineError("it was called off: the engine was resumed while requests still ran")
                urgent = next((_mode(message) for _, message in self._asked if _mode(message) != "wait"), None)
                if urgent is not None:
                    mode = urgent
                    break
                yield
        if mode == "abort":
            for request in list(core.scheduler.requests.values()):
                if not core.scheduler.queues.is_newcomer(request):
                    self._abort(request.request_id, request.client)
        core.scheduler.is_paused = True
        while core.in_flight:
            yield

    def _abort(self, request_id: str, client: bytes) -> None:
        for index, start in self._core.abort(request_id):
            self._port.push(client, api.Finished(request_id, start, [], "abort", index=index))

    def _end_workers(self, why: str, writes_s: float) -> Stages:
        """End the workers because of `why`, after at most `writes_s` seconds for writing ended chats to disk."""
        if self._core.transfers is not None:
            yield from self._core.transfers.last_writes(writes_s)
        self._core.lose_workers(why, are_ended=True)
        yield from self._groups.end()

    def _load(self) -> Stages:
        """Start workers that load `groups.model`, and resume with them. Raises EngineError, ModelError or ConfigError;
        then there are no workers."""
        groups, core, self._prepares_s = self._groups, self._core, None
        for attempt in range(1, MAX_LOADS + 1):
            try:
                groups.prepare_next()
                blocks_per_s = yield from groups.replace()
            except WorkersLostError:
                while (failure := groups.executor.failure()) is None:
                    yield
                yield from groups.end()
                if attempt == MAX_LOADS or isinstance(failure.error, ModelError | ConfigError):
                    raise failure.error from None
                logger.warning("%s; the workers are started again", failure.error)
            except (EngineError, ModelError, ConfigError):
                yield from groups.end()
                raise
            else:
                core.resume(groups.executor, groups.generation, blocks_per_s)
                return

    def _check_folder(self, folder: str) -> "Weights":
        """Read the headers of a checkpoint. Raises ModelError if it is not of the model that is served."""
        from vllm_lite.checkpoint.replacement import check_same_model, read_weights  # imported only when needed

        config, served = self._config, self._served
        has_files = config.load_format != "dummy"
        found = read_weights(folder, config.model_impl, has_files=has_files)
        if served is None:
            with suppress(ModelError):  # the served files are gone; the load will show whether the new ones fit
                served = read_weights(self._groups.model, config.model_impl, has_files=has_files)
        if served is not None:
            check_same_model(folder, found, served)
        return found

    def _settle(self, asked: wire.PauseGeneration | wire.Sleep | None = None) -> None:
        """After an operation, successful or not: update scheduler and counters, and keep the state for the next
        engine."""
        core, counters, groups = self._core, self._counters, self._groups
        counters.model, counters.recovering = groups.model, ""
        counters.generation = groups.generation
        core.scheduler.is_paused = counters.is_paused or counters.sleep_level is not None
        core.hold_newcomers(are_held=False)
        self._keep(asked)

    def _keep(self, asked: wire.PauseGeneration | wire.Sleep | None) -> None:
        """Keep the state and the pending operation for the next engine."""
        counters, groups = self._counters, self._groups
        sizes = (None, 0, 0) if self._core.scheduler.has_workers else groups.sizes
        self._keep_state(KeptState(groups.model, counters.is_paused, counters.sleep_level, *sizes, asked))


def _mode(message: wire.Operation) -> wire.PauseMode:
    """The mode in which an operation pauses requests; "wait" for one that pauses none."""
    return message.mode if isinstance(message, wire.PauseGeneration | wire.Sleep | wire.UpdateWeights) else "wait"


def _in_thread(work: Callable[[], T]) -> Generator[None, None, T]:
    """Run `work` in a thread and return its result or raise its error, so that a slow disk does not block the loop."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="checks a checkpoint", daemon=True)
    thread.start()
    while thread.is_alive():
        yield
    if errors:
        raise errors[0]
    return results[0]

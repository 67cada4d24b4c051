"""MultiprocExecutor: starts and watches worker processes on this host, and speaks to them over one ROUTER socket."""

import time
from collections import deque
from typing import NamedTuple

from vllm_lite import transport
from vllm_lite.checkpoint.read_ahead import start_reading_ahead
from vllm_lite.config import ResolvedConfig, WorkerSettings
from vllm_lite.errors import EngineDeadError, EngineError, ModelError, ProtocolError
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.codec import FromWorker, ToWorker, engine_to_worker, worker_to_engine
from vllm_lite.protocol.control import Failed, Ready, Shutdown, Start, Started, WorkerHeartbeat, WorkerHello
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput, StepOutputs, Steps
from vllm_lite.runtime import log, supervise
from vllm_lite.transport import Delivery, Tcp, Wakeup
from vllm_lite.transport.interface import Pollable

SPAWNS_WORKERS = "starts its workers"
STOP_GRACE_S = 2.0
LATE_MESSAGE_S = 0.5
"""How long a dead worker's last message may take to arrive after its end has been noticed."""

logger = log.get(__name__)


class WorkerState:
    """What the engine knows of the worker of one rank: its process, and what it has reported."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.child: supervise.Child | None = None
        self.pid = 0
        self.ready: Ready | None = None
        self.started = False
        self.swap_blocks_per_s = 0.0
        self.last_heard_s = time.monotonic()
        self.progress = -1
        self.last_progress_s = self.last_heard_s

    @property
    def peer(self) -> bytes:
        """The identity under which the worker connects."""
        return f"worker-{self.rank}".encode()


class WorkerTcp(NamedTuple):
    """Where workers report over tcp, and the folder of the keys that they are given, None: in the clear."""

    listen: Tcp
    worker_keys: str | None


class MultiprocExecutor:
    """See Executor. Rank 0 answers for all. Workers report at `address`, or at `tcp` if that is given."""

    def __init__(
        self, config: ResolvedConfig, address: str, generation: int, worker_module: str, tcp: WorkerTcp | None = None
    ) -> None:
        self._config = config
        self._worker_module = worker_module
        self._generation = generation
        self._exits = Wakeup()
        self._listener = transport.bind(address, tcp and tcp.listen)
        self._worker_address = self._listener.tcp_address or address
        self._worker_keys = tcp and tcp.worker_keys
        self._workers = [WorkerState(rank) for rank in range(config.tensor_parallel_size)]
        self._outputs: deque[ModelOutput] = deque()
        self._num_in_flight = 0
        self._malformed = 0

    # ---- start

    def start(self, timeout_s: float, stop: Wakeup) -> Ready:
        if self._config.load_format != "dummy":
            start_reading_ahead(self._config.model)
        for worker in self._workers:
            worker.child = supervise.spawn(
                self._worker_module,
                WorkerSettings(self._config, self._worker_address, worker.rank, self._generation, self._worker_keys),
                f"worker {worker.rank}",
                lambda _reason: self._exits.set(),
                in_thread=self._config.single_process,
            )
        log.moment("engine", SPAWNS_WORKERS)
        self._wait_for("ready", timeout_s, stop)
        answers = [worker.ready for worker in self._workers if worker.ready is not None]
        return min(answers, key=lambda ready: ready.num_blocks)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> float:
        self._broadcast(Start(self._generation, num_blocks, num_host_blocks))
        self._wait_for("started", self._config.ready_timeout_s, None)
        return min(worker.swap_blocks_per_s for worker in self._workers)

    def _wait_for(self, what: str, timeout_s: float, stop: Wakeup | None) -> None:
        """Wait until attribute `what` of every worker is set."""
        deadline_s = time.monotonic() + timeout_s
        watched = (self, stop) if stop is not None else (self,)
        while not all(getattr(worker, what) for worker in self._workers):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                late = [worker.rank for worker in self._workers if not getattr(worker, what)]
                raise EngineError(f"worker {late[0]} is not {what} after {timeout_s:.0f} s")
            transport.wait(min(left_s, 1.0), *watched)
            if stop is not None and stop.is_set():
                raise EngineError("stopped while the workers were starting")
            self._receive()
            self._check()

    # ---- steps

    def submit(self, *steps: SchedulerOutput) -> None:
        if not self._num_in_flight:  # the time without work is not a hang
            for worker in self._workers:
                worker.last_progress_s = time.monotonic()
        self._num_in_flight += len(steps)
        self._broadcast(steps[0] if len(steps) == 1 else Steps(list(steps)))

    def poll(self) -> ModelOutput | None:
        if not self._outputs:
            self._receive()
            self._check()
        if not self._outputs:
            return None
        self._num_in_flight -= 1
        return self._outputs.popleft()

    def pollables(self) -> tuple[Pollable, ...]:
        return (*self._listener.pollables(), *self._exits.pollables())

    def _broadcast(self, message: ToWorker) -> None:
        payload = engine_to_worker.encode(message)
        for worker in self._workers:
            if self._listener.send(worker.peer, payload) is not Delivery.SENT:
                self._check()
                raise EngineDeadError(f"worker {worker.rank} cannot be reached any more")

    # ---- what workers say

    def _receive(self) -> None:
        while (item := self._listener.recv()) is not None:
            try:
                message: FromWorker = worker_to_engine.decode(item[1])
            except ProtocolError as error:
                self._malformed += 1
                logger.warning("dropped from %r (%d so far): %s", item[0], self._malformed, error)
                continue
            self._handle(message)

    def _handle(self, message: FromWorker) -> None:
        if isinstance(message, ModelOutput | StepOutputs):
            outputs = message.outputs if isinstance(message, StepOutputs) else [message]
            self._workers[0].last_heard_s = time.monotonic()
            self._outputs += [output for output in outputs if output.generation == self._generation]
            return
        if not 0 <= message.rank < len(self._workers):
            logger.warning("dropped a message of rank %d, which does not exist", message.rank)
            return
        worker = self._workers[message.rank]
        worker.last_heard_s = time.monotonic()
        if isinstance(message, WorkerHeartbeat):
            if message.progress != worker.progress:
                worker.progress, worker.last_progress_s = (message.progress, worker.last_heard_s)
        elif isinstance(message, Failed):
            error = ModelError if message.bad_input else EngineDeadError
            prefix = "" if message.bad_input else f"worker {message.rank} failed: {message.kind}: "
            raise error(prefix + message.message)
        elif isinstance(message, WorkerHello):
            if (message.version, message.model) != (PROTOCOL_VERSION, self._config.model):
                raise EngineError(
                    f"worker {message.rank} speaks protocol {message.version} and serves {message.model!r}; "
                    f"this engine speaks {PROTOCOL_VERSION} and serves {self._config.model!r}"
                )
            worker.pid = message.pid
        elif isinstance(message, Ready):
            worker.ready = message
        elif isinstance(message, Started):
            worker.started, worker.swap_blocks_per_s = True, message.swap_blocks_per_s

    def _check(self) -> None:
        """Raise EngineDeadError for a worker that has ended, is silent, or makes no progress with its step.

        Silence counts once a worker is ready: importing torch from a cold disk holds the GIL, and with it the thread of
        its heartbeat, for as long as that takes. Until then there is the deadline of start().
        """
        now_s = time.monotonic()
        limit_s = self._config.heartbeat_timeout_s
        for worker in self._workers:
            reason = worker.child.exited() if worker.child else None
            if reason is not None:
                self._receive_late()
                raise EngineDeadError(f"worker {worker.rank} (pid {worker.pid}) died: {reason}")
            if worker.ready is not None and now_s - worker.last_heard_s > limit_s:
                raise EngineDeadError(f"worker {worker.rank} (pid {worker.pid}) has been silent for {limit_s:.0f} s")
            if self._num_in_flight and now_s - worker.last_progress_s > limit_s:
                raise EngineDeadError(f"worker {worker.rank} (pid {worker.pid}) is stuck: no layer in {limit_s:.0f} s")

    def _receive_late(self) -> None:
        """A worker that fails sends the reason before it ends; that message may still be on its way."""
        deadline_s = time.monotonic() + LATE_MESSAGE_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._receive()
            transport.wait(left_s, self._listener)

    # ---- end

    def close(self) -> None:
        payload = engine_to_worker.encode(Shutdown())
        children = [worker.child for worker in self._workers if worker.child is not None]
        for worker in self._workers:
            self._listener.send(worker.peer, payload)
        for child in children:
            child.stop(STOP_GRACE_S)
        self._listener.close()
        self._exits.close()

"""MultiprocExecutor: starts and watches worker processes on this host, and speaks to them over one ROUTER socket."""

import time
from collections import deque
from typing import NamedTuple

import msgspec

from vllm_lite import transport
from vllm_lite.checkpoint.read_ahead import start_reading_ahead
from vllm_lite.config import ResolvedConfig, WorkerSettings
from vllm_lite.errors import EngineError, ProtocolError
from vllm_lite.executor.health import Failure, RankHealth, first_failure, slowest
from vllm_lite.executor.meeting_place import MeetingPlace
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
"""How long the cause may take to arrive once its effect was noticed: the last message of a worker that has ended, or
that of a rank for which another one waited."""
MUST_AGREE = ("groups", "max_model_len", "vocab_size", "eos_token_ids")
"""Fields of Ready that are properties of the model, so that every rank must have the same."""
RankMessage = WorkerHello | Ready | Started | WorkerHeartbeat | Failed

logger = log.get(__name__)


class WorkerState:
    """What the engine knows of the worker of one rank: its process, its health, and its answers during the start."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.child: supervise.Child | None = None
        self.health = RankHealth(rank)
        self.ready: Ready | None = None
        self.started: Started | None = None

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
        self,
        config: ResolvedConfig,
        address: str,
        generation: int,
        worker_module: str,
        tcp: WorkerTcp | None = None,
        group_folder: str = "",
    ) -> None:
        """`group_folder`: a private folder to be made, and removed again, where several ranks share the model."""
        self._config = config
        self._worker_module = worker_module
        self._generation = generation
        self._exits = Wakeup()
        self._listener = transport.bind(address, tcp and tcp.listen)
        self._worker_address = self._listener.tcp_address or address
        self._worker_keys = tcp and tcp.worker_keys
        self._workers = [WorkerState(rank) for rank in range(config.tensor_parallel_size)]
        self._ranks = [worker.health for worker in self._workers]
        self._meeting_place = MeetingPlace(config.tensor_parallel_size, group_folder)
        self._outputs: deque[ModelOutput] = deque()
        self._num_in_flight = 0
        self._malformed = 0

    # ---- start

    def start(self, timeout_s: float, stop: Wakeup) -> Ready:
        if self._config.load_format != "dummy":
            start_reading_ahead(self._config.model)
        for worker in self._workers:  # all of them first, so that they load side by side
            worker.child = self._spawn(worker.rank)
            worker.health.pid = worker.child.pid
        log.moment("engine", SPAWNS_WORKERS)
        self._wait_for("ready", timeout_s, stop)
        return _agreed([worker.ready for worker in self._workers if worker.ready is not None])

    def _spawn(self, rank: int) -> supervise.Child:
        in_thread = self._config.single_process
        group = self._meeting_place.invite(in_thread=in_thread)
        return supervise.spawn(
            self._worker_module,
            WorkerSettings(self._config, self._worker_address, rank, self._generation, self._worker_keys, group),
            f"worker {rank}",
            lambda _reason: self._exits.set(),
            in_thread=in_thread,
            fds=self._meeting_place.fds,
        )

    def allocate(self, num_blocks: int, num_host_blocks: int) -> float:
        self._broadcast(Start(self._generation, num_blocks, num_host_blocks))
        self._wait_for("started", self._config.ready_timeout_s, None)
        return min(worker.started.swap_blocks_per_s for worker in self._workers if worker.started is not None)

    def _wait_for(self, what: str, timeout_s: float, stop: Wakeup | None) -> None:
        """Wait until attribute `what` of every worker is set."""
        deadline_s = time.monotonic() + timeout_s
        watched = (self, stop) if stop is not None else (self,)
        while late := [worker.health for worker in self._workers if getattr(worker, what) is None]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise EngineError(f"worker {slowest(late).rank} is not {what} after {timeout_s:.0f} s")
            transport.wait(min(left_s, 1.0), *watched)
            if stop is not None and stop.is_set():
                raise EngineError("stopped while the workers were starting")
            self._receive()
            self._check()

    # ---- steps

    def submit(self, *steps: SchedulerOutput) -> None:
        if not self._num_in_flight:  # the time without work is not a hang
            for rank in self._ranks:
                rank.last_progress_s = time.monotonic()
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
                worker.health.on_unreachable(time.monotonic())
                self._check()

    # ---- what workers say

    def _receive(self) -> None:
        while (item := self._listener.recv()) is not None:
            try:
                message: FromWorker = worker_to_engine.decode(item[1])
            except ProtocolError as error:
                self._malformed += 1
                logger.warning("dropped from %r (%d so far): %s", item[0], self._malformed, error)
                continue
            if isinstance(message, ModelOutput | StepOutputs):
                self._take(item[0], message)
            elif not 0 <= message.rank < len(self._workers) or message.generation != self._generation:
                logger.warning("dropped a message of rank %d, generation %d", message.rank, message.generation)
            else:
                self._handle(self._workers[message.rank], message)

    def _take(self, peer: bytes, message: ModelOutput | StepOutputs) -> None:
        """Only rank 0 answers."""
        first = self._workers[0]
        if peer != first.peer:
            logger.warning("dropped an output of %r: it is worker 0 that answers", peer)
            return
        first.health.last_heard_s = time.monotonic()
        outputs = message.outputs if isinstance(message, StepOutputs) else [message]
        self._outputs += [output for output in outputs if output.generation == self._generation]

    def _handle(self, worker: WorkerState, message: RankMessage) -> None:
        health = worker.health
        health.last_heard_s = time.monotonic()
        if isinstance(message, WorkerHeartbeat):
            health.on_heartbeat(message, health.last_heard_s)
        elif isinstance(message, Failed):
            health.on_failed(message, health.last_heard_s)
        elif isinstance(message, WorkerHello):
            if (message.version, message.model) != (PROTOCOL_VERSION, self._config.model):
                raise EngineError(
                    f"worker {message.rank} speaks protocol {message.version} and serves {message.model!r}; "
                    f"this engine speaks {PROTOCOL_VERSION} and serves {self._config.model!r}"
                )
            health.pid = message.pid
        elif isinstance(message, Ready):
            worker.ready, health.is_loaded = message, True
        else:
            worker.started = message

    # ---- what becomes of them

    def _check(self) -> None:
        """Raise the error of the rank that failed first, if one has. Whatever it is, the others are not left waiting.

        A rank that fails sends the reason before it ends; that message may still be on its way.
        """
        failure = self._judge()
        if failure is None:
            return
        self._meeting_place.end()
        deadline_s = time.monotonic() + LATE_MESSAGE_S
        while not failure.is_certain and (left_s := deadline_s - time.monotonic()) > 0:
            self._exits.clear()
            transport.wait(left_s, self)
            self._receive()
            failure = self._judge() or failure
        raise failure.error

    def _judge(self) -> Failure | None:
        now_s = time.monotonic()
        for worker in self._workers:
            reason = worker.child.exited() if worker.child is not None else None
            if reason is not None and worker.health.ended is None:
                worker.health.on_ended(reason, now_s)
        limit_s, has_work = self._config.heartbeat_timeout_s, self._num_in_flight > 0
        if all(rank.is_well(now_s, limit_s) for rank in self._ranks):
            return None
        aborted = self._meeting_place.first_to_abort()
        return first_failure(self._ranks, now_s, limit_s, has_work=has_work, first_to_abort=aborted)

    # ---- end

    def close(self) -> None:
        self._meeting_place.end()
        payload = engine_to_worker.encode(Shutdown())
        for worker in self._workers:
            self._listener.send(worker.peer, payload)
        supervise.stop_all([worker.child for worker in self._workers if worker.child is not None], STOP_GRACE_S)
        self._listener.close()
        self._exits.close()
        self._meeting_place.close()


def _agreed(answers: list[Ready]) -> Ready:
    """What all workers together can do: the fewest blocks, the largest ones. Raises EngineError if they differ in what
    must be equal."""
    first = answers[0]
    for other in answers[1:]:
        for name in MUST_AGREE:
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                raise EngineError(
                    f"workers {first.rank} and {other.rank} do not serve the same model: "
                    f"{name} is {mine!r} of the one and {theirs!r} of the other"
                )
    num_blocks = min(answer.num_blocks for answer in answers)
    return msgspec.structs.replace(first, num_blocks=num_blocks, block_bytes=max(a.block_bytes for a in answers))

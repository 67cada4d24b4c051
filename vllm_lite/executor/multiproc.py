"""MultiprocExecutor: starts and watches worker processes on this host, connected by one ROUTER socket."""

import threading
import time
from collections import deque
from typing import NamedTuple

import msgspec

from vllm_lite import transport
from vllm_lite.checkpoint.shard import answering_rank, num_ranks
from vllm_lite.checkpoint.tensors.read_ahead import start_reading_ahead
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import EngineError, ProtocolError
from vllm_lite.executor.base import Failure, WorkersLostError
from vllm_lite.executor.health import RankHealth, awaits_cause, first_failure, slowest
from vllm_lite.executor.meeting_place import MeetingPlace
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.codec import MAX_WORKER_BYTES, FromWorker, ToWorker, engine_to_worker, worker_to_engine
from vllm_lite.protocol.control import (
    AdapterRead,
    BeginProfile,
    DropAdapter,
    EndProfile,
    Failed,
    Imported,
    Load,
    Profiled,
    ReadAdapter,
    Ready,
    Shutdown,
    Start,
    Started,
    StepTiming,
    WorkerHeartbeat,
    WorkerHello,
)
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput, StepOutputs, Steps
from vllm_lite.protocol.transfers import StoredKeys, Transfer, TransferAnswer, Transferred
from vllm_lite.runtime import log, supervise
from vllm_lite.transport import Delivery, Tcp, Wakeup
from vllm_lite.transport.interface import Pollable

SPAWNS_WORKERS = "starts its workers"
STOP_GRACE_S = 2.0
GONE_S = 8.0
"""Maximum seconds until workers are gone: those that end neither at SIGTERM nor at SIGKILL hang in the kernel."""
LATE_MESSAGE_S = 0.5
"""Seconds for a cause to arrive after its effect was noticed: the last message of a worker that has ended."""
MOST_APART_S = 7.0
"""Seconds between two checks of the workers that mean that the engine did not run: when idle it checks every 5 s."""
MUST_AGREE = ("groups", "max_model_len", "vocab_size", "eos_token_ids")
"""Fields of Ready that are properties of the model and must be equal on all ranks."""
RankMessage = (
    WorkerHello | Imported | Ready | Started | AdapterRead | Profiled | TransferAnswer | WorkerHeartbeat | Failed
)

logger = log.get(__name__)


class WorkerState:
    """State of one rank's worker: its process, its health, and its answers during the start."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.child: supervise.Child | None = None
        self.health = RankHealth(rank)
        self.is_here = False
        """Whether it has sent WorkerHello, so that it can be reached."""
        self.has_imported = False
        self.ready: Ready | None = None
        self.started: Started | None = None

    @property
    def peer(self) -> bytes:
        """ZeroMQ identity with which the worker connects."""
        return f"worker-{self.rank}".encode()

    def look_at(self, child: supervise.Child, now_s: float) -> None:
        """Check the state of its process."""
        reason, health = child.exited(), self.health
        if reason is not None and health.ended is None:
            health.on_ended(reason, now_s)
        elif not health.has_torch:  # later its heartbeats show it
            health.on_looked_at(now_s, is_stopped=child.is_stopped())


class StartDeadline:
    """A deadline `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def has_passed(self) -> bool:
        return time.monotonic() >= self._end_s


class WorkerTcp(NamedTuple):
    """Address for workers that connect over tcp, and the folder of their keys; None: without encryption."""

    listen: Tcp
    worker_keys: str | None


class MultiprocExecutor:
    """See Executor. One rank answers steps for all: the first of the last stage. Workers connect to `address`, or to
    `tcp` if that is given."""

    def __init__(
        self,
        config: ResolvedConfig,
        address: str,
        generation: int,
        worker_module: str,
        tcp: WorkerTcp | None = None,
        group_folder: str = "",
    ) -> None:
        """`group_folder`: a private folder that is created, and removed again, for groups of several ranks."""
        self._config = config
        self._worker_module = worker_module
        self._generation = generation
        self._exits = Wakeup()
        self._listener = transport.bind(address, tcp and tcp.listen, MAX_WORKER_BYTES)
        self._worker_address = self._listener.tcp_address or address
        self._worker_keys = tcp and tcp.worker_keys
        self._workers = [WorkerState(rank) for rank in range(num_ranks(config))]
        self._ranks = [worker.health for worker in self._workers]
        self.meeting_place = self._meet(group_folder)
        self._outputs: deque[ModelOutput] = deque()
        self._num_in_flight = 0
        self._malformed = 0
        self._expert_tokens: list[list[int]] = []
        self._model: str | None = None
        """Checkpoint folder given to begin_load()."""
        self._adapter_answers: dict[int, dict[int, AdapterRead]] = {}
        self._adapters_read: list[AdapterRead] = []
        self._profiled: dict[int, Profiled] = {}
        self._transfers: dict[int, list[Transferred]] = {}
        """Ticket -> answers so far, of transfers that some ranks have not ended."""
        self._transferred: list[TransferAnswer] = []
        self._deadline: StartDeadline | None = None
        """Deadline of the current part of the start; None before begin_load()."""
        self._failure: Failure | None = None
        self._failed_s = 0.0
        self._judged_s = time.monotonic()
        self._gone_by: StartDeadline | None = None
        """Deadline for the workers' end; None before end()."""
        self.are_gone = threading.Event()

    def _meet(self, folder: str) -> MeetingPlace:
        return MeetingPlace(num_ranks(self._config), folder)

    # ---- start

    def spawn(self) -> None:
        for worker in self._workers:
            worker.child = self._spawn(worker.rank)
            worker.health.pid = worker.child.pid
        supervise.end_early()  # the early process is of no use for several ranks, threads or other worker modules
        log.moment("engine", SPAWNS_WORKERS)

    def is_prepared(self) -> bool:
        self._receive()
        self._check()
        return all(worker.has_imported for worker in self._workers)

    def begin_load(self, timeout_s: float, model: str | None = None) -> None:
        self._model = model
        if _reads_checkpoint(self._config):
            start_reading_ahead(model or self._config.model)
        self._deadline = StartDeadline(timeout_s)
        for worker in self._workers:
            if worker.is_here:
                self._deliver(worker, engine_to_worker.encode(Load(self._generation, model)))

    def ready(self) -> Ready | None:
        if not self._have_all("ready"):
            return None
        return _agreed([worker.ready for worker in self._workers if worker.ready is not None])

    def _spawn(self, rank: int) -> supervise.Child:
        in_thread = self._config.single_process
        group = self.meeting_place.invite(in_thread=in_thread)
        return supervise.spawn(
            self._worker_module,
            WorkerSettings(self._config, self._worker_address, rank, self._generation, self._worker_keys, group),
            f"worker {rank}",
            lambda _reason: self._exits.set(),
            in_thread=in_thread,
            fds=self.meeting_place.fds,
        )

    def begin_allocate(self, num_blocks: int, num_host_blocks: int, timeout_s: float) -> None:
        self._deadline = StartDeadline(timeout_s)
        self._broadcast(Start(self._generation, num_blocks, num_host_blocks))

    def started(self) -> float | None:
        if not self._have_all("started"):
            return None
        return min(worker.started.swap_blocks_per_s for worker in self._workers if worker.started is not None)

    def timings(self) -> tuple[StepTiming, ...]:
        started = self._workers[0].started
        return () if started is None else started.timings

    def _have_all(self, what: str) -> bool:
        """Whether attribute `what` of every worker is set. Raises EngineError past the deadline."""
        self._receive()
        self._check()
        late = [worker.health for worker in self._workers if getattr(worker, what) is None]
        if late and self._deadline is not None and self._deadline.has_passed():
            raise EngineError(f"worker {slowest(late).rank} is not {what} after {self._deadline.timeout_s:.0f} s")
        return not late

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
            self._deliver(worker, payload)

    def _deliver(self, worker: WorkerState, payload: bytes) -> None:
        if self._listener.send(worker.peer, payload) is not Delivery.SENT:
            worker.health.on_unreachable(time.monotonic())
            self._check()

    def read_adapter(self, number: int, name: str, path: str) -> None:
        self._broadcast(ReadAdapter(number, name, path))

    def drop_adapter(self, number: int) -> None:
        self._broadcast(DropAdapter(number))

    def adapters_read(self) -> list[AdapterRead]:
        self._receive()
        self._check()
        read, self._adapters_read = self._adapters_read, []
        return read

    def _on_adapter(self, message: AdapterRead) -> None:
        """Collect the ranks' answers. If one rank failed to read the adapter, the others drop it again."""
        answers = self._adapter_answers.setdefault(message.number, {})
        answers[message.rank] = message
        if len(answers) < len(self._workers):
            return
        del self._adapter_answers[message.number]
        answer = next((each for each in answers.values() if each.error is not None), message)
        if answer.error is not None:
            self.drop_adapter(message.number)
        if len({each.digest for each in answers.values()}) > 1:  # hosts with other files under the same path
            answer = msgspec.structs.replace(answer, digest=b"")
        self._adapters_read.append(answer)

    def transfer(self, message: Transfer) -> None:
        self._broadcast(message)

    def transferred(self) -> list[TransferAnswer]:
        self._receive()
        self._check()
        answers, self._transferred = self._transferred, []
        return answers

    def _on_transferred(self, message: TransferAnswer) -> None:
        """Collect the ranks' answers: a transfer has ended with the last one, since each rank has a part of a block."""
        if isinstance(message, StoredKeys):
            self._transferred.append(message)
            return
        answers = self._transfers.setdefault(message.ticket, [])
        answers.append(message)
        if len(answers) == len(self._workers):
            del self._transfers[message.ticket]
            failed = tuple(sorted({place for answer in answers for place in answer.failed}))
            took_s = max(answer.took_s for answer in answers)
            self._transferred.append(msgspec.structs.replace(message, failed=failed, took_s=took_s))

    def profile(self, message: BeginProfile | EndProfile) -> None:
        self._profiled.clear()
        self._broadcast(message)

    def profiled(self) -> list[Profiled] | None:
        self._receive()
        self._check()
        return list(self._profiled.values()) if len(self._profiled) == len(self._workers) else None

    def expert_tokens(self) -> list[list[int]]:
        return self._expert_tokens

    # ---- messages of workers

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
        """Take step results, from the one rank that answers for all."""
        answering = self._workers[answering_rank(self._config)]
        if peer != answering.peer:
            logger.warning("dropped an output of %r: only worker %d sends outputs", peer, answering.rank)
            return
        answering.health.last_heard_s = time.monotonic()
        outputs = message.outputs if isinstance(message, StepOutputs) else [message]
        self._outputs += [output for output in outputs if output.generation == self._generation]

    def _handle(self, worker: WorkerState, message: RankMessage) -> None:
        health = worker.health
        health.last_heard_s = time.monotonic()
        if isinstance(message, WorkerHeartbeat):
            health.on_heartbeat(message, health.last_heard_s)
            self._expert_tokens = message.expert_tokens or self._expert_tokens
        elif isinstance(message, AdapterRead):
            self._on_adapter(message)
        elif isinstance(message, Profiled):
            self._profiled[message.rank] = message
        elif isinstance(message, Transferred | StoredKeys):
            self._on_transferred(message)
        elif isinstance(message, Failed):
            health.on_failed(message, health.last_heard_s)
        elif isinstance(message, WorkerHello):
            if (message.version, message.model) != (PROTOCOL_VERSION, self._config.model):
                raise EngineError(
                    f"worker {message.rank} speaks protocol {message.version} and serves {message.model!r}; "
                    f"this engine speaks {PROTOCOL_VERSION} and serves {self._config.model!r}"
                )
            health.pid, worker.is_here = message.pid, True
            if self._deadline is not None and self._failure is None:
                self._deliver(worker, engine_to_worker.encode(Load(self._generation, self._model)))
        elif isinstance(message, Imported):
            worker.has_imported = True
        elif isinstance(message, Ready):
            worker.ready, health.is_loaded = message, True
        else:
            worker.started = message

    # ---- failures

    def _check(self) -> None:
        """Raise WorkersLostError if a rank has failed, and make the other ranks leave their waits."""
        if self._failure is None:
            self._failure = self._judge()
            if self._failure is None:
                return
            self._failed_s = time.monotonic()
            self.meeting_place.end()
        raise WorkersLostError(str(self._failure.error))

    def failure(self) -> Failure | None:
        """See Executor. A failing rank sends its reason before it ends; wait LATE_MESSAGE_S for that message."""
        if self._failure is None or self._failure.is_certain:
            return self._failure
        self._exits.clear()
        self._receive()
        self._failure = self._judge() or self._failure
        is_known = self._failure.is_certain or self._is_late(self._workers[self._failure.rank].health)
        return self._failure if is_known else None

    def _is_late(self, rank: RankHealth) -> bool:
        """Whether nothing more will be known of the cause than `rank`: its last message would have arrived, and no
        other rank is about to end if all that have reported lost another one. A process with torch takes seconds to end
        when all cores are busy."""
        now_s = time.monotonic()
        if awaits_cause(self._ranks):
            return now_s - self._failed_s >= self._config.heartbeat_timeout_s
        return now_s - max(self._failed_s, rank.known_s) >= LATE_MESSAGE_S

    def _judge(self) -> Failure | None:
        now_s = time.monotonic()
        absent_s = now_s - self._judged_s - MOST_APART_S
        if absent_s > 0:  # this process was stopped, and perhaps all of its machine or container with it
            for rank in self._ranks:
                rank.excuse(absent_s, now_s)
        self._judged_s = now_s
        for worker in self._workers:
            if worker.child is not None:
                worker.look_at(worker.child, now_s)
        limit_s, has_work = self._config.heartbeat_timeout_s, self._num_in_flight > 0
        if all(rank.is_well(now_s, limit_s) for rank in self._ranks):
            return None
        aborted = self.meeting_place.first_to_abort()
        return first_failure(self._ranks, now_s, limit_s, has_work=has_work, first_to_abort=aborted)

    # ---- end

    def end(self) -> None:
        """See Executor. A thread waits until the workers are gone."""
        if self._gone_by is not None:
            return
        self._gone_by = StartDeadline(GONE_S)
        self.meeting_place.end()
        payload = engine_to_worker.encode(Shutdown())
        for worker in self._workers:
            self._listener.send(worker.peer, payload)
        threading.Thread(target=self._bury, name="workers stop", daemon=True).start()

    def _bury(self) -> None:
        supervise.stop_all([worker.child for worker in self._workers if worker.child is not None], STOP_GRACE_S)
        self.are_gone.set()
        self._exits.set()

    def has_ended(self) -> bool:
        self._exits.clear()
        self._receive()  # unread messages would end every wait at once
        if not self.are_gone.is_set() and self._gone_by is not None and not self._gone_by.has_passed():
            return False
        for worker in self._workers:
            if worker.child is not None and worker.child.exited() is None:
                raise EngineError(f"{worker.health} cannot be ended")
        return True

    def close(self) -> None:
        self.end()
        self.are_gone.wait(GONE_S)
        self._listener.close()
        self._exits.close()
        self.meeting_place.close()


def _agreed(answers: list[Ready]) -> Ready:
    """Common Ready of all workers: minimum number of blocks, maximum block size. Raises EngineError if they differ in a
    field of MUST_AGREE."""
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
    num_slots = min(answer.num_state_slots for answer in answers)
    block_bytes = max(answer.block_bytes for answer in answers)
    return msgspec.structs.replace(first, num_blocks=num_blocks, block_bytes=block_bytes, num_state_slots=num_slots)


def _reads_checkpoint(config: ResolvedConfig) -> bool:
    """Whether workers will read most of the checkpoint, and only after their imports. Not with a weight cache: workers
    that pack read at once, and others read the cache (except what it does not keep, such as fused experts)."""
    is_kept = config.weight_cache is not None and config.quantization is not None and config.device == "cpu"
    return config.load_format != "dummy" and not is_kept

"""The worker process: it exchanges messages with the engine over one connection, and sends heartbeats over another.

Hello -> (Load) -> Ready -> (Start) -> Started -> then the answering rank sends one ModelOutput per SchedulerOutput, and
all ranks one AdapterRead per ReadAdapter and one Profiled per begin or end of a profile -> (Shutdown). After Hello it
imports torch, so that a standby group has done that before its Load. Any error is sent to the engine as Failed, makes
the other ranks leave their waits, and ends the process with status 1. `main` also runs as a thread of a client
(--single-process), so nothing here changes signals or log handlers, or exits the process.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import msgspec

from vllm_lite.checkpoint.shard import answering_rank
from vllm_lite.errors import ConfigError, EngineError, ProtocolError
from vllm_lite.kernels.cpu.weights.file_packer import NICENESS
from vllm_lite.models.weight_cache import Keeper, PackedSource, kept_private, packed_weights
from vllm_lite.process_settings import WorkerSettings
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.codec import FromWorker, ToWorker, engine_to_worker, worker_to_engine
from vllm_lite.protocol.control import (
    BeginProfile,
    DropAdapter,
    EndProfile,
    Imported,
    Load,
    ReadAdapter,
    Shutdown,
    Start,
    WorkerHeartbeat,
    WorkerHello,
)
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput, StepOutputs, Steps
from vllm_lite.protocol.transfers import Transfer
from vllm_lite.runtime import log, torch_import
from vllm_lite.runtime.cpu_binding import NONE, apply, plan_binding, threads_of_the_user
from vllm_lite.runtime.supervise import STANDBY_NAME, WORKER_NAME, keep_from_collections, name_process, run_child
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport import Connection, Delivery, connect, finish
from vllm_lite.transport.interface import poller
from vllm_lite.transport.time_slice import reset_slice
from vllm_lite.worker.membership import Membership
from vllm_lite.worker.progress import Progress, no_garbage_collection

if TYPE_CHECKING:
    from vllm_lite.worker.disk.transfers import DiskTransfers
    from vllm_lite.worker.worker import Worker

FIRST_GENERATION = 1
"""Generation of an engine's first group, which loads at once."""
HEARTBEAT_EVERY_S = 0.5
DISK_GRACE_S = 1.0
"""Seconds in which a worker that ends may still write KV; the engine waits twice as long for it."""
CHECK_ENGINE_EVERY_S = 1.0
"""Seconds between a waiting worker's checks that the engine is still connected."""

logger = log.get(__name__)


def main(settings: WorkerSettings, stop: Wakeup) -> int:
    """Serve the engine at `settings.address` until it sends Shutdown, or `stop` is set. Returns the exit status."""
    member = Membership(settings)
    try:
        connection = connect(settings.address, f"worker-{settings.rank}".encode(), settings.keys or False)
    except (ConfigError, EngineError) as error:
        logger.error("%s", error)
        member.abort()
        member.close()
        return 1
    try:
        WorkerLoop(settings, connection, stop, member).run()
    except Exception as error:
        failed = member.failed(error)
        logger.log(logging.DEBUG if member.was_dismissed() else logging.ERROR, "%s: %s", failed.kind, failed.message)
        logger.debug("where it happened", exc_info=True)
        connection.send(worker_to_engine.encode(failed))
        member.abort()  # after the message, so that it precedes those of the ranks that this one leaves
        return 1
    finally:
        member.close()
        connection.close()
    return 0


class WorkerLoop:
    """Answers the messages of one engine, from Hello to Shutdown."""

    def __init__(self, settings: WorkerSettings, connection: Connection, stop: Wakeup, member: Membership) -> None:
        self.settings = settings
        self.connection = connection
        self.stop = stop
        self.member = member
        self.progress = Progress()
        self.poller = poller(connection, stop)
        self.disk: DiskTransfers | None = None
        self.record_ahead: Callable[[], bool] = lambda: False
        """Does a few milliseconds of work for later steps; False if none is left."""

    def run(self) -> None:
        settings = self.settings
        config, rank, generation = settings.config, settings.rank, settings.generation
        self.send(WorkerHello(PROTOCOL_VERSION, config.model, rank, generation, os.getpid()))
        with _Ahead(settings) as ahead:
            if generation == FIRST_GENERATION:  # later groups take no memory before their Load
                ahead.begin()
            kind = import_worker()
            log.moment("worker", "imports torch")
            if generation != FIRST_GENERATION:
                self.send(Imported(rank, generation))
            message = self.receive()
            if message is None:
                return
            if not isinstance(message, Load):
                raise ProtocolError(f"expected Load, got {type(message).__name__}")
            name_process(f"{WORKER_NAME}{rank}")
            settings = _with_model(settings, message.model)
            if generation != FIRST_GENERATION:
                settings = msgspec.structs.replace(settings, config=kept_private(settings.config))
            self.settings = ahead.settings = settings
            ahead.begin()
            self.serve(kind, ahead)

    def serve(self, kind: "type[Worker]", ahead: "_Ahead") -> None:
        """Serve from Load to the end."""
        settings, rank = self.settings, self.settings.rank
        with _Heartbeat(settings, self.progress, self.member):
            worker = kind(settings.config, rank, self.progress, generation=settings.generation)
            communicator = self.member.connect(worker.device.torch, worker.max_logits_bytes())
            self.send(worker.load(communicator, ahead.packer))
            ahead.keep()
            log.moment("worker", "loads the weights")
            message = self.receive(settings.config.ready_timeout_s)
            if message is None:
                return
            if not isinstance(message, Start):
                raise ProtocolError(f"expected Start, got {type(message).__name__}")
            started = worker.start(message)
            keep_from_collections()  # otherwise a garbage collection within a step would take 0.1 s
            if (disk := worker.disk) is not None:
                self.disk, self.poller = disk, poller(self.connection, self.stop, disk.announced)
                disk.await_first_look()
                self.say_transferred()  # before the engine schedules requests that waited for this worker
            self.send(started)
            self.record_ahead = worker.record_ahead
            log.moment("worker", "KV cache, first step")
            try:
                self.answer_all(worker)
            finally:
                if disk is not None:
                    disk.close(DISK_GRACE_S)

    def answer_all(self, worker: "Worker") -> None:
        """Run steps and handle the engine's other messages, until the end."""
        left: ToWorker | None = None
        while (message := left or self.receive()) is not None and not isinstance(message, Shutdown):
            left = None
            self.say_transferred()
            if isinstance(message, SchedulerOutput) and worker.can_run_ahead(message):
                left = self.run_ahead(worker, message)
                continue
            if isinstance(message, ReadAdapter):
                self.send(worker.load_adapter(message))
                continue
            if isinstance(message, BeginProfile | EndProfile):
                self.send(worker.profile(message))
                continue
            if isinstance(message, DropAdapter):
                worker.drop_adapter(message.number)
                continue
            if isinstance(message, Transfer):
                if self.disk is None:
                    raise ProtocolError("a Transfer was sent, but kv_cache_dir is not set")
                self.disk.submit(message, worker.device.torch)
                continue
            answer = execute(worker, message)
            if self.settings.rank == answering_rank(self.settings.config):
                self.send(answer)

    def say_transferred(self) -> None:
        """Send the results of transfers that have ended."""
        if self.disk is not None and self.disk.announced.is_set():
            for answer in self.disk.take():
                self.send(answer)

    def run_ahead(self, worker: "Worker", step: SchedulerOutput) -> ToWorker | None:
        """Launch the step, and further ones that arrive while the device is busy; answer each when its tokens are here.

        Returns the first message that is no such step, after answering all steps before it; None if no step is left.
        """
        overlap, message = worker.overlap, None
        if overlap is None:
            raise RuntimeError("this worker launches no steps ahead")
        overlap.launch(step)
        while overlap and message is None:
            if (payload := self._before(overlap.is_done)) is not None:
                message = engine_to_worker.decode(payload)
                if isinstance(message, SchedulerOutput) and worker.can_run_ahead(message):
                    overlap.launch(message)
                    message = None
            self.send(overlap.take())
        while overlap:
            self.send(overlap.take())
        return message

    def _before(self, is_done: Callable[[], bool]) -> bytes | None:
        """The engine's next message, or None if `is_done()` becomes true before. It spins, since a step takes
        milliseconds and a sleeping process would wake up late. `is_done` raises DeviceHungError in the end."""
        while not is_done():
            if (payload := self.connection.recv()) is not None:
                return payload
            time.sleep(0)
        return None

    def receive(self, timeout_s: float = float("inf")) -> ToWorker | None:
        """The engine's next message; None after Shutdown, or if `stop` is set. Raises EngineError after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        # No spinning before the wait: the engine's part of a step takes longer than a spin may last, and needs the core
        # (measured: 3 of 1000 steps arrived within 50 us).
        while (payload := self.connection.recv()) is None:
            left_s = deadline_s - time.monotonic()
            if self.stop.is_set():
                return None
            if self.connection.lost():
                raise EngineError("the engine has gone")
            if left_s <= 0:
                raise EngineError(f"the engine was silent for {timeout_s:g} s")
            self.say_transferred()
            if self.record_ahead():
                continue
            self.progress.is_idle = True
            self.poller.poll(int(1000 * min(left_s, CHECK_ENGINE_EVERY_S)))
        self.progress.is_idle = False
        message = engine_to_worker.decode(payload)
        return None if isinstance(message, Shutdown) else message

    def send(self, message: FromWorker) -> None:
        if self.connection.send(worker_to_engine.encode(message)) is not Delivery.SENT:
            raise EngineError("the engine does not read what its worker sends")


def _with_model(settings: WorkerSettings, model: str | None) -> WorkerSettings:
    """The settings with checkpoint `model`, if one is given."""
    if model is None:
        return settings
    return msgspec.structs.replace(settings, config=msgspec.structs.replace(settings.config, model=model))


def execute(worker: "Worker", message: ToWorker) -> ModelOutput | StepOutputs:
    if isinstance(message, SchedulerOutput):
        return worker.execute(message)
    if isinstance(message, Steps):
        return StepOutputs(worker.run(message.steps))
    raise ProtocolError(f"expected a SchedulerOutput, got {type(message).__name__}")


class _Ahead:
    """Reads or packs weights on other threads, while this one imports torch and builds the model."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.packer: PackedSource | None = None
        self.has_begun = False

    def begin(self) -> None:
        """Begin to read or pack the weights, unless that has begun already."""
        if not self.has_begun:
            self.has_begun = True
            config, is_first = self.settings.config, self.settings.generation == FIRST_GENERATION
            num_threads = config.cpu_threads or threads_of_the_user() or len(os.sched_getaffinity(0))
            # A later group has finished its imports, and streams wait for it: no lower priority.
            self.packer = packed_weights(config, self.settings.rank, num_threads, NICENESS if is_first else 0)
            log.moment("worker", "begins to pack weights")

    def keep(self) -> None:
        """Store the packed weights for the next start, with --weight-cache; called once all are loaded."""
        if isinstance(self.packer, Keeper):
            self.packer.keep()
        self.close()

    def close(self) -> None:
        if self.packer is not None:
            self.packer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Heartbeat:
    """A thread that reports progress over a connection of its own, also while the worker computes."""

    def __init__(self, settings: WorkerSettings, progress: Progress, member: Membership) -> None:
        self.settings = settings
        self.progress = progress
        self.member = member
        self.done = threading.Event()
        self.said: list[list[int]] | None = None
        self.thread = threading.Thread(target=self._beat, name=f"worker {settings.rank} heartbeat", daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join(HEARTBEAT_EVERY_S)

    def _beat(self) -> None:
        rank = self.settings.rank
        connection = connect(self.settings.address, f"worker-{rank}-heartbeat".encode(), self.settings.keys or False)
        try:
            while True:
                waiting = self.progress.is_idle or self.member.is_waiting()
                progress, experts = self.progress.count, self.expert_tokens()
                message = WorkerHeartbeat(rank, self.settings.generation, progress, waiting, experts)
                connection.send(worker_to_engine.encode(message))
                if self.done.wait(HEARTBEAT_EVERY_S):
                    return
        finally:
            connection.close()

    def expert_tokens(self) -> list[list[int]] | None:
        """Tokens per layer and expert; None if they are those of the last heartbeat."""
        counted = self.progress.expert_tokens and self.progress.expert_tokens()
        if counted == self.said:
            return None
        self.said = counted
        return counted


def import_worker() -> "type[Worker]":
    """Import torch, the slowest second of a start, without garbage collections, which would add a tenth of it.

    The objects that it created are frozen, so that no later collection scans them.
    """
    with no_garbage_collection():
        from vllm_lite.worker.worker import Worker

        keep_from_collections()
    return Worker


def process_main(settings: WorkerSettings, stop: Wakeup) -> int:
    # Before torch loads OpenMP. By default its threads spin for milliseconds at the end of a parallel region; with the
    # engine and the client on the same cores, the others then wait for a thread that is not running (measured on two
    # busy cores: 7 ms a step instead of 90).
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    config, rank = settings.config, settings.rank
    reset_slice()  # the engine's is short
    name_process(f"{STANDBY_NAME}{rank}")
    log.setup(f"worker {config.first_rank + rank}", *config.logging)
    if config.device == "cpu":
        num_threads = config.cpu_threads or threads_of_the_user()
        torch_import.put_off()
        is_here = config.distributed_executor_backend != "ray"  # Ray sets OMP_NUM_THREADS and assigns the hosts
        bind = config.cpu_bind if is_here else NONE
        apply(plan_binding(bind, config.first_rank + rank, config.ranks_on_machine, num_threads))
    log.moment("worker", "python, imports")
    try:
        return main(settings, stop)
    finally:
        finish()


if __name__ == "__main__":
    run_child(process_main, WorkerSettings)

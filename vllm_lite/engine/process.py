"""The engine process: one loop that serves the clients' socket and the workers' socket. Entry point of a child."""

import gc
import logging
import time
from collections import abc
from contextlib import contextmanager, suppress
from functools import partial

import msgspec

from vllm_lite import __version__, transport
from vllm_lite.checkpoint.sizing import check_pool, num_host_blocks
from vllm_lite.engine.blocks.disk_tier import DiskTier
from vllm_lite.engine.blocks.events import KVEventStream
from vllm_lite.engine.blocks.kv_blocks import KVBlocks
from vllm_lite.engine.client_port import GATHER_S, HEARTBEAT_S, ClientPort
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.kept_state import keep, kept
from vllm_lite.engine.observe.stats_log import StatsLog
from vllm_lite.engine.operations import Operations
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.transfers import LAST_WRITES_S
from vllm_lite.engine.workers.groups import WorkerGroups
from vllm_lite.engine.workers.recovery import Recovery
from vllm_lite.errors import ConfigError, EngineError, ModelError, ProtocolError, RequestError, VllmLiteError
from vllm_lite.executor.base import Executor, WorkersLostError
from vllm_lite.executor.select import select
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol import PROTOCOL_VERSION, api
from vllm_lite.protocol.adapters import LoadAdapter, UnloadAdapter
from vllm_lite.protocol.control import Ready
from vllm_lite.protocol.external import AbortExternal, ExternalAborted, ExternalFound, FindExternal
from vllm_lite.protocol.operations import Operation
from vllm_lite.protocol.view import GetBlock, GetView
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.wakeup import Wakeup
from vllm_lite.transport.interface import poller
from vllm_lite.transport.time_slice import shorten_slice

REFUSAL_PATIENCE_S = 2.0
"""Seconds that an engine which cannot start waits for a client, to send it the reason."""
STOP_LOOK_S = 0.05
HEARTBEAT_MS = int(1000 * HEARTBEAT_S)
GATHER_MS = int(1000 * GATHER_S)
RECOVERY_LOOK_MS = 50
"""Longest wait between two advances of a recovery or operation; most events they wait for wake the loop at once."""
YOUNG_OBJECTS = 50_000
IDLE_LOOK_MS = 5_000

logger = log.get(__name__)


class EngineProcess:
    """Owns the sockets and the clock; EngineCore owns the requests."""

    def __init__(self, settings: EngineSettings, stop: Wakeup) -> None:
        self._before = kept(settings.run_dir) if settings.life > 1 else None
        """Paused or sleeping state and weights of the engine that this one replaces, if it left any."""
        if self._before is not None:
            config = msgspec.structs.replace(settings.config, model=self._before.model)
            settings = msgspec.structs.replace(settings, config=config)
        self._config = settings.config
        self._settings = settings
        self._stop = stop
        self._epoch = time.time_ns() // 1000 % 2**53  # differs from every earlier engine at this address
        config = settings.config
        tcp = None if config.tcp_address is None else transport.Tcp(config.tcp_address, config.curve_keys)
        self.port = ClientPort(settings.address, self._epoch, tcp)
        self._kv_events: KVEventStream | None = None
        self.stats_log = StatsLog(config.stats_interval_s, config.device)

    def run(self) -> int:
        """Serve until `stop` is set. Returns the exit status: 0 after `stop`, 1 if the engine cannot start, 2 for bad
        input, 3 if its workers cannot be replaced. A new engine may succeed only after 1 or an exception."""
        groups: WorkerGroups | None = None
        core: EngineCore | None = None
        try:
            try:
                groups = WorkerGroups(partial(select, self._settings), self._config)
                core = self._start(groups)
            except VllmLiteError as error:
                return self._refuse(error)
            return self.serve(core, groups)
        finally:
            if groups is not None:
                groups.close()
            if core is not None:
                core.close()
            if self._kv_events is not None:
                self._kv_events.close()
            self.port.close()

    # ---- start

    def _start(self, groups: WorkerGroups) -> EngineCore:
        ready, sizes = self._start_workers(groups)
        num_blocks, tp = sizes.num_blocks, self._config.tensor_parallel_size
        lives = Lives(groups.generation, self._settings.life, self._settings.launch)
        with frozen_objects():
            core = EngineCore(self._config, ready, groups.executor, sizes, lives)
        core.meter.counters.generation = groups.generation
        core.adapter_loader.load_configured(groups.executor, self._stop)
        core.adapter_loader.on_listed = lambda: self.port.say_adapters(core.adapter_loader.infos)
        if self._config.kv_events_config and self._config.kv_events_config.enabled:
            rank, rejoins_s = self._config.data_parallel_rank, time.time() if self._settings.life > 1 else None
            events = self._config.kv_events_config.in_folder(self._settings.run_dir)
            disk = core.kv.optional_part(DiskTier)
            index = None if disk is None else disk.index
            self._kv_events = KVEventStream(events, core.kv.part(KVBlocks), rank, rejoins_s, index)
            logger.info("KV events are published at %s", events.endpoint)
            if events.is_on_tcp:
                logger.warning("every user of this machine can read prompts in the KV events, as they go over TCP")
        blocks = core.kv.part(KVBlocks)
        self.port.open(
            api.Welcome(
                version=PROTOCOL_VERSION,
                epoch=self._epoch,
                model=self._config.served_model_name,
                max_model_len=core.max_model_len,
                vocab_size=ready.vocab_size,
                eos_token_ids=ready.eos_token_ids,
                num_blocks=num_blocks,
                block_size=self._config.block_size,
                tokenizer=self._config.tokenizer,
                is_supervised=self._config.max_restarts > 0,
                pooler=ready.pooler,
                adapters=core.adapter_loader.infos,
                max_loras=core.adapters.limits.in_step,
                wants_marks=core.kv.wants_marks,
                kv_tokens=blocks.total_tokens,
                kv_requests=blocks.num_requests(core.max_model_len, self._config.max_num_batched_tokens),
                placeholders=ready.placeholders,
                kernels=ready.kernels,
            )
        )
        log.moment("engine", "blocks, clients' socket")
        gib = num_blocks * ready.block_bytes * tp / 2**30
        cache = f"{num_blocks} KV blocks of {self._config.block_size} tokens ({gib:.2f} GiB)"
        logger.info(
            "ready (version %s): %s, up to %d sequences of %d tokens",
            __version__,
            cache if blocks.total_tokens else "no KV cache",
            self._config.max_num_seqs,
            core.max_model_len,
        )
        return core

    def _start_workers(self, groups: WorkerGroups) -> tuple[Ready, PoolSizes]:
        """Start the first worker group and load the model. If the previous engine was asleep, start none: other
        processes may be using that memory."""
        before = self._before
        if before is not None and before.ready is not None:
            supervise.end_early()
            groups.adopt(before.ready, before.num_blocks, before.num_host_blocks)
            return before.ready, PoolSizes(before.num_blocks, before.num_host_blocks)
        ready = groups.start(self._stop)
        log.moment("engine", "waits for the model")
        check_pool(ready.num_blocks, ready.block_bytes, self._config.tensor_parallel_size)
        sizes = ready.block_bytes, ready.state_bytes, ready.media_vector_bytes
        host_blocks = num_host_blocks(self._config.swap_space, *sizes)
        blocks_per_s = groups.allocate(ready.num_blocks, host_blocks, self._stop)
        log.moment("engine", "waits for the KV cache")
        return ready, PoolSizes(ready.num_blocks, host_blocks, blocks_per_s)

    def _refuse(self, error: VllmLiteError) -> int:
        """Send the reason why this engine cannot start to all clients that wait for it."""
        is_stopped = self._stop.is_set() and isinstance(error, EngineError)  # by the user, which is no error
        logger.log(logging.INFO if is_stopped else logging.ERROR, "%s", error)
        deadline_s = time.monotonic() + REFUSAL_PATIENCE_S
        bad_input = not isinstance(error, EngineError)
        answer: api.Refused | api.Dying = api.Refused(str(error), bad_input)
        if self._settings.life > 1 and not bad_input:  # the supervisor tries again
            answer = api.Dying(str(error), is_final=False)
        while not self.port.refuse_all(answer) and not self._stop.is_set():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            transport.wait(left_s, self.port, self._stop)
        return 2 if bad_input else 1

    # ---- serve

    def serve(self, core: EngineCore, groups: WorkerGroups) -> int:
        shorten_slice()  # the loop must not wait for the workers' computing threads
        recovery = Recovery(core, groups, self.port, self._config)
        operations = Operations(core, groups, self.port, self._config, partial(keep, self._settings.run_dir))
        try:
            if self._before is not None:
                operations.restore(self._before)
            while not self._stop.is_set():
                self._serve_group(core, groups, recovery, operations)
        except (EngineError, ModelError, ProtocolError) as error:  # no workers will serve any more
            logger.error("%s", error)
            self.port.say_dying(str(error), is_final=True)
            return 3
        except Exception as error:  # a fault of ours: send it to those who wait, then raise it
            self.port.say_dying(f"the engine failed: {error!r}", is_final=not self._config.max_restarts)
            raise
        logger.info("stopping")
        self._abort_all(core)
        self.port.say_dying("the engine was stopped", is_final=True)
        self._finish_writes(core, groups.executor)
        return 0

    def _finish_writes(self, core: EngineCore, executor: Executor) -> None:
        """Let workers write the KV of chats that have ended to disk, within LAST_WRITES_S."""
        transfers, deadline_s = core.transfers, time.monotonic() + LAST_WRITES_S
        if transfers is None or core.scheduler.is_paused or not core.scheduler.has_workers:
            return
        with suppress(WorkersLostError):
            while transfers.is_writing and (left_s := deadline_s - time.monotonic()) > 0:
                self._compute(core, executor, [])
                transport.wait(min(left_s, STOP_LOOK_S), executor)

    def _serve_group(self, core: EngineCore, groups: WorkerGroups, recovery: Recovery, operations: Operations) -> None:
        """Serve until `stop` is set, or until another worker group serves, whose sockets have to be polled."""
        executor, events = groups.executor, self._kv_events
        watched = poller(self.port, executor, self._stop, *(() if events is None else (events,)))
        while groups.executor is executor and not self._stop.is_set():
            is_changing = recovery.is_on or operations.looks_soon
            patience_ms = RECOVERY_LOOK_MS if is_changing else self.patience_ms_of(core)
            watched.poll(0 if core.prefix_questions.is_on else patience_ms)
            self.serve_once(core, groups, recovery, operations)
            if events is not None:
                events.serve(time.time())

    def serve_once(self, core: EngineCore, groups: WorkerGroups, recovery: Recovery, operations: Operations) -> None:
        """One pass of the loop: read client messages, advance the steps, send outputs. Reading is bounded in time;
        unread messages end the next wait at once."""
        for peer, message in self.port.receive():
            self._handle(core, operations, peer, message)
        core.prefix_questions.advance()
        produced = core.expire()
        try:
            if recovery.advance(produced) and operations.advance():
                self._compute(core, groups.executor, produced)
                groups.look_after_standby()
        except WorkersLostError as error:
            recovery.begin(error)
        finally:
            self._publish(core, produced)

    def patience_ms_of(self, core: EngineCore) -> int:
        """Milliseconds to wait for a message. Without requests, only the workers' health is checked in between."""
        if self.port.gathers():
            return GATHER_MS
        is_idle = not (core.scheduler.requests or self.port.owes() or self.stats_log.owes)
        patience_ms = IDLE_LOOK_MS if is_idle else HEARTBEAT_MS
        if self._kv_events is not None and self._kv_events.patience_ms is not None:
            return min(patience_ms, self._kv_events.patience_ms)
        return patience_ms

    def _handle(self, core: EngineCore, operations: Operations, peer: bytes, message: api.FromClient) -> None:
        reply = partial(self.port.send, peer)
        match message:
            case api.Generate():
                self._generate(core, peer, message)
            case api.ForkRequest():
                self._fork(core, peer, message)
            case api.Abort():
                request = core.scheduler.requests.get(message.request_id)
                if request is not None and request.client == peer:  # a client that lost it to another does not end it
                    self._abort(core, request, message.samples, stopped=message.stopped)
            case api.Ping():
                reply(api.Heartbeat(self._epoch, core.scheduler.step))
            case api.GetStats():
                stats = core.stats()
                stats.malformed_messages, stats.life = self.port.malformed, self._settings.life
                reply(stats)
            case api.Describe():
                asked = message.request_ids, message.external_id
                reply(core.describe(*asked, with_content=message.with_content))
            case GetView() | GetBlock():
                reply(core.look(message))
            case api.GetPrefix():
                core.prefix_questions.ask(message.request, reply)
            case FindExternal():
                external = core.scheduler.queues.external
                reply(ExternalFound([*filter(external.is_live, message.external_ids)]))
            case AbortExternal():
                requests = core.scheduler.queues.external.live(message.external_id)
                for request in requests:
                    self._abort(core, request)
                reply(ExternalAborted(len(requests)))
            case api.ResetPrefixCache():
                reply(core.reset_prefix_cache(stored=message.stored))
            case LoadAdapter():
                core.adapter_loader.load(message, reply)
            case UnloadAdapter():
                core.adapter_loader.unload(message, reply)
            case _ if isinstance(message, Operation):
                operations.ask(peer, message)

    def _generate(self, core: EngineCore, peer: bytes, message: api.Generate) -> None:
        try:
            accepted = core.add(peer, message)
        except RequestError as error:
            core.meter.counters.rejected_requests += 1
            self.port.push(peer, api.Finished(message.request_id, message.have, [], "error", error=str(error)))
            return
        if accepted.replaced is not None:  # the previous client's stream ends; the new client receives the rest
            start = accepted.replaced_at
            reason = f"another client took over request {message.request_id!r} by sending it again"
            self.port.push(accepted.replaced, api.Finished(message.request_id, start, [], "error", error=reason))
        if accepted.resend:
            self.port.push(peer, api.Tokens(message.request_id, message.have, accepted.resend))
        for item in accepted.done:
            self.port.push(peer, _to_wire(item))

    def _fork(self, core: EngineCore, peer: bytes, message: api.ForkRequest) -> None:
        try:
            core.fork(peer, message)
        except RequestError as error:
            core.meter.counters.rejected_requests += 1
            self.port.push(peer, api.Finished(message.child_id, message.have, [], "error", error=str(error)))

    def _abort(
        self, core: EngineCore, request: Request, samples: abc.Sequence[int] = (), *, stopped: bool = False
    ) -> None:
        """Abort a request, or only its `samples`, and queue a terminal message for each sample that ends."""
        for index, start in core.abort(request.request_id, samples, stopped=stopped):
            self.port.push(request.client, api.Finished(request.request_id, start, [], "abort", index=index))

    def _compute(self, core: EngineCore, executor: Executor, produced: list[Produced]) -> None:
        """Apply all results that have arrived, and begin new steps. Outputs that are published here are removed from
        `produced`."""
        # Read all results: one that is left unread here may not end the next wait.
        while (output := executor.poll()) is not None:
            produced += core.finish(output)
        core.adapter_loader.receive(executor, produced)
        if core.transfers is not None:
            core.transfers.receive(executor)
        if core.in_flight and any(item.start == 0 for item in produced):  # workers are busy: send first tokens now
            self._publish(core, produced)
            produced.clear()
        while core.begin():  # begin before publishing, so that idle workers do not wait for the client sockets
            pass
        core.adapter_loader.send(executor)
        if core.transfers is not None:
            core.transfers.send(executor)

    def _publish(self, core: EngineCore, produced: list[Produced]) -> None:
        port = self.port
        for item in produced:
            if item.logprobs is not None:
                core.scheduler.queues.external.keep_logprobs(item.request, item.logprobs)
            port.push(item.request.client, _to_wire(item))
        now_s = time.monotonic()
        gone = port.flush(now_s)
        requests = core.scheduler.requests
        if requests:
            gone += port.beat(now_s, core.scheduler.step, {request.client for request in requests.values()})
        self.abort_orphans(core, gone)
        if now_s >= self.stats_log.due_s:
            self.stats_log.write(core, now_s)

    def abort_orphans(self, core: EngineCore, gone: abc.Iterable[bytes]) -> None:
        """Abort the requests of disconnected clients."""
        requests = core.scheduler.requests
        for peer in gone:
            orphans = [request.request_id for request in requests.values() if request.client == peer]
            for request_id in orphans:
                core.abort(request_id)
            if orphans:
                logger.info("a client has gone; %d of its requests are aborted", len(orphans))

    def _abort_all(self, core: EngineCore) -> None:
        """Send exactly one terminal message for every unfinished request."""
        for request in list(core.scheduler.requests.values()):
            self._abort(core, request)
        self.port.flush(time.monotonic(), at_once=True)


def _to_wire(item: Produced) -> api.Tokens | api.Finished:
    request = item.request
    if item.reason is None:
        return api.Tokens(request.request_id, item.start, item.token_ids, item.logprobs, item.sample, item.prompt)
    last = item.token_ids[-1] if item.token_ids else None
    return api.Finished(
        request_id=request.request_id,
        start=item.start,
        token_ids=item.token_ids,
        reason=item.reason,
        stop_token=last if item.reason == "stop" and last in request.params.stop_token_ids else None,
        error=item.error,
        num_cached_tokens=request.num_cached_at_start or 0,
        logprobs=item.logprobs,
        index=item.sample,
        cumulative_logprob=item.logprob,
        pooled=item.pooled,
        queued_s=None if request.admitted_s is None else request.admitted_s - request.queued_s,
    )


@contextmanager
def frozen_objects() -> abc.Iterator[None]:
    """Exclude the objects created inside from garbage collection; they live as long as the process.

    There is one object per KV block, and traversing them would dominate every collection. A step's own objects are
    freed by reference counting, so the young generation may hold those of several steps.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        supervise.keep_from_collections()
        gc.enable()
        gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def main(settings: EngineSettings, stop: Wakeup) -> int:
    """Run an engine until `stop` is set. Also runs as a thread, for --single-process."""
    if not settings.config.single_process:
        log.setup(settings.config.engine_name, *settings.config.logging)
        log.moment("engine", "python, imports")
    try:
        engine = EngineProcess(settings, stop)
    except (ConfigError, EngineError) as error:
        logger.error("%s", error)
        return 2
    return engine.run()


def process_main(settings: EngineSettings, stop: Wakeup) -> int:
    try:
        return main(settings, stop)
    finally:
        transport.finish()


def run() -> None:
    """Entry point of the child process that spawn() started."""
    supervise.run_child(
        process_main, EngineSettings, graceful=True, cleanup=lambda settings: supervise.remove_dir(settings.run_dir)
    )


if __name__ == "__main__":
    run()

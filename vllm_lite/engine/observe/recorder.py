"""Recorder: stands between a core and its scheduler. TraceRecorder writes a trace of what passes; Recorder nothing.

A trace holds every input of the scheduler, a digest of every step, and the reasons for its decisions. Recording must
not change what it watches, nor stop it: when the file cannot be written any more, the log says so once and the engine
serves on without.
"""

from collections import abc
from contextlib import suppress
from hashlib import blake2b

import msgspec

from vllm_lite.engine.adapters import Adapter
from vllm_lite.engine.rates import Rates
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduler import Scheduler
from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.step import Continue, Entry, Fork, ModelOutput, NewRequest, SchedulerOutput
from vllm_lite.runtime import log
from vllm_lite.runtime.prefix_hash import PrefixHasher
from vllm_lite.trace import records
from vllm_lite.trace.records import FIELDS, HASH_BYTES, WAITS, Code, Decision
from vllm_lite.trace.segments import segment_path
from vllm_lite.trace.writer import TraceWriter

FLUSH_S = 1.0
"""At most this much of the trace is lost when the engine is killed."""
MAX_FAULT_CHARS = 200
MAX_WAITS = 1024
"""So many waiting sequences have their last reason remembered, so that it is recorded once."""

_encode = msgspec.msgpack.Encoder().encode
logger = log.get(__name__)


class RecordingHasher(PrefixHasher):
    """Hashes as `inner` does, and keeps the beginning of every digest for the trace."""

    def __init__(self, inner: PrefixHasher) -> None:
        self.block_size = inner.block_size
        self.inner = inner
        self._log = bytearray()

    def root(self, extra_keys: abc.Sequence[str] = ()) -> bytes:
        digest = self.inner.root(extra_keys)
        self._log += digest[:HASH_BYTES]
        return digest

    def extend(self, hashes: list[bytes], root: bytes, tokens: memoryview, num_tokens: int) -> None:
        known = len(hashes)
        self.inner.extend(hashes, root, tokens, num_tokens)
        for digest in hashes[known:]:
            self._log += digest[:HASH_BYTES]

    def take(self) -> bytes:
        """The digests that were computed since the last call."""
        taken = bytes(self._log)
        self._log.clear()
        return taken


class Reasons:
    """Collects the scheduler's decisions as the numbers that a trace holds; the same reason to wait only once."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._requests = scheduler.requests
        self._decisions: list[Decision] = []
        self._last_waits: dict[tuple[int, int], Decision] = {}
        self.faults: list[str] = []

    def add(self, code: str, sequence: Sequence | None, numbers: dict[str, int | str]) -> None:
        """The scheduler's callback."""
        if sequence is None:
            self.faults.append(str(numbers.get("what"))[:MAX_FAULT_CHARS])
            return
        kind = Code[code.upper()]
        decision: Decision = [kind, sequence.request.arrival, sequence.index]
        decision += [self._number(name, numbers[name]) for name in FIELDS[kind]]
        if kind in WAITS:
            sample = sequence.request.arrival, sequence.index
            if self._last_waits.get(sample) == decision:
                return
            if len(self._last_waits) >= MAX_WAITS:
                self._last_waits.clear()
            self._last_waits[sample] = decision
        self._decisions.append(decision)

    def ends(self, produced: list[Produced]) -> list[Decision]:
        """One decision for every sample that has ended."""
        decisions: list[Decision] = []
        for item in produced:
            if item.reason is not None:
                reason, num_tokens = records.REASONS.index(item.reason), item.start + len(item.token_ids)
                decisions.append([Code.FINISHED, item.request.arrival, item.sample, reason, num_tokens])
        return decisions

    def take(self) -> list[Decision]:
        taken, self._decisions = self._decisions, []
        return taken

    def _number(self, name: str, value: int | str) -> int:
        if isinstance(value, int):
            return value
        return records.WAYS.index(value) if name == "by" else self._requests[value].arrival


class Recorder:
    """The null object, and the interface: the core calls the scheduler through it, and reports every other input."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """Have the scheduler make a step."""
        return self._scheduler.schedule(now_s)

    def update(self, output: ModelOutput, now_s: float) -> list[Produced]:  # noqa: ARG002
        """Have the scheduler apply a result."""
        return self._scheduler.update(output)

    def lose_workers(self, cause: str, now_s: float, *, are_ended: bool = False) -> list[Produced]:  # noqa: ARG002
        """Tell the scheduler that the workers have died, or `are_ended`."""
        return self._scheduler.lose_workers(cause, now_s)

    def resume(self, generation: int, swap_blocks_per_s: float, now_s: float) -> None:  # noqa: ARG002
        """Tell the scheduler that others have taken over."""
        self._scheduler.resume(generation, swap_blocks_per_s)

    def arrived(self, request: Request, now_s: float) -> None: ...

    def forked(self, parent: Request, child: Request, now_s: float) -> None: ...

    def aborted(
        self, request: Request, samples: abc.Sequence[int], now_s: float, *, is_replaced: bool = False
    ) -> None: ...

    def expired(self, produced: list[Produced], now_s: float) -> None: ...

    def cache_reset(self, now_s: float) -> None: ...

    def newcomers(self, are_held: bool, now_s: float) -> None: ...

    def measured(self, rates: Rates) -> None: ...

    def adapter_changed(self, adapter: Adapter, now_s: float) -> None: ...

    def close(self) -> None: ...


class TraceRecorder(Recorder):
    """Writes the trace of a scheduler into a file."""

    def __init__(self, path: str, header: records.Header, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        try:
            self._writer: TraceWriter | None = TraceWriter(path)
        except OSError as error:
            raise ConfigError(f"record: {path!r} cannot be written ({error.strerror})") from error
        self._path = path
        self._hasher = RecordingHasher(scheduler.kv.hasher)
        self._reasons = Reasons(scheduler)
        self._next_flush_s = header.clock_s
        scheduler.kv.hasher = self._hasher
        scheduler.on_decision = self._reasons.add
        self._write(header)

    # ---- the calls that decide

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """A step that fails is in the trace as well."""
        step: SchedulerOutput | None = None
        try:
            step = self._scheduler.schedule(now_s)
            return step
        finally:
            if self._writer is not None:
                self._write_step(now_s, step)

    def lose_workers(self, cause: str, now_s: float, *, are_ended: bool = False) -> list[Produced]:
        kept = [
            records.Kept(request.arrival, sum(each.num_output for each in request.sequences), request.num_scored)
            for request in self._scheduler.requests.values()
        ]
        produced = self._scheduler.lose_workers(cause, now_s)
        decisions = self._reasons.take() + self._reasons.ends(produced)
        cause = cause[: records.MAX_CAUSE_CHARS]
        self._write(records.WorkersLost(now_s, cause, kept, self._hasher.take(), decisions, are_ended))
        self.flush()  # whatever killed the workers may kill the engine next
        return produced

    def resume(self, generation: int, swap_blocks_per_s: float, now_s: float) -> None:
        self._scheduler.resume(generation, swap_blocks_per_s)
        self._write(records.WorkersReplaced(now_s, generation, swap_blocks_per_s))
        self.flush()

    def _write_step(self, now_s: float, step: SchedulerOutput | None) -> None:
        for what in self._reasons.faults:
            self._write(records.PolicyFault(what))
        self._reasons.faults.clear()
        summary = summary_of(step, self._scheduler)
        self._write(records.Step(now_s, *summary, self._hasher.take(), self._reasons.take()))
        self._flush_in_time(now_s)

    def update(self, output: ModelOutput, now_s: float) -> list[Produced]:
        """A result that makes the scheduler fail is in the trace as well."""
        candidates = _candidates(output, self._scheduler.in_flight.awaited)
        produced: list[Produced] = []
        try:
            produced = self._scheduler.update(output)
            return produced
        finally:
            if self._writer is not None:
                tokens, width = records.pack_tokens(output.tokens)
                hashes, decisions = self._hasher.take(), self._reasons.ends(produced)
                counts, failed = output.counts, output.failed
                self._write(records.Result(now_s, tokens, width, counts, failed, candidates, hashes, decisions))

    # ---- the rest

    def arrived(self, request: Request, now_s: float) -> None:
        self._write(self._arrival(request, now_s))

    def forked(self, parent: Request, child: Request, now_s: float) -> None:
        self._write(records.Forked(parent.arrival, self._arrival(child, now_s)))

    def aborted(self, request: Request, samples: abc.Sequence[int], now_s: float, *, is_replaced: bool = False) -> None:
        self._write(records.Aborted(request.arrival, now_s, list(samples), self._hasher.take(), is_replaced))

    def expired(self, produced: list[Produced], now_s: float) -> None:
        """The engine asks for late requests in every pass of its loop, also while no step can be made."""
        if produced:
            self._write(records.Expired(now_s, [item.request.arrival for item in produced]))
        self._flush_in_time(now_s)

    def cache_reset(self, now_s: float) -> None:
        self._write(records.CacheReset(now_s, self._hasher.take()))

    def newcomers(self, are_held: bool, now_s: float) -> None:
        self._write(records.Newcomers(now_s, are_held))

    def measured(self, rates: Rates) -> None:
        self._write(records.RatesMeasured(*rates))

    def adapter_changed(self, adapter: Adapter, now_s: float) -> None:
        self._write(records.AdapterChanged(now_s, adapter.number, adapter.is_loaded))

    def _arrival(self, request: Request, now_s: float) -> records.Arrival:
        return records.Arrival(
            number=request.arrival,
            request_id=request.request_id,
            clock_s=now_s,
            num_prompt=request.num_prompt,
            num_output=request.num_tokens - request.num_prompt,
            max_len=request.max_len,
            stop_ids=sorted(request.stop_ids),
            deadline_s=request.deadline_s,
            params=_params(request),
            hashes=self._hasher.take(),
            samples=request.open_samples() if request.num_samples > 1 and not request.unforked else [],
            marks=list(request.marks),
        )

    # ---- the file

    def _write(self, record: records.Record) -> None:
        self._attempt(lambda writer: writer.write(record))

    def _flush_in_time(self, now_s: float) -> None:
        if now_s >= self._next_flush_s:
            self._next_flush_s = now_s + FLUSH_S
            self.flush()

    def flush(self) -> None:
        """Write everything up to here into the file."""
        self._attempt(TraceWriter.flush)

    def _attempt(self, act: abc.Callable[[TraceWriter], object]) -> None:
        """Do something with the file, if the trace has not ended. If that fails it ends, and serving goes on."""
        if self._writer is not None:
            try:
                act(self._writer)
            except OSError as error:
                logger.warning("the trace %s ends here, serving goes on: %s", self._path, error)
                writer, self._writer = self._writer, None
                self.close()
                with suppress(OSError):  # what is still buffered cannot be written either
                    writer.close()

    def close(self) -> None:
        """End the trace; the scheduler goes on without."""
        writer, self._writer = self._writer, None
        self._scheduler.on_decision = None
        self._scheduler.kv.hasher = self._hasher.inner
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                logger.warning("the end of the trace %s is lost: %s", self._path, error)


def make_recorder(path: str | None, header: records.Header, scheduler: Scheduler) -> Recorder:
    """What records into `path`, or nothing at all. Raises ConfigError if the first engine of a launch cannot write
    there; for a trace's sake none of the later ones, on which streams wait, fails."""
    if not path:
        return Recorder(scheduler)
    try:
        return TraceRecorder(segment_path(path, header.life), header, scheduler)
    except ConfigError as error:
        if header.life <= 1:
            raise
        logger.warning("%s; this engine has taken over from another one and serves without a trace", error)
        return Recorder(scheduler)


def digest_of(step: SchedulerOutput) -> bytes:
    """Eight bytes that stand for the decisions of a step: tokens and what only the sampler reads are left out."""
    entries = [entry if type(entry) is Continue else _decision(entry) for entry in step.entries]
    return blake2b(_encode((step.step, step.block_ops, entries)), digest_size=8).digest()


def _decision(entry: Entry) -> object:
    if isinstance(entry, NewRequest):
        fields = msgspec.structs.astuple(entry)
        return "new", fields[0], len(entry.tokens), fields[2], entry.sampling.sample, fields[4:8]
    if isinstance(entry, Fork):
        fields = msgspec.structs.astuple(entry)
        return "fork", fields[:2], entry.sampling.sample, fields[3:]
    return entry


def summary_of(step: SchedulerOutput | None, scheduler: Scheduler) -> tuple[bytes, int, int, int]:
    """The digest of a step, and the numbers of its entries, the tokens it computes, and the blocks it moves."""
    if step is None:
        return b"", 0, 0, 0
    return digest_of(step), len(step.entries), scheduler.num_scheduled_tokens, len(step.block_ops)


def _params(request: Request) -> records.Params:
    params = request.params
    beam = (params.length_penalty, params.early_stopping) if params.use_beam_search else None
    adapter = 0 if request.adapter is None else request.adapter.number
    found = request.lacks_scores, request.is_guided, request.pooling is not None, adapter
    return records.Params(params.n, params.min_tokens, params.priority, params.user, beam, *found)


def _candidates(
    output: ModelOutput, sampling: abc.Sequence[Sequence]
) -> list[tuple[int, list[tuple[int, float]]]] | None:
    """The likeliest tokens of every beam in `sampling`; other requests' logprobs decide nothing."""
    if output.logprobs is None:
        return None
    found, at = [], 0
    for place, sequence in enumerate(sampling):
        logprobs = output.logprobs[at] if at < len(output.logprobs) else None
        if sequence.request.beam is not None and logprobs is not None:
            found.append((place, list(logprobs.top)))
        at += 1 if output.counts is None else output.counts[place]
    return found or None

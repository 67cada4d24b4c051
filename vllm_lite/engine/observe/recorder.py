"""RecordedScheduler: a scheduler that writes a trace of its inputs and its decisions, for `--record`.

A trace holds every input of the scheduler, a digest of every step, and the reasons for its decisions. Recording must
neither change decisions nor stop the engine: when the file cannot be written any more, the engine logs it once and
continues without a trace.
"""

from collections import abc
from contextlib import suppress
from hashlib import blake2b

import msgspec

from vllm_lite.engine.adapters import Adapter
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduling.queues import Options
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.engine.sequence import Sequence
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.api import PrefixCacheReset
from vllm_lite.protocol.encoder import DemoteEncoded, Encode, EncodeAside, FreeEncoded, PromoteEncoded
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.stats import FinishReason
from vllm_lite.protocol.step import Continue, Entry, Fork, ModelOutput, NewRequest, SchedulerOutput
from vllm_lite.runtime import log
from vllm_lite.runtime.prefix_hash import DIGEST_BYTES, KeyedSpan, PrefixHasher
from vllm_lite.trace import records
from vllm_lite.trace.records import FIELDS, HASH_BYTES, WAITS, Code, Decision
from vllm_lite.trace.segments import segment_path
from vllm_lite.trace.writer import TraceWriter

FLUSH_S = 1.0
"""At most this much of the trace is lost when the engine is killed."""
MAX_FAULT_CHARS = 200
MAX_WAITS = 1024
"""Maximum waiting sequences whose latest reason is remembered, so that each reason is recorded once."""

MakeScheduler = abc.Callable[[KVCacheManager, Options, object | None], Scheduler]

_encode = msgspec.msgpack.Encoder().encode
logger = log.get(__name__)


class RecordingHasher(PrefixHasher):
    """Hashes by `inner`, and keeps the first bytes of every digest for the trace."""

    def __init__(self, inner: PrefixHasher) -> None:
        self.block_size = inner.block_size
        self.inner = inner
        self._log = bytearray()

    def root(self, extra_keys: abc.Sequence[str] = ()) -> bytes:
        digest = self.inner.root(extra_keys)
        self._log += digest[:HASH_BYTES]
        return digest

    def extend(
        self,
        hashes: list[bytes],
        root: bytes,
        tokens: memoryview,
        num_tokens: int,
        spans: abc.Sequence[KeyedSpan] = (),
    ) -> None:
        known = len(hashes)
        self.inner.extend(hashes, root, tokens, num_tokens, spans)
        for digest in hashes[known:]:
            self._log += digest[:HASH_BYTES]

    def tail(self, parent: bytes, tokens: bytes, number: int, spans: abc.Sequence[KeyedSpan] = ()) -> bytes:
        digest = self.inner.tail(parent, tokens, number, spans)
        self._log += digest[:HASH_BYTES]
        return digest

    def take(self) -> bytes:
        """The digests computed since the last call."""
        taken = bytes(self._log)
        self._log.clear()
        return taken


class Reasons:
    """Collects the scheduler's decisions in the form of a trace; a repeated reason to wait only once."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._requests = scheduler.requests
        self._decisions: list[Decision] = []
        self._last_waits: dict[tuple[int, int], Decision] = {}
        self.faults: list[str] = []

    def add(self, code: str, sequence: Sequence | None, numbers: dict[str, int | str]) -> None:
        """Add a decision; this is the scheduler's `on_decision`."""
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
        """One decision per ended sample, after one per method that has drafted for it."""
        decisions: list[Decision] = []
        for item in produced:
            if item.reason is not None:
                sample = [item.request.arrival, item.sample]
                decisions += drafts_of(item.request, (item.sample,))
                reason, num_tokens = records.REASONS.index(item.reason), item.start + len(item.token_ids)
                decisions.append([Code.FINISHED, *sample, reason, num_tokens])
        return decisions

    def take(self) -> list[Decision]:
        taken, self._decisions = self._decisions, []
        return taken

    def _number(self, name: str, value: int | str) -> int:
        if isinstance(value, int):
            return value
        return records.WAYS.index(value) if name == "by" else self._requests[value].arrival


def drafts_of(request: Request, samples: abc.Sequence[int] = ()) -> list[Decision]:
    """One decision per method that has drafted for `samples`, or (empty) for all that have not ended. Each is recorded
    once."""
    decisions: list[Decision] = []
    for sample in samples or sorted(request.drafts_by):
        for method, counts in request.drafts_by.pop(sample, {}).items():
            numbers = [records.METHODS.index(method), counts.drafts, counts.tokens, counts.accepted]
            decisions.append([Code.DRAFTED, request.arrival, sample, *numbers, *counts.accepted_at])
    return decisions


class RecordedScheduler(Scheduler):
    """A Scheduler that writes its inputs and decisions to a file."""

    def __init__(
        self,
        path: str,
        header: records.Header,
        clock: abc.Callable[[], float],
        made_of: tuple[KVCacheManager, Options, object | None],
    ) -> None:
        """`made_of`: the arguments of Scheduler. Raises ConfigError if the file cannot be written."""
        super().__init__(*made_of)
        try:
            self._writer: TraceWriter | None = TraceWriter(path)
        except OSError as error:
            raise ConfigError(f"record: {path!r} cannot be written ({error.strerror})") from error
        self._path = path
        self._clock = clock
        self._hasher = RecordingHasher(self.kv.hasher)
        self._reasons = Reasons(self)
        self.next_flush_s = header.clock_s
        self.kv.hasher = self._hasher
        self.on_decision = self._reasons.add
        self.queues.adapters.on_change = self._adapter_changed
        self._write(header)

    # ---- the step

    def schedule(self, now_s: float = 0.0) -> SchedulerOutput | None:
        """Schedule and record a step, also one that raises."""
        step: SchedulerOutput | None = None
        try:
            step = super().schedule(now_s)
            return step
        finally:
            if self._writer is not None:
                self._write_step(now_s, step)

    def _write_step(self, now_s: float, step: SchedulerOutput | None) -> None:
        for what in self._reasons.faults:
            self._write(records.PolicyFault(what))
        self._reasons.faults.clear()
        self._write(records.Step(now_s, *summary_of(step, self), self._hasher.take(), self._reasons.take()))
        self._flush_in_time(now_s)

    def update(self, result: ModelOutput) -> list[Produced]:
        """Apply and record a result, also one that raises."""
        candidates = _candidates(result, self.in_flight.awaited)
        produced: list[Produced] = []
        try:
            produced = super().update(result)
            return produced
        finally:
            if self._writer is not None:
                now_s, (tokens, width) = self.meter.now_s, records.pack_tokens(result.tokens)
                hashes, decisions = self._hasher.take(), self._reasons.ends(produced)
                counts, failed = result.counts, result.failed
                made = (now_s, tokens, width, counts, failed, candidates, hashes, decisions)
                encoded = [_number(digest) for digest in result.encoded or ()] or None
                self._write(records.Result(*made, drafted=result.drafted, forced=result.forced, encoded=encoded))

    def measured(self, rates: Rates) -> None:
        super().measured(rates)
        self._write(records.RatesMeasured(*rates))

    # ---- the disk

    def stored_keys(self, added: abc.Sequence[bytes], removed: abc.Sequence[bytes]) -> None:
        super().stored_keys(added, removed)
        self._write(records.DiskKeys(*([_short(key) for key in keys] for keys in (added, removed))))

    def transferred(self, ticket: int, failed: abc.Sequence[int]) -> None:
        super().transferred(ticket, failed)
        self._write(records.TransferEnded(ticket, list(failed)))

    def transfer_late(self, ticket: int) -> None:
        super().transfer_late(ticket)
        self._write(records.TransferEnded(ticket, is_late=True))

    # ---- workers

    def lose_workers(self, cause: str, now_s: float, *, are_ended: bool = False) -> list[Produced]:
        kept = [
            records.Kept(request.arrival, sum(each.num_output for each in request.sequences), request.num_scored)
            for request in self.requests.values()
        ]
        produced = super().lose_workers(cause, now_s, are_ended=are_ended)
        decisions = self._reasons.take() + self._reasons.ends(produced)
        cause = cause[: records.MAX_CAUSE_CHARS]
        self._write(records.WorkersLost(now_s, cause, kept, self._hasher.take(), decisions, are_ended))
        self.flush()  # whatever killed the workers may kill the engine next
        return produced

    def resume(self, generation: int, swap_blocks_per_s: float) -> None:
        super().resume(generation, swap_blocks_per_s)
        self._write(records.WorkersReplaced(self._clock(), generation, swap_blocks_per_s))
        self.flush()

    # ---- requests

    def add(self, request: Request) -> None:
        super().add(request)
        self._write(self._arrival(request))

    def fork(self, parent: Request, child: Request) -> None:
        super().fork(parent, child)
        self._write(records.Forked(parent.arrival, self._arrival(child)))

    def abort(self, request: Request, samples: abc.Sequence[int], reason: FinishReason) -> list[tuple[int, int]]:
        ended = super().abort(request, samples, reason)
        if ended:
            self._aborted(request, samples and [sample for sample, _ in ended])
        return ended

    def fail(self, request: Request, error: str) -> Produced:
        produced = super().fail(request, error)
        self._aborted(request, ())
        return produced

    def withdraw(self, request: Request, *, is_replaced: bool) -> None:
        super().withdraw(request, is_replaced=is_replaced)
        self._aborted(request, (), is_replaced=is_replaced)

    def expire(self, now_s: float) -> list[Produced]:
        """End late requests; called in every pass of the loop, so the trace is flushed here, too."""
        produced = super().expire(now_s)
        if produced:
            drafts = [decision for item in produced for decision in drafts_of(item.request)]
            self._write(records.Expired(now_s, [item.request.arrival for item in produced], drafts))
        self._flush_in_time(now_s)
        return produced

    def reset_prefix_cache(self, *, stored: bool = False) -> PrefixCacheReset:
        done = super().reset_prefix_cache(stored=stored)
        self._write(records.CacheReset(self._clock(), self._hasher.take(), stored))
        return done

    def hold_newcomers(self, *, are_held: bool) -> None:
        super().hold_newcomers(are_held=are_held)
        self._write(records.Newcomers(self._clock(), are_held))

    def _adapter_changed(self, adapter: Adapter) -> None:
        digest = (adapter.digest or b"")[:HASH_BYTES]
        self._write(records.AdapterChanged(self._clock(), adapter.number, adapter.is_loaded, digest))

    def _aborted(self, request: Request, samples: abc.Sequence[int], *, is_replaced: bool = False) -> None:
        now_s, hashes = self.meter.now_s, self._hasher.take()
        drafts = drafts_of(request, samples)
        self._write(records.Aborted(request.arrival, now_s, list(samples), hashes, is_replaced, drafts))

    def _arrival(self, request: Request) -> records.Arrival:
        return records.Arrival(
            number=request.arrival,
            request_id=request.request_id,
            clock_s=self.meter.now_s,
            num_prompt=request.num_prompt,
            num_output=request.num_tokens - request.num_prompt,
            max_len=request.max_len,
            stop_ids=sorted(request.stop_ids),
            deadline_s=request.deadline_s,
            params=_params(request),
            hashes=self._hasher.take(),
            samples=request.open_samples() if request.num_samples > 1 and not request.unforked else [],
            marks=list(request.marks),
            media=[_medium(each, request) for each in request.media],
        )

    # ---- the file

    def _write(self, record: records.Record) -> None:
        self._attempt(lambda writer: writer.write(record))

    def _flush_in_time(self, now_s: float) -> None:
        if now_s >= self.next_flush_s:
            self.next_flush_s = now_s + FLUSH_S
            self.flush()

    def flush(self) -> None:
        """Write all buffered records to the file."""
        self._attempt(TraceWriter.flush)

    def _attempt(self, act: abc.Callable[[TraceWriter], object]) -> None:
        """Call `act` with the writer, if the trace has not ended. An OSError ends the trace, but not the engine."""
        if self._writer is not None:
            try:
                act(self._writer)
            except OSError as error:
                logger.warning("the trace %s ends here, serving continues: %s", self._path, error)
                writer, self._writer = self._writer, None
                self.close()
                with suppress(OSError):  # what is still buffered cannot be written either
                    writer.close()

    def close(self) -> None:
        """End the trace; the scheduler continues without it."""
        writer, self._writer = self._writer, None
        self.on_decision = None
        self.kv.hasher = self._hasher.inner
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                logger.warning("the end of the trace %s is lost: %s", self._path, error)


def recorded(path: str | None, header: records.Header, clock: abc.Callable[[], float]) -> MakeScheduler:
    """A factory of schedulers that record to `path`, or Scheduler itself without a path. The factory raises ConfigError
    if the first engine of a launch cannot write there; later engines, on which streams wait, then do without."""

    def make(kv: KVCacheManager, options: Options, policy: object | None) -> Scheduler:
        try:
            return RecordedScheduler(segment_path(path or "", header.life), header, clock, (kv, options, policy))
        except ConfigError as error:
            if header.life <= 1:
                raise
            logger.warning("%s; this engine has taken over from another one and serves without a trace", error)
            return Scheduler(kv, options, policy)

    return make if path else Scheduler


def _medium(medium: Media, request: Request) -> tuple[int, int, int, int]:
    """(start, tokens, bytes, number) of a medium; decisions depend only on the equality of digests."""
    content = request.contents.get(medium.digest, b"")
    return medium.start, medium.num_tokens, len(content), _number(medium.digest)


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "little")


def _short(key: bytes) -> bytes:
    """A key as a replay computes it, with digests of HASH_BYTES."""
    return key[:HASH_BYTES] + key[DIGEST_BYTES:]


def digest_of(step: SchedulerOutput) -> bytes:
    """Eight-byte digest of a step's decisions, without token ids and sampling parameters."""
    entries = [entry if type(entry) is Continue else _decision(entry) for entry in step.entries]
    return blake2b(_encode((step.step, step.block_ops, entries)), digest_size=8).digest()


def _decision(entry: Entry) -> object:
    if isinstance(entry, NewRequest):
        fields = msgspec.structs.astuple(entry)
        return "new", fields[0], len(entry.tokens), fields[2], entry.sampling.sample, fields[4:8]
    if isinstance(entry, Encode | EncodeAside):
        return type(entry).__name__, entry.digest[:7], entry.num_tokens
    if isinstance(entry, FreeEncoded | DemoteEncoded | PromoteEncoded):
        return type(entry).__name__, sorted(digest[:7] for digest in entry.digests)
    if isinstance(entry, Fork):
        fields = msgspec.structs.astuple(entry)
        return "fork", fields[:2], entry.sampling.sample, fields[3:]
    return entry


def summary_of(step: SchedulerOutput | None, scheduler: Scheduler) -> tuple[bytes, int, int, int]:
    """(digest, number of entries, number of tokens, number of block ops) of a step."""
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
    """(place in `sampling`, likeliest tokens) of each beam; logprobs of other requests affect no decision."""
    if output.logprobs is None:
        return None
    found, at = [], 0
    for place, sequence in enumerate(sampling):
        logprobs = output.logprobs[at] if at < len(output.logprobs) else None
        if sequence.request.beam is not None and logprobs is not None:
            found.append((place, list(logprobs.top)))
        at += 1 if output.counts is None else output.counts[place]
    return found or None

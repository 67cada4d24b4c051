"""Replay: makes the decisions of a trace again, and finds the first step where this code decides otherwise.

The prompts of a trace are unknown, so requests come back with zeros for them. Nothing in the scheduler looks at a
prompt but through its block digests, and those are in the trace; generated tokens are real, so that stops are too.
"""

from array import array
from collections import abc
from contextlib import contextmanager
from typing import NamedTuple

from vllm_lite.engine.core import make_scheduler
from vllm_lite.engine.observe.recorder import Reasons, summary_of
from vllm_lite.engine.request import Produced, Request
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol.api import Generate, SampleSoFar, TokenLogprobs
from vllm_lite.protocol.encoder import MediaContent
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import Pooling
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import ModelOutput
from vllm_lite.runtime.prefix_hash import KeyedSpan, PrefixHasher
from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.records import HASH_BYTES
from vllm_lite.trace.story import describe, describe_decisions


class Divergence(NamedTuple):
    """The first difference between a replay and its trace. `recorded` and `replayed` are one line each."""

    step: int
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}\n  recorded: {self.recorded}\n  replayed: {self.replayed}"


class _Diverged(Exception):
    def __init__(self, what: str, recorded: str, replayed: str) -> None:
        super().__init__(what)
        self.what, self.recorded, self.replayed = what, recorded, replayed


class ReplayHasher(PrefixHasher):
    """Returns recorded digests in the order of the calls."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._given = b""
        self._at = 0

    @contextmanager
    def given(self, hashes: bytes) -> abc.Iterator[None]:
        """Return `hashes` within the context; at its end all of them must have been used."""
        self._given, self._at = hashes, 0
        yield
        if self._at != len(self._given):
            recorded, used = len(self._given) // HASH_BYTES, self._at // HASH_BYTES
            raise _Diverged("fewer blocks were hashed", f"{recorded} digests", f"{used} digests")

    def root(self, extra_keys: abc.Sequence[str] = ()) -> bytes:  # noqa: ARG002  # the recorded digest depends on them
        return self._next()

    def extend(  # the recorded digests depend on what is not used
        self,
        hashes: list[bytes],
        root: bytes,  # noqa: ARG002
        tokens: memoryview,  # noqa: ARG002
        num_tokens: int,
        spans: abc.Sequence[KeyedSpan] = (),  # noqa: ARG002
    ) -> None:
        hashes.extend(self._next() for _ in range(len(hashes), num_tokens // self.block_size))

    def tail(
        self,
        parent: bytes,  # noqa: ARG002  # as above
        tokens: bytes,  # noqa: ARG002
        number: int,  # noqa: ARG002
        spans: abc.Sequence[KeyedSpan] = (),  # noqa: ARG002
    ) -> bytes:
        return self._next()

    def _next(self) -> bytes:
        start, self._at = self._at, self._at + HASH_BYTES
        if self._at > len(self._given):
            raise _Diverged("more blocks were hashed", f"{len(self._given) // HASH_BYTES} digests", "one more")
        return self._given[start : self._at]


class Replay:
    """One pass over a trace. After run(), `scheduler` is in the engine's recorded state."""

    def __init__(self, path: str, *, check: bool = True) -> None:
        """Raises ProtocolError if the file is not a trace, ConfigError if its policy cannot be loaded."""
        self.reader = TraceReader(path)
        self.check = check
        self.divergence: Divergence | None = None
        self.num_ended = 0
        header = self.reader.header
        self._hasher = ReplayHasher(header.block_size)
        try:
            self.scheduler = make_scheduler(header, self._hasher)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            self.reader.close()
            raise ProtocolError(f"{path}: damaged, its header makes no scheduler: {error}") from error
        self.scheduler.meter.now_s = header.clock_s
        self._reasons = Reasons(self.scheduler)
        if check:
            self.scheduler.on_decision = self._reasons.add
        self._ids: dict[int, str] = {}
        self.on_produced: abc.Callable[[list[Produced]], None] = lambda _: None
        """Called with the outputs of each step while its record is applied."""

    def run(self, until: int | None = None, on_step: abc.Callable[["Replay"], object] | None = None) -> "Replay":
        """Replay up to and including step `until` (None: to the end), or to the first divergence. `on_step` is called
        after each step; its exceptions are passed on."""
        for record in self.reader:
            step = self._place(record)
            self._set_time(record)
            try:
                self._apply(record)
            except _Diverged as error:
                self.divergence = Divergence(step, error.what, error.recorded, error.replayed)
            except Exception as error:  # any error is a divergence: the recorded engine got past this record
                summary = describe(record, self._ids)
                self.divergence = Divergence(step, "replay failed", summary, repr(error))
            if on_step is not None and self.divergence is None and isinstance(record, records.Step) and record.digest:
                on_step(self)
            if self.divergence is not None or (until is not None and self.scheduler.step >= until):
                self.reader.close()
                break
        if self.divergence is None:
            self.scheduler.check_integrity()
        return self

    @property
    def wall_s(self) -> float:
        """Unix time at which the latest replayed record was written."""
        header = self.reader.header
        return header.wall_s + self.scheduler.meter.now_s - header.clock_s

    def _set_time(self, record: records.Record) -> None:
        """Set the meter's time to that of the record, if it has one."""
        arrival = record.child if isinstance(record, records.Forked) else record
        clock_s = getattr(arrival, "clock_s", None)
        if clock_s is not None:
            self.scheduler.meter.now_s = clock_s

    def _place(self, record: records.Record) -> int:
        """Number of the step that a record belongs to; call it before the record is applied."""
        if isinstance(record, records.Result):
            return self.scheduler.in_flight.step_awaited
        return self.scheduler.step + isinstance(record, records.Step)

    def report(self) -> list[str]:
        """Lines about the result and the state reached."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        counters = scheduler.counters
        done = f"{scheduler.step} steps, {len(self._ids)} requests, {counters.generated_tokens} tokens"
        queues = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting"
        blocks = f"{pool.num_used} of {pool.num_usable} blocks in use, {pool.num_cached} cached"
        lines = [f"{done}, {counters.preemptions} preemptions ({counters.swaps} by swap)", f"{queues}, {blocks}"]
        if (ranks := self.reader.header.tensor_parallel_size) > 1:
            lines.append(f"recorded with {ranks} ranks, each with a part of every block")
        if self.reader.cut_off:
            lines.append("the trace ends within a record; its writer did not end in peace")
        if self.divergence is not None:
            lines.append(f"DIVERGED at {self.divergence}")
        elif self.check:
            lines.append("every decision is the one recorded")
        return lines

    # ---- one record

    def _apply(self, record: records.Record) -> None:
        scheduler = self.scheduler
        match record:
            case records.Step():
                self._schedule(record)
            case records.Result():
                self._update(record)
            case records.Arrival():
                with self._hasher.given(record.hashes):
                    scheduler.add(self._request(record, array("I", bytes(4 * (record.num_prompt + record.num_output)))))
            case records.Forked():
                self._fork(record)
            case records.Aborted():
                with self._hasher.given(record.hashes):
                    request = scheduler.requests[self._ids[record.number]]
                    if record.is_replaced:
                        scheduler.withdraw(request, is_replaced=True)
                    else:
                        scheduler.branching.end_samples(request, record.samples, "abort")
            case records.Expired():
                self._expire(record)
            case records.CacheReset():
                with self._hasher.given(record.hashes):
                    scheduler.reset_prefix_cache(stored=record.stored)
            case records.Newcomers():
                scheduler.hold_newcomers(are_held=record.are_held)
            case records.RatesMeasured():
                scheduler.measured(Rates(*(getattr(record, name) for name in Rates._fields)))
            case records.DiskKeys():
                scheduler.stored_keys(record.added, record.removed)
            case records.TransferEnded(is_late=True):
                scheduler.transfer_late(record.ticket)
            case records.TransferEnded():
                scheduler.transferred(record.ticket, record.failed)
            case records.WorkersLost():
                self._lose_workers(record)
            case records.WorkersReplaced():
                scheduler.resume(record.generation, record.swap_blocks_per_s)
            case records.AdapterChanged():
                adapters = scheduler.queues.adapters
                adapter = adapters.numbered(record.number)
                if record.is_loaded:
                    adapter.read_as(record.digest)
                adapters.change(adapter, is_loaded=record.is_loaded)

    def _schedule(self, record: records.Step) -> None:
        with self._hasher.given(record.hashes):
            step = self.scheduler.schedule(record.clock_s)
        if self.check:
            summary = summary_of(step, self.scheduler)
            replayed = records.Step(record.clock_s, *summary, record.hashes, self._reasons.take())
            is_same = replayed.digest == record.digest
            if not is_same or replayed.decisions != record.decisions:
                what = "the same step, for other reasons" if is_same else "another step was made"
                raise _Diverged(what, describe(record, self._ids), describe(replayed, self._ids))

    def _update(self, record: records.Result) -> None:
        tokens = records.unpack_tokens(record.tokens, record.token_bytes)
        generation, step = self.scheduler.generation, self.scheduler.in_flight.step_awaited
        logprobs = _logprobs(record, len(tokens) // 4)
        made = generation, step, tokens, record.counts, logprobs, record.failed
        encoded = [_digest(number) for number in record.encoded or ()] or None
        output = ModelOutput(*made, drafted=record.drafted, forced=record.forced, encoded=encoded)
        with self._hasher.given(record.hashes):
            produced = self.scheduler.update(output)
        self.on_produced(produced)
        self._compare_ends(record.decisions, self._reasons.ends(produced))

    def _lose_workers(self, record: records.WorkersLost) -> None:
        requests = {request.arrival: request for request in self.scheduler.requests.values()}
        if requests.keys() != {kept.number for kept in record.kept}:
            recorded = f"requests {[kept.number for kept in record.kept]}"
            raise _Diverged("other requests were left", recorded, f"requests {list(requests)}")
        for kept in record.kept:  # prompt scores are in no record
            requests[kept.number].num_scored = kept.num_scored
        with self._hasher.given(record.hashes):
            produced = self.scheduler.lose_workers(record.cause, record.clock_s)
        self._compare_ends(record.decisions, self._reasons.take() + self._reasons.ends(produced))

    def _compare_ends(self, recorded: list[records.Decision], replayed: list[records.Decision]) -> None:
        self.num_ended += sum(decision[0] == records.Code.FINISHED for decision in replayed)
        if self.check and replayed != recorded:
            raise _Diverged(
                "other requests ended", *(describe_decisions(some, self._ids) for some in (recorded, replayed))
            )

    def _fork(self, record: records.Forked) -> None:
        child = record.child
        parent = self.scheduler.requests[self._ids[record.parent]]
        tokens = parent.sequences[0].tokens[: child.num_prompt + child.num_output]
        with self._hasher.given(child.hashes):
            self.scheduler.branching.fork_request(parent, self._request(child, tokens))

    def _expire(self, record: records.Expired) -> None:
        ended = [item.request.arrival for item in self.scheduler.expire(record.clock_s)]
        if ended != record.numbers:
            raise _Diverged("other deadlines passed", f"requests {record.numbers}", f"requests {ended}")

    def _request(self, record: records.Arrival, tokens: "array[int]") -> Request:
        self._ids[record.number] = record.request_id
        params, beam = record.params, record.params.beam
        message = Generate(
            record.request_id,
            tokens[: record.num_prompt].tobytes(),
            SamplingParams(
                n=params.n,
                max_tokens=None,
                min_tokens=params.min_tokens,
                priority=params.priority,
                user=params.user,
                use_beam_search=beam is not None,
                length_penalty=beam[0] if beam else 1.0,
                early_stopping=bool(beam and beam[1]),
                prompt_logprobs=0 if params.scored and not params.is_pooled else None,
                grammar="unknown" if params.is_guided else None,  # its content affects no decision
            ),
            record.num_output,
            tokens[record.num_prompt :].tobytes(),
            samples=tuple(SampleSoFar(index, bytes(4 * num_output)) for index, num_output in record.samples),
            pooling=Pooling("embed", reads_all=params.scored) if params.is_pooled else None,
            marks=tuple(record.marks),
            media=tuple(Media("any", _digest(key), count, start) for start, count, _, key in record.media),
            contents=tuple(MediaContent(_digest(key), bytes(size)) for _, _, size, key in record.media),
        )
        adapter = self.scheduler.queues.adapters.numbered(params.adapter) if params.adapter else None
        request = Request(message, b"", record.max_len, frozenset(record.stop_ids), adapter)
        request.deadline_s = record.deadline_s
        return request


def _digest(key: int) -> bytes:
    """A digest that begins like the recorded one."""
    return key.to_bytes(7, "little") + bytes(25)


def _logprobs(record: records.Result, num_tokens: int) -> list[TokenLogprobs | None] | None:
    """Logprobs with the candidates of the beams at their tokens; a beam gets one token per step."""
    if record.candidates is None:
        return None
    counts = record.counts or [1] * num_tokens
    logprobs: list[TokenLogprobs | None] = [None] * num_tokens
    for place, top in record.candidates:
        logprobs[sum(counts[:place])] = TokenLogprobs(0.0, 1, tuple(top))
    return logprobs

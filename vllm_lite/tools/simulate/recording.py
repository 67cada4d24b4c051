"""A recording: the messages that workers got, their times, and the outcome of each request."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from vllm_lite.engine.observe.replay import Replay
from vllm_lite.engine.request import Produced
from vllm_lite.engine.scheduling.in_flight import MessageLength, StepInFlight
from vllm_lite.engine.scheduling.rates import Rates
from vllm_lite.errors import ConfigError
from vllm_lite.protocol.control import STEP_ROWS
from vllm_lite.protocol.step import Draft, Handle, SchedulerOutput
from vllm_lite.tools.bench.serve_client import Outcome
from vllm_lite.tools.simulate.drafts import DraftStep, history
from vllm_lite.tools.simulate.features import Features, StepDone, StepReader
from vllm_lite.trace import records

CROWD = 8
"""Maximum sequences of the steps that workers time at their start."""


class TimedMessage(NamedTuple):
    """A message to the workers: its features, and the seconds from the moment at which they could begin it until its
    end."""

    features: Features
    took_s: float


@dataclass
class RecordedRequest:
    """A request as the engine saw it; times are those of the trace's clock."""

    outcome: Outcome
    block_digests: list[bytes] = field(default_factory=list)
    """The digest of each whole block of its prompt."""
    adapter: int = 0


@dataclass
class _Sent:
    """A message in flight, and its steps."""

    steps: list[tuple[SchedulerOutput, int]]
    was_idle: bool
    sent_s: float
    done: list[StepDone] = field(default_factory=list)
    took_s: float = 0.0


class Recording(Replay):
    """Repeats the decisions of a trace, and so knows what each step computed."""

    def __init__(self, path: str) -> None:
        """Raises ProtocolError if the file is not a trace."""
        super().__init__(path, check=False)
        self.path = path
        self.messages: list[TimedMessage] = []
        self.gaps_s: list[float] = []
        """Seconds from a result to the next message, while nothing was in flight but there were requests."""
        self.requests: dict[tuple[str, int], RecordedRequest] = {}
        """By id and sample: each sample is simulated as a request, which finds its prompt in the prefix cache."""
        self._starting: dict[tuple[str, int], RecordedRequest] = {}
        """Requests whose prompts no step has completed so far."""
        self.drafts: dict[tuple[int, int], list[DraftStep]] = {}
        """Steps in which each sequence could draft, by (request, sample)."""
        self.timings: list[tuple[int, int, float]] = []
        """StepTimings from the start, if they decide the number of drafts."""
        self._method: str = self.reader.header.options["draft_method"]
        self._answers: dict[tuple[int, int], list[int]] = {}
        """Tokens of each sequence that may draft."""
        self.on_produced = self._take
        self._block_size = self.reader.header.block_size
        self._length = MessageLength()
        self._reader = StepReader()
        self._unsent: list[tuple[SchedulerOutput, int]] = []
        self._sent: deque[_Sent] = deque()
        self._free_s = self._clock_s = 0.0
        self._had_work = False

    def read(self) -> "Recording":
        """Read the whole trace. Raises ConfigError if this version makes other decisions than the recorded one."""
        self.run()
        if self.divergence is not None:
            raise ConfigError(f"the trace cannot be followed; record it with this version ({self.divergence})")
        return self

    def _apply(self, record: records.Record) -> None:
        if isinstance(record, records.Step):
            self._clock_s = record.clock_s
            super()._apply(record)
            self._has_scheduled(record)
        elif isinstance(record, records.Result):
            self._clock_s = record.clock_s
            self._has_result(record)
            super()._apply(record)
            self._had_work = bool(self.scheduler.requests)
        else:
            if isinstance(record, records.Arrival | records.Forked):
                self._has_come(record.child if isinstance(record, records.Forked) else record)
            elif isinstance(record, records.RatesMeasured) and record.row_s and not self.messages:
                self.timings = _timings(Rates(*msgspec.structs.astuple(record)), self.reader.header.options)
            elif isinstance(record, records.WorkersLost):
                self._unsent.clear()
                self._sent.clear()
            super()._apply(record)

    def _has_scheduled(self, record: records.Step) -> None:
        in_flight = self.scheduler.in_flight
        if record.digest:
            newest = in_flight.newest
            for sequence in newest.sampling if self._starting else ():
                found = self._starting.pop((sequence.request.request_id, sequence.index), None)
                if found is not None:
                    found.block_digests += sequence.block_hashes[: found.outcome.input_len // self._block_size]
            self._unsent.append((newest.output, len(newest.sampling)))
            if newest.only_decodes and in_flight.num_unsent < self._length.steps:
                return
        if self._unsent:
            was_idle = not self._sent
            if was_idle and self._had_work:
                self.gaps_s.append(record.clock_s - self._free_s)
            in_flight.send(record.clock_s)
            self._sent.append(_Sent(self._unsent, was_idle, record.clock_s))
            self._unsent = []

    def _has_result(self, record: records.Result) -> None:
        """The first result of a message arrives when all of the message has been computed."""
        in_flight, now_s = self.scheduler.in_flight, self._clock_s
        step = in_flight.oldest
        if self._sent:
            sent = self._sent[0]
            if not sent.done:
                sent.took_s = now_s - max(sent.sent_s, self._free_s)
                self._free_s = now_s
            sent.done.append(StepDone(*sent.steps[len(sent.done)], self._drafts_of(step, record)))
            if len(sent.done) == len(sent.steps):
                self._sent.popleft()
                features = self._reader.message(sent.done, was_idle=sent.was_idle)
                self.messages.append(TimedMessage(features, sent.took_s))
        self._length.ended(now_s, steady=step.only_decodes and len(in_flight) > 1)

    def _drafts_of(self, step: StepInFlight, record: records.Result) -> dict[Handle, tuple[int, int]]:
        if not step.drafted:
            return {}
        handles = (entry.handle for entry in step.output.entries if isinstance(entry, Draft))
        may = {each: (handle, most) for (each, most), handle in zip(step.drafted, handles, strict=True)}
        found = dict[Handle, tuple[int, int]]()
        counts = record.counts or [1] * len(step.sampling)
        for sequence, count, made in zip(step.sampling, counts, record.drafted or [0] * len(counts), strict=True):
            if sequence in may:
                right = max(0, min(count - 1, made))
                handle, most = may[sequence]
                found[handle] = made, right
                of_request = self.drafts.setdefault((sequence.request.arrival, sequence.index), [])
                of_request.append(DraftStep(sequence.num_output, made, right, made >= most))
        return found

    def histories(self) -> list[str]:
        """Draft histories of all answers that did not fail, in the order of their requests."""
        answers = sorted(self._answers.items())
        return [history(self.drafts.get(key, ()), tokens, self._method) for key, tokens in answers]

    def _has_come(self, record: records.Arrival) -> None:
        outputs = dict(record.samples) or dict.fromkeys(range(record.params.n), record.num_output)
        shared = list[bytes]()  # only the first of the samples that fork from a prompt is in the step that completes it
        for sample, num_output in outputs.items():
            outcome = Outcome(record.num_prompt + num_output)  # it goes on from the output of its parent or its own
            outcome.start_s = record.clock_s
            outcome.chunks_s = array("d")
            own = list[bytes]() if record.samples else shared
            found = RecordedRequest(outcome, own, record.params.adapter)
            self.requests[record.request_id, sample] = found
            if record.samples or sample == 0:
                self._starting[record.request_id, sample] = found

    def _take(self, produced: list[Produced]) -> None:
        for item in produced:
            ended = range(item.request.params.n) if item.error is not None else (item.sample,)  # an error ends all
            for sample in ended:
                if (found := self.requests.get((item.request.request_id, sample))) is not None:
                    take(found.outcome, item, self._clock_s)
            if self._method:
                self._keep(item)

    def _keep(self, item: Produced) -> None:
        """Store the tokens of an answer, unless it fails. Unknown ones, from before the trace, get distinct numbers."""
        key = item.request.arrival, item.sample
        if item.error is not None:
            self._answers.pop(key, None)
            return
        tokens = self._answers.setdefault(key, [])
        tokens.extend(-place for place in range(len(tokens) + 1, item.start + 1))
        tokens.extend(item.token_ids)


def _timings(rates: Rates, options: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Times of the steps that workers time at their start, from the first rates in a trace."""
    most, crowd = options["num_drafts"], min(CROWD, options["max_num_seqs"])
    shapes = [(1, rows - 1) for rows in STEP_ROWS if rows <= most] + [(1, most), (crowd, 0), (crowd, 1)]
    rows = [(count * (1 + length), length) for count, length in dict.fromkeys(shapes)]
    return [(num_rows, length, rates.decode_s(num_rows, length)) for num_rows, length in rows]


def take(outcome: Outcome, item: Produced, now_s: float) -> None:
    """Add a step's output to the outcome of its request."""
    if item.token_ids:
        outcome.chunks_s.append(now_s)
        outcome.output_len += len(item.token_ids)
    if item.reason is not None:
        outcome.error = item.error or ("aborted" if item.reason == "abort" else "")
        outcome.is_complete = True

"""Describes a trace in words: one line for each record, or the story of one request."""

from collections.abc import Callable, Iterable, Iterator

from vllm_lite.errors import RequestError
from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.records import FIELDS, METHODS, REASONS, WAITS, WAYS, Code, Decision

ENDS = {
    "stop": "finished by a stop token",
    "length": "finished at its greatest length",
    "error": "ended with an error",
    "abort": "aborted",
}


def describe(record: records.Record, ids: dict[int, str]) -> str:
    """Describe a record in one line. `ids`: number of a request -> its id."""
    if isinstance(record, records.Step):
        if not record.digest:
            what = "no step"
        else:
            moved = f", {record.num_block_ops} block moves" if record.num_block_ops else ""
            what = f"{record.num_entries} entries, {record.num_tokens} tokens{moved}, digest {record.digest.hex()}"
        return f"{what}; {describe_decisions(record.decisions, ids)}" if record.decisions else what
    if isinstance(record, records.Result):
        return f"result of {len(record.tokens) // record.token_bytes} tokens"
    if isinstance(record, records.Arrival):
        return f"{record.request_id} arrived with {record.num_prompt} tokens"
    if isinstance(record, records.Forked):
        return f"{record.child.request_id} was forked off {ids.get(record.parent)}"
    if isinstance(record, records.CacheReset):
        return "the prefix cache was reset" + (", on disk as well" if record.stored else "")
    if isinstance(record, records.WorkersLost):
        return f"{_loss(record)}; {len(record.kept)} requests were left"
    if isinstance(record, records.WorkersReplaced):
        return f"the workers of generation {record.generation} took over"
    if isinstance(record, records.Newcomers):
        return f"requests that come {'wait for the end of those before them' if record.are_held else 'may run'}"
    if isinstance(record, records.DiskKeys):
        return f"the disk has {len(record.added)} more blocks and states, and {len(record.removed)} no more"
    if isinstance(record, records.TransferEnded):
        failed = f", {len(record.failed)} of its blocks and states are not there" if record.failed else ""
        return f"transfer {record.ticket} {'is late' if record.is_late else 'has ended'}{failed}"
    return str(record)


def _loss(record: records.WorkersLost) -> str:
    return f"the workers were ended ({record.cause})" if record.are_ended else f"the workers died ({record.cause})"


def describe_decisions(decisions: list[Decision], ids: dict[int, str]) -> str:
    return (
        "; ".join(f"{ids.get(decision[1], decision[1])} {sentence(decision, ids)}" for decision in decisions) or "none"
    )


def sentence(decision: Decision, ids: dict[int, str]) -> str:
    """Describe a decision in one sentence, whose subject is the sequence."""
    try:
        return _sentence(decision, ids)
    except (LookupError, TypeError, ValueError):
        return f"has a damaged decision: {decision}"


def _sentence(decision: Decision, ids: dict[int, str]) -> str:
    code = Code(decision[0])
    if code is Code.DRAFTED:
        return _drafted(*decision[3:])
    numbers = dict(zip(FIELDS[code], decision[3:], strict=True))
    return _SENTENCES[code](numbers, ids)


def _drafted(method: int, drafts: int, tokens: int, accepted: int, *places: int) -> str:
    by_place = f" (by their place: {', '.join(map(str, places))})" if places else ""
    steps = f"{drafts} step{'s' * (drafts > 1)}"
    return f"had {_tokens(tokens)} drafted by {METHODS[method]} in {steps}, of which {accepted} were right{by_place}"


def _waited_for_blocks(numbers: dict[str, int], _ids: dict[int, str]) -> str:
    need, free, kept = numbers["need"], numbers["free"], numbers["watermark"]
    back = f", of which {kept} are kept for running requests" if kept else ""
    return f"waited, because it needed {_blocks(need)} and {free} {'was' if free == 1 else 'were'} free{back}"


def _admitted(numbers: dict[str, int], _ids: dict[int, str]) -> str:
    tokens, cached, blocks = numbers["tokens"], numbers["cached"], numbers["blocks"]
    found = f", with {_tokens(cached)} found in the cache" if cached else ""
    return f"was admitted, to compute {_tokens(tokens)} in {_blocks(blocks)}{found}"


def _preempted(numbers: dict[str, int], ids: dict[int, str]) -> str:
    winner = ids.get(numbers["for"], f"request {numbers['for']}")
    return f"was preempted to make room for {winner}: {_AFTERWARDS[WAYS[numbers['by']]]}"


_AFTERWARDS = {
    "recompute": "to be computed again",
    "swap": "its blocks were swapped out",
    "disk": "to be loaded from disk as far as it is there, and computed again behind that",
}


def _tried(numbers: dict[str, int], _ids: dict[int, str]) -> str:
    deaths, others = numbers["deaths"], numbers["others"]
    how = f"together with {others} other suspect{'s' * (others > 1)}" if others else "alone"
    return f"was tried {how}, as it was in the batch of {deaths} deaths in a row"


_SENTENCES: dict[Code, Callable[[dict[str, int], dict[int, str]], str]] = {
    Code.ADMITTED: _admitted,
    Code.SWAPPED_IN: lambda n, _: (
        f"was swapped in again: {_blocks(n['blocks'])}, to compute {_tokens(n['tokens'])} more"
    ),
    Code.CHUNKED: lambda n, _: (
        f"computed {_tokens(n['tokens'])}, as many as the step had room for; {n['left']} were left"
    ),
    Code.WAITS_FOR_BLOCKS: _waited_for_blocks,
    Code.WAITS_FOR_SWAP: lambda _n, _: "waited, because the step had moved enough blocks already",
    Code.WAITS_FOR_BUDGET: lambda n, _: f"waited, because {_tokens(n['budget'])} were left of the step's budget",
    Code.WAITS_FOR_ROW: lambda n, _: f"waited, because all {n['rows']} rows of the batch were taken",
    Code.PREEMPTED: _preempted,
    Code.FINISHED: lambda n, _: f"{ENDS[REASONS[n['reason']]]} after {_tokens(n['tokens'])} of output",
    Code.TRIED: _tried,
    Code.CONVICTED: lambda n, _: f"was found to kill its workers, in {n['deaths']} deaths in a row, and ended",
    Code.WAITS_FOR_ENCODER: lambda _n, _: "waited, because others' images came first in the encoder's share of a step",
    Code.WAITS_FOR_ADAPTER: lambda _n, _: (
        "waited, because its adapter was not in memory, or the step had enough other adapters"
    ),
    Code.STATE_LOADED: lambda n, _: f"loaded the recurrent state at {n['state']} from host memory",
    Code.WAITS_FOR_LOAD: lambda _n, _: "waited while its prefix or vectors of its images were loaded from disk",
    Code.PROMOTED: lambda n, _: f"found {_tokens(n['tokens'])} in host memory, which are moved to the device",
    Code.LOADED: lambda n, _: f"found {_tokens(n['tokens'])} on disk, which were loaded",
    Code.LOADED_MEDIA: lambda n, _: f"found the vectors of {_images(n['media'])} on disk, which were loaded",
    Code.WAITS_FOR_STATE: lambda _n, _: "waited for a recurrent state that another request computes, or for a slot",
    Code.STATE_MISSING: lambda n, _: (
        f"found the KV of {_tokens(n['kv'])} in the cache, but no state behind them: the one at {n['state']} was the "
        f"last that is kept, so {_tokens(n['kv'] - n['state'])} were computed again"
    ),
    Code.WAITS_FOR_TRIAL: lambda _n, _: "waited, because requests that may have killed the workers were tried apart",
}


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"


def _images(count: int) -> str:
    return f"{count} image" if count == 1 else f"{count} images"


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


class _Wait:
    """Consecutive decisions that let one sequence wait for the same reason: one sentence of the story."""

    def __init__(self, step: int, clock_s: float, decision: Decision) -> None:
        self.step, self.clock_s = step, clock_s
        self.first = self.last = decision
        self.count = 1

    def goes_on(self, decision: Decision) -> bool:
        return decision[:3] == self.first[:3]

    def text(self, now_s: float) -> str:
        text = sentence(self.first, {})
        if self.count > 1 and self.first[0] == Code.WAITS_FOR_BLOCKS:
            text += f" (at last it needed {self.last[3]} and {self.last[4]} were free)"
        return f"{text}; that took {now_s - self.clock_s:.3f} s"


class _Story:
    """Goes through the segments of a trace and writes sentences about the requests with the id `request_id`."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.names: dict[str, None] = {}
        """Ids of all requests so far, in order of arrival."""
        self._start_s: float | None = None
        self._open: set[int] = set()
        """Samples that have not ended."""
        self._begin()

    def _begin(self) -> None:
        """Begin a segment: its engine counts requests and steps from 0 again."""
        self.ids: dict[int, str] = {}
        self._step = 0
        self._lost_s: float | None = None
        self._numbers: set[int] = set()
        self._samples: dict[int, int] = {}
        self._waits: dict[tuple[int, int], _Wait] = {}
        self._preempted: set[tuple[int, int]] = set()
        self._is_sent_again = False
        """The client has just sent the request again: its arrival is the next record."""

    def segment(self, reader: TraceReader) -> Iterator[str]:
        """The lines of one segment. A request that is unfinished at the end of an earlier segment is sent again by its
        client."""
        self._begin()
        was_live = bool(self._open)
        for record in reader:
            if was_live and not self._numbers and isinstance(record, records.Arrival):
                yield from self._came_back(record)
            else:
                yield from self.lines(record)
            self._name(record)
        yield from self._left_over()
        if was_live and not self._numbers:
            self._open.clear()
            yield self._line(reader.header.clock_s, "the engine died and was replaced; it did not come back")

    def lines(self, record: records.Record) -> Iterator[str]:
        was_sent_again, self._is_sent_again = self._is_sent_again, False
        if isinstance(record, records.Aborted | records.Expired):
            for decision in record.decisions:
                if decision[1] in self._numbers:
                    yield from self._decided(record.clock_s, decision)
        match record:
            case records.Arrival() if record.request_id == self.request_id and was_sent_again:
                yield self._goes_on(record, "it goes on")
            case records.Arrival() if record.request_id == self.request_id:
                yield self._arrived(record, "arrived")
            case records.Forked() if record.child.request_id == self.request_id:
                yield self._arrived(record.child, f"was forked off {self.ids.get(record.parent)}")
            case records.Forked() if record.parent in self._numbers:
                yield self._line(record.child.clock_s, f"was forked into {record.child.request_id}")
            case records.Step() | records.Result():
                self._step += isinstance(record, records.Step) and record.digest != b""
                for decision in record.decisions:
                    if decision[1] in self._numbers:
                        yield from self._decided(record.clock_s, decision)
            case records.Aborted() if record.number in self._numbers and record.is_replaced:
                self._is_sent_again = True
                self._open.clear()
                yield self._line(record.clock_s, "its client lost the connection, and sent it again")
            case records.Aborted() if record.number in self._numbers:
                self._end(record.samples or self._open.copy())
                some = " and ".join(f"sample {sample}" for sample in record.samples)
                yield self._line(record.clock_s, f"{some} ended at its client's wish" if some else "was aborted")
            case records.Expired() if self._numbers.intersection(record.numbers):
                self._open.clear()
                yield self._line(record.clock_s, "ended with an error, because its deadline had passed")
            case records.WorkersLost() | records.WorkersReplaced():
                yield from self._workers(record)
            case records.CacheReset() if self._open:
                yield self._line(record.clock_s, "all that was cached was forgotten")
            case records.PolicyFault() if self._open:
                yield f"             (the policy failed, from here on first come, first served: {record.what})"

    def _name(self, record: records.Record) -> None:
        """Remember the id of a request that arrives with this record."""
        if isinstance(record, records.Arrival | records.Forked):
            arrival = record.child if isinstance(record, records.Forked) else record
            self.ids[arrival.number] = arrival.request_id
            self.names[arrival.request_id] = None

    def _end(self, samples: Iterable[int]) -> None:
        self._open.difference_update(samples)

    def _came_back(self, record: records.Arrival) -> Iterator[str]:
        """Write the line of a request that was unfinished in an earlier segment, if this is its new arrival."""
        if record.request_id == self.request_id:
            yield self._goes_on(record, "the engine died and was replaced; it came back")

    def _goes_on(self, record: records.Arrival, how: str) -> str:
        """Take in a request that arrives again, with the output that its client has."""
        self._numbers.add(record.number)
        self._samples[record.number] = record.params.n
        self._open = {sample for sample, _ in record.samples} or set(range(record.params.n))
        count = sum(num_output for _, num_output in record.samples) or record.num_output
        return self._line(record.clock_s, f"{how} with {_tokens(count) if count else 'no tokens'} of output")

    def _workers(self, record: records.WorkersLost | records.WorkersReplaced) -> Iterator[str]:
        """Write that the workers were lost or replaced during the request."""
        if isinstance(record, records.WorkersLost):
            num_kept = {kept.number: kept.num_output for kept in record.kept}
            mine = self._numbers & num_kept.keys()
            self._lost_s = record.clock_s if mine else None
            for number in mine:
                self._preempted |= {(number, sample) for sample in range(self._samples[number])}
                count = num_kept[number]
                kept = f"its {_tokens(count)} of output were kept" if count else "it had no output yet"
                yield self._line(record.clock_s, f"{_loss(record)}; {kept}")
            for decision in record.decisions:
                if decision[1] in self._numbers:
                    yield from self._decided(record.clock_s, decision)
        elif self._lost_s is not None and self._open:
            text = f"workers of generation {record.generation} took over after {record.clock_s - self._lost_s:.3f} s"
            yield self._line(record.clock_s, text)

    def _arrived(self, record: records.Arrival, how: str) -> str:
        self._numbers.add(record.number)
        self._samples[record.number] = record.params.n
        self._open = set(range(record.params.n))
        self._start_s = record.clock_s
        parts = [f"{how} with a prompt of {_tokens(record.num_prompt)}"]
        if record.num_output:
            parts.append(f"and {_tokens(record.num_output)} generated before")
        parts.append(f"and may grow to {record.max_len}")
        if record.params.n > 1:
            parts.append(f"in {record.params.n} {'beams' if record.params.beam else 'samples'}")
        if record.deadline_s is not None:
            parts.append(f"within {record.deadline_s - record.clock_s:.3f} s")
        return self._line(record.clock_s, " ".join(parts))

    def _decided(self, now_s: float, decision: Decision) -> Iterator[str]:
        sample = (decision[1], decision[2])
        wait = self._waits.get(sample)
        if decision[0] in WAITS:
            if wait is not None and wait.goes_on(decision):
                wait.last, wait.count = decision, wait.count + 1
                return
            self._waits[sample] = _Wait(self._step, now_s, decision)
        if wait is not None:
            if decision[0] not in WAITS:
                del self._waits[sample]
            yield self._line(wait.clock_s, self._subject(decision) + wait.text(now_s))
        if decision[0] in WAITS:
            return
        if decision[0] == Code.FINISHED:
            self._end(self._open.copy() if decision[3:4] == [REASONS.index("error")] else decision[2:3])
        resumed = decision[0] == Code.ADMITTED and sample in self._preempted
        if decision[0] == Code.PREEMPTED:
            self._preempted.add(sample)
        text = sentence(decision, self.ids).replace(f"for {self.request_id}:", "for itself later on:", 1)
        yield self._line(
            now_s, self._subject(decision) + (text.replace("was admitted", "was resumed", 1) if resumed else text)
        )

    def _subject(self, decision: Decision) -> str:
        return f"sample {decision[2]} " if self._samples.get(decision[1], 1) > 1 else ""

    def _line(self, clock_s: float, text: str) -> str:
        start_s = clock_s if self._start_s is None else self._start_s
        return f"+{clock_s - start_s:9.3f} s  {text[0].upper()}{text[1:]}."

    def _left_over(self) -> Iterator[str]:
        for wait in self._waits.values():
            yield self._line(
                wait.clock_s, f"{self._subject(wait.first)}{sentence(wait.first, {})}; the trace ends there"
            )


def story(request_id: str, *segments: TraceReader) -> list[str]:
    """The story of a request in the `segments` of a trace: one sentence per line, each with the seconds since the
    arrival. If several requests had this id, their stories follow each other. Raises RequestError if no record has the
    id."""
    found = _Story(request_id)
    lines = [line for reader in segments for line in found.segment(reader)]
    if not lines:
        known = ", ".join(repr(name) for name in list(found.names)[:5])
        raise RequestError(
            f"request {request_id!r} is none of the {len(found.names)} in this trace; the first are {known or 'none'}"
        )
    return lines

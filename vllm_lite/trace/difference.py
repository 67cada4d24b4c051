"""The first difference between two traces: in what their engines were given, and in what they decided."""

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from vllm_lite.trace import records
from vllm_lite.trace.reader import TraceReader
from vllm_lite.trace.story import describe

_NOT_COMPARED = {"clock_s", "wall_s", "launch", "life", "engine_version"}
"""Fields of a header that differ between any two recordings."""


class Moment(NamedTuple):
    """A step, and the inputs since the one before; without a step at the end of a trace. `given` has all of the inputs
    but times and ids, to be compared, and `said` a sentence for each."""

    given: list[object]
    said: list[str]
    digest: bytes
    shown: str


def difference(first: str, second: str) -> tuple[list[str], bool]:
    """Lines about the first difference of the traces at two paths, and whether all decisions are the same. Raises
    ProtocolError."""
    with closing(TraceReader(first)) as one, closing(TraceReader(second)) as other:
        lines = _of_headers(one.header, other.header)
        more, agree = _of_moments(moments(one), moments(other))
    return lines + more, agree


def _of_moments(first: Iterator[Moment], second: Iterator[Moment]) -> tuple[list[str], bool]:
    """Lines about the first inputs and the first step that differ, and whether no step does."""
    lines, number = list[str](), 0
    for one, other in zip(first, second, strict=False):  # each ends with a moment without a step
        number += 1
        if one.given != other.given and not lines:
            lines = [f"inputs differ first before step {number}:", *_pair(*_first_other(one, other))]
        if one.digest != other.digest:
            return [*lines, f"decisions differ first at step {number}:", *_pair(one.shown, other.shown)], False
    return [*lines, f"the same decisions in all {number - 1:,} steps"], True


def moments(reader: TraceReader) -> Iterator[Moment]:
    """The steps of a trace. Calls of the scheduler that made no step are parts of the next one."""
    ids: dict[int, str] = {}
    given, said, waited = list[object](), list[str](), list[records.Decision]()
    for record in reader:
        arrival = record.child if isinstance(record, records.Forked) else record
        if isinstance(arrival, records.Arrival):
            ids[arrival.number] = arrival.request_id
        if isinstance(record, records.Step):
            waited += record.decisions
            if record.digest:
                yield Moment(given, said, record.digest, describe(_with(record, waited), ids))
                given, said, waited = [], [], []
        elif not isinstance(record, records.RatesMeasured):
            given.append(_comparable(record))
            said.append(describe(record, ids))
    yield Moment(given, said, b"", "the trace ends")


def _with(step: records.Step, decisions: list[records.Decision]) -> records.Step:
    counts = step.num_entries, step.num_tokens, step.num_block_ops
    return records.Step(step.clock_s, step.digest, *counts, step.hashes, decisions)


def _comparable(record: records.Record) -> object:
    """The input of the engine that a record has, without times, ids and digests of prompts."""
    arrival = record.child if isinstance(record, records.Forked) else record
    if isinstance(arrival, records.Arrival):
        sizes = arrival.num_prompt, arrival.num_output, arrival.max_len, arrival.samples, arrival.marks, arrival.media
        return type(record), arrival.number, sizes, arrival.stop_ids, arrival.params
    if isinstance(record, records.Result):
        return records.Result, record.tokens, record.token_bytes, record.counts, record.failed
    if isinstance(record, records.Aborted | records.Expired):
        ended = record.numbers if isinstance(record, records.Expired) else (record.number, record.samples)
        return type(record), ended
    return type(record)


def _of_headers(first: records.Header, second: records.Header) -> list[str]:
    """A line for each setting that differs."""
    lines = []
    for name in first.__struct_fields__:
        one, other = getattr(first, name), getattr(second, name)
        if name == "options":
            keys = sorted({*one, *other})
            pairs = [(key, one.get(key), other.get(key)) for key in keys]
        else:
            pairs = [] if name in _NOT_COMPARED else [(name, one, other)]
        lines += [
            f"{key}: {value!r} and {second_value!r}" for key, value, second_value in pairs if value != second_value
        ]
    return ["settings differ:", *[f"  {line}" for line in lines]] if lines else []


def _first_other(one: Moment, other: Moment) -> tuple[str, str]:
    """Sentences about the first inputs that differ."""
    count = min(len(one.given), len(other.given))
    place = next((at for at in range(count) if one.given[at] != other.given[at]), count)
    first, second = (each.said[place] if place < len(each.said) else "nothing more" for each in (one, other))
    return first, second


def _pair(first: str, second: str) -> list[str]:
    return [f"  first:  {first}", f"  second: {second}"]

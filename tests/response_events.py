"""Checks of /v1/responses by the types of OpenAI's package: every field is known and none is missing."""

import json
import random
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pydantic
from openai.types.responses import Response, ResponseCustomToolCall, ResponseStreamEvent

from vllm_lite.server.responses.event_log import EventLog

_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
_ENDS = {"response.completed", "response.incomplete", "response.failed"}


def checked(value: Any, kind: Any = Response) -> Any:
    """Parse `value` strictly, and look for fields that the type does not have."""
    found = kind.validate_python(value, strict=True) if isinstance(kind, pydantic.TypeAdapter) else kind(**value)
    if not isinstance(kind, pydantic.TypeAdapter):
        kind.model_validate(value, strict=True)
    _no_extras(found, type(found).__name__)
    return found


def _no_extras(value: Any, place: str) -> None:
    if isinstance(value, pydantic.BaseModel):
        extras = set(value.model_extra or ())
        if isinstance(value, ResponseCustomToolCall):
            extras.discard("status")  # which OpenAI's own answers have; only its type for lists knows it
        assert not extras, f"{place} has {sorted(extras)}"
        for name in type(value).model_fields:
            _no_extras(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _no_extras(each, f"{place}[{index}]")


def events_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream; `event:` and `type` are the same."""
    name = None
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert event["type"] == name
            yield event


def check_stream(events: list[dict[str, Any]], first: int = 0) -> dict[str, Any]:
    """Check that all events parse, are numbered consecutively, and add up to the last event's response. Returns this
    response."""
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    for event in events:
        checked(event, _EVENT)
    assert [event["type"] in _ENDS for event in events] == [False] * (len(events) - 1) + [True]
    response: dict[str, Any] = events[-1]["response"]
    if first == 0:
        assert events[0]["type"] == "response.created"
        assert _added_up(events) == response["output"]
    return response


def _added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the events describe; the deltas of a part must add up to its done event."""
    done, parts = list[dict[str, Any]](), dict[int, str]()
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(done)
            assert event["item"]["status"] == "in_progress"
        elif kind.endswith(".delta"):
            assert event["output_index"] == len(done)
            parts[len(done)] = parts.get(len(done), "") + event["delta"]
        elif kind.endswith(("_text.done", "_arguments.done", "_input.done")):
            (whole,) = (event[name] for name in ("text", "arguments", "input") if name in event)
            assert whole == parts.get(len(done), "")
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(done)
            done.append(event["item"])
    return done


def broken_stream(http: httpx.Client, fields: dict[str, Any], chance: random.Random, *, is_background: bool) -> int:
    """Read one stream over connections that break repeatedly, and check that it is complete. Returns the number of
    breaks."""
    more = {"background": is_background, "ignore_eos": True, "max_output_tokens": chance.randint(5, 60), "stream": True}
    found, num_breaks, done = list[dict[str, Any]](), 0, False
    method, path, body = "POST", "/responses", {**fields, **more}
    while not done:
        num_before = len(found)
        stop = chance.randint(1, 20)
        with http.stream(method, path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for count, event in enumerate(events_in(answer.iter_lines())):
                found.append(event)
                done = event["type"] in _ENDS
                if count + 1 == stop and not done:
                    num_breaks += 1
                    break
        assert len(found) > num_before, "a stream that has not ended was gone on with, and had no event"
        method, body = "GET", None  # type: ignore[assignment]
        path = f"/responses/{found[0]['response']['id']}?stream=true&starting_after={found[-1]['sequence_number']}"
    check_stream(found)
    return num_breaks


def events_of(log: EventLog) -> list[dict[str, Any]]:
    """All events of a log."""
    return list(events_in(zlib.decompress(log.packed()).decode().splitlines()))

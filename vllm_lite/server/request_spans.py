"""RequestSpans: an OpenTelemetry span for each request, sent to a collector over OTLP (`--otlp-traces-endpoint`).

The middleware has each request's arrival, the registry of calls reports the start and the end of what it generates,
and the span is made at the end, under vLLM's names and those of OpenTelemetry's conventions. The SDK's own thread sends
spans in batches and drops those for which its queue has no room, so that a collector never delays a request.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_lite.client.streams.stream import RequestStream
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.calls.call import Call
from vllm_lite.server.calls.list_call import ListCall
from vllm_lite.server.collector import Collector
from vllm_lite.server.openai.errors import public_text

FLUSH_S = 2.0
"""Seconds for the last spans at shutdown."""
PARENT_HEADERS = (b"traceparent", b"tracestate")
MAX_PARENT_BYTES = 1024
"""Maximum length of such a header: 512 bytes of tracestate are to be passed on, by W3C's Trace Context."""
_OPERATIONS = {"chatcmpl": "chat", "embd": "embeddings"}
"""Names of OpenTelemetry's conventions by the kind of a call; others complete a text."""

AnyCall = Call | ListCall[Any]


@dataclass(slots=True)
class HttpArrival:
    """An HTTP request as it arrives: the headers that name its parent span, and its time by both clocks."""

    parent: Mapping[str, str]
    path: str
    time_ns: int
    monotonic_s: float
    has_call: bool = False
    """Whether a call was started for it, whose span stands for the request."""

    @classmethod
    def of(cls, scope: Scope) -> "HttpArrival":
        parent = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in PARENT_HEADERS and len(value) <= MAX_PARENT_BYTES
        }
        return cls(parent, scope["path"], time.time_ns(), time.monotonic())

    def at_ns(self, monotonic_s: float) -> int:
        """A time of time.monotonic() by the clock of spans."""
        return self.time_ns + int((monotonic_s - self.monotonic_s) * 1e9)


_ARRIVAL: ContextVar[HttpArrival | None] = ContextVar("arrival", default=None)


class RequestSpans:
    """Makes the spans of one API server. Every method is called on its loop."""

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError."""
        collector = Collector(endpoint)
        collector.check()
        from vllm_lite.server.span_export import SpanSender

        self._sender = SpanSender(collector.exporter, collector.url)
        self._arrivals: dict[str, HttpArrival] = {}

    def following(self, app: ASGIApp) -> ASGIApp:
        """Wrap `app`, so that every request's arrival is known to the call that it starts. A request to generate that
        is refused before gets a span here."""

        async def followed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            arrival, status = HttpArrival.of(scope), 0

            async def send_and_look(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            token = _ARRIVAL.set(arrival)
            try:
                await app(scope, receive, send_and_look)
            finally:
                _ARRIVAL.reset(token)
                if status >= 400 and not arrival.has_call and scope.get("endpoint") is not None:
                    self._refused(arrival, status)

        return followed

    def started(self, call: AnyCall) -> None:
        """Remember the start of a call in the request that is being answered."""
        arrival = _ARRIVAL.get()
        if arrival is not None:
            arrival.has_call = True
            self._arrivals[call.name] = arrival

    def ended(self, call: AnyCall) -> None:
        """Make the span of a call that has ended, or whose client is gone."""
        arrival = self._arrivals.pop(call.name, None)
        if arrival is None:
            return
        failure = _failure(call)
        attributes = {"url.path": arrival.path, **dict(_attributes(call, arrival))}
        last_s = max((each.metrics.last_token_time or 0.0 for each in _generating(call)), default=0.0)
        end_ns = time.time_ns() if failure is not None or not last_s else arrival.at_ns(last_s)
        self._sender.add(arrival.parent, (arrival.time_ns, end_ns), attributes, failure)

    def close(self) -> None:
        """Send the spans that wait, for at most FLUSH_S."""
        sending = threading.Thread(target=self._sender.close, name="spans", daemon=True)
        sending.start()
        sending.join(FLUSH_S)

    def _refused(self, arrival: HttpArrival, status: int) -> None:
        attributes = {"url.path": arrival.path, "http.response.status_code": status}
        failure = str(status), f"answered with status {status}"
        self._sender.add(arrival.parent, (arrival.time_ns, time.time_ns()), attributes, failure)


def _generating(call: AnyCall) -> Sequence[RequestStream]:
    return [stream for stream in call.streams if isinstance(stream, RequestStream)]


def _reasons(call: AnyCall) -> list[str]:
    """The finish reasons of all samples that have ended, in order."""
    samples = (sample for stream in _generating(call) for sample in stream.samples)
    return [sample.finish_reason for sample in samples if sample.finish_reason is not None]


def _failure(call: AnyCall) -> tuple[str, str] | None:
    """Name and text of what ended a call before its answer was complete; None for a complete one."""
    if call.error is not None:
        return type(call.error).__name__, public_text(call.error)
    if call.was_cut:
        return "shutdown", "the server was shutting down"
    if not call.finished:
        if call.reading.is_over:
            return "client_disconnected", "the client disconnected before the end"
        return "cancelled", "the request was ended before its answer"
    return ("abort", "the request was aborted") if "abort" in _reasons(call) else None


def _attributes(call: AnyCall, arrival: HttpArrival) -> Iterator[tuple[str, Any]]:
    """Attributes of a call's span: vLLM's names, and those of OpenTelemetry's conventions where they differ."""
    streams = _generating(call)
    num_prompt, num_output = call.num_prompt_tokens, sum(stream.num_tokens for stream in streams)
    num_cached = sum(stream.num_cached_tokens or 0 for stream in call.streams)
    yield "gen_ai.operation.name", _OPERATIONS.get(call.style.kind, "text_completion")
    yield "gen_ai.provider.name", "vllm_lite"
    for name in ("gen_ai.request.id", "gen_ai.response.id"):
        yield name, call.id
    for name in ("gen_ai.request.model", "gen_ai.response.model"):
        yield name, call.style.model
    for name in ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"):
        yield name, num_prompt
    for name in ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"):
        yield name, num_output
    yield "gen_ai.usage.cache_read.input_tokens", num_cached
    yield "gen_ai.usage.num_sequences", call.num_sequences
    if streams:
        yield from _of_params(streams[0].params)
        yield "gen_ai.response.finish_reasons", _reasons(call)
    yield from _of_times(streams, arrival)


def _of_params(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.request.top_k", params.top_k
    yield "gen_ai.request.frequency_penalty", params.frequency_penalty
    yield "gen_ai.request.presence_penalty", params.presence_penalty
    yield "gen_ai.request.n", params.n
    yield "gen_ai.request.choice.count", params.n
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens


def _of_times(streams: Sequence[RequestStream], arrival: HttpArrival) -> Iterator[tuple[str, float]]:
    """Seconds in the queue, from the arrival to the first and to the last token, and of the model's parts between."""
    times = [stream.metrics for stream in streams]
    queued = [(each.arrival_time, each.time_in_queue) for each in times if each.time_in_queue is not None]
    firsts = [each.first_token_time for each in times if each.first_token_time is not None]
    lasts = [each.last_token_time for each in times if each.last_token_time is not None]
    if queued:
        yield "gen_ai.latency.time_in_queue", max(queued_s for _, queued_s in queued)
    if firsts and lasts:
        first_s, last_s = min(firsts), max(lasts)
        yield "gen_ai.latency.time_to_first_token", first_s - arrival.monotonic_s
        yield "gen_ai.latency.e2e", last_s - arrival.monotonic_s
        yield "gen_ai.latency.time_in_model_decode", last_s - first_s
        if queued:
            admitted_s = min(first_s, *(arrival_s + queued_s for arrival_s, queued_s in queued))
            yield "gen_ai.latency.time_in_model_prefill", first_s - admitted_s
            yield "gen_ai.latency.time_in_model_inference", last_s - admitted_s

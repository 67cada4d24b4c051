"""Spans of requests, as a collector gets them over OTLP: names, parents, errors; and a collector that is down."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_server import DEADLINE_S, Server, client, post, serving, until
from tests.pooled import write_pooled

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"}
ENVIRONMENT = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_SERVICE_NAME": "stories"}
ERROR = 2
"""STATUS_CODE_ERROR of the protocol."""


class Span(NamedTuple):
    name: str
    service: str
    trace_id: str
    parent_id: str
    state: str
    start_ns: int
    end_ns: int
    status: int
    kind: int
    attributes: dict[str, Any]


class OtlpCollector:
    """A collector at a free port. `spans` are all it was sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collector.spans += spans_in(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def take(self, count: int = 1) -> list[Span]:
        """The next `count` spans, in the order of their ends."""
        until(lambda: len(self.spans) >= count, f"span {count}")
        taken, self.spans = self.spans, []
        assert len(taken) == count, taken
        return sorted(taken, key=lambda span: span.end_ns)

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join(DEADLINE_S)
        self._http.server_close()


def spans_in(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = attributes_of(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    service,
                    span.trace_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_state,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code,
                    span.kind,
                    attributes_of(span.attributes),
                )


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Server, OtlpCollector]]:
    collector = OtlpCollector()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    flags = "--otlp-traces-endpoint", collector.url, "--served-model-name", "m"
    try:
        with serving(*flags, env=ENVIRONMENT, light=True, template=template) as server:
            yield server, collector
    finally:
        collector.close()


def test_a_span_has_its_parent_its_times_and_the_names_of_vllm(traced: tuple[Server, OtlpCollector]) -> None:
    server, collector = traced
    before_ns = time.time_ns()
    body = {"prompt": "Once", "max_tokens": 5, "n": 2, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True}
    with client(server, headers=PARENT) as http:
        answer = post(http, "/v1/completions", body)
    (span,) = collector.take()
    assert (span.name, span.kind, span.service, span.status) == ("llm_request", 2, "stories", 0)
    assert (span.trace_id, span.parent_id, span.state) == (TRACE_ID, PARENT_ID, "vendor=1")
    assert before_ns <= span.start_ns <= span.end_ns <= time.time_ns()
    found, usage = span.attributes, answer["usage"]
    assert found["gen_ai.request.id"] == found["gen_ai.response.id"] == answer["id"]
    assert found["gen_ai.response.model"] == found["gen_ai.request.model"] == answer["model"]
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.n"]) == (5, 2)
    assert found["gen_ai.usage.prompt_tokens"] == found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.usage.output_tokens"] == 10
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert found["gen_ai.operation.name"] == "text_completion"
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    prefill, decode = (found[f"gen_ai.latency.time_in_model_{name}"] for name in ("prefill", "decode"))
    assert found["gen_ai.latency.time_in_model_inference"] == pytest.approx(prefill + decode)
    assert 0 <= found["gen_ai.latency.time_in_queue"] + prefill + decode <= found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.e2e"] == pytest.approx((span.end_ns - span.start_ns) / 1e9, abs=1e-3)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 3, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 3}),
        ("/v1/messages", {**CHAT, "max_tokens": 3}),
        ("/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 3}),
        ("/api/chat", {**CHAT, "options": {"num_predict": 3}}),
        ("/api/generate", {"model": "m", "prompt": "hi", "options": {"num_predict": 3}}),
        ("/completion", {"prompt": "hi", "n_predict": 3}),
    ],
)
def test_every_api_makes_one_span(path: str, body: dict[str, Any], traced: tuple[Server, OtlpCollector]) -> None:
    server, collector = traced
    with client(server, headers=PARENT) as http:
        assert http.post(path, json=body).status_code == 200
    (span,) = collector.take()
    assert (span.trace_id, span.attributes["url.path"]) == (TRACE_ID, path)
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] <= 3


def test_vectors_make_a_span_without_output(tmp_path: Path) -> None:
    model = write_pooled(tmp_path / "m", "Qwen3ForCausalLM")
    collector = OtlpCollector()
    flags = "--model", str(model), "--convert", "embed", "--cpu-threads", "1", "--served-model-name", "m"
    try:
        with serving("--otlp-traces-endpoint", collector.url, *flags, env=ENVIRONMENT) as server:
            with client(server) as http:
                post(http, "/v1/embeddings", {"model": "m", "input": [[5, 6, 7], [8, 9]]})
            (span,) = collector.take()
    finally:
        collector.close()
    found = span.attributes
    assert (found["gen_ai.operation.name"], span.status, found["gen_ai.usage.input_tokens"]) == ("embeddings", 0, 5)
    assert found["gen_ai.usage.output_tokens"] == 0


def test_a_refused_request_is_an_error(traced: tuple[Server, OtlpCollector]) -> None:
    server, collector = traced
    with client(server, headers=PARENT) as http:
        post(http, "/v1/completions", {"prompt": "Once", "max_tokens": -7}, status=400)
    (span,) = collector.take()
    assert (span.trace_id, span.status, span.attributes["error.type"]) == (TRACE_ID, ERROR, "400")


def test_a_client_that_leaves_is_an_error(traced: tuple[Server, OtlpCollector]) -> None:
    server, collector = traced
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with client(server) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())
    (span,) = collector.take()
    assert (span.status, span.attributes["error.type"], span.parent_id) == (ERROR, "client_disconnected", "")


def test_an_aborted_request_is_an_error(traced: tuple[Server, OtlpCollector]) -> None:
    server, collector = traced
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with client(server) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.iter_lines()
        name = json.loads(next(chunks).removeprefix("data: "))["id"]
        with client(server) as other:
            assert other.delete(f"/v1/requests/{name}").status_code == 200
        assert "data: [DONE]" in list(chunks)
    (span,) = collector.take()
    assert (span.status, span.attributes["error.type"]) == (ERROR, "abort")
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_spans_that_wait_are_sent_at_the_end_by_every_server() -> None:
    collector = OtlpCollector()
    flags = "--otlp-traces-endpoint", collector.url, "--api-server-count", "2"
    try:
        with serving(*flags, env={"OTEL_BSP_SCHEDULE_DELAY": "600000"}, light=True) as server:
            for _ in range(6):
                with client(server) as http:
                    post(http, "/v1/completions", {"prompt": "Once", "max_tokens": 2})
            assert server.stop() == 0
        assert {span.service for span in collector.take(6)} == {"vllm-lite"}
    finally:
        collector.close()


def test_a_collector_that_is_down_costs_requests_nothing() -> None:
    collector = OtlpCollector()
    collector.close()
    env = {**ENVIRONMENT, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with serving("--otlp-traces-endpoint", collector.url, env=env, light=True) as server:
        with client(server) as http:
            post(http, "/v1/completions", {"prompt": "Once", "max_tokens": 2})
            server.wait_for("takes no spans")
            for _ in range(20):
                post(http, "/v1/completions", {"prompt": "Once", "max_tokens": 2})
        assert server.stop() == 0
    assert "Traceback" not in server.output
    assert server.output.count(collector.url) == 1, server.output


def test_the_router_of_several_models_passes_the_parent_on(tmp_path: Path) -> None:
    collector = OtlpCollector()
    file = tmp_path / "models.yaml"
    file.write_text(f"defaults: {{otlp_traces_endpoint: '{collector.url}'}}\nmodels: {{red: {{model: demo}}}}\n")
    server = Server("--models", str(file), "--port", "0", "--device", "cpu", env=ENVIRONMENT)
    try:
        server.wait_for("Try:")
        with client(server, headers=PARENT) as http:
            post(http, "/v1/completions", {"model": "red", "prompt": "Once", "max_tokens": 2})
        (span,) = collector.take()
    finally:
        server.close()
        collector.close()
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    assert span.attributes["gen_ai.response.model"] == "red"

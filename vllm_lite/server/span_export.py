"""SpanSender: gives spans to OpenTelemetry's SDK, which sends them from a thread of its own. Imports the SDK, and is
itself imported only for `--otlp-traces-endpoint`."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vllm_lite import __version__
from vllm_lite.runtime import log

SPAN_NAME = "llm_request"

logger = log.get(__name__)


class SpanSender:
    """Sends spans to one collector. The SDK's variables set the service's name, the sampler, the queue and the
    batches."""

    def __init__(self, module: str, url: str) -> None:
        """`module` has the exporter."""
        sdk = logging.getLogger("opentelemetry")  # it would report every lost batch, several times
        sdk.propagate = False
        sdk.addHandler(logging.NullHandler())
        exporter = importlib.import_module(module).OTLPSpanExporter(endpoint=url)
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Reporting(exporter, url)))
        self._tracer = self._provider.get_tracer("vllm_lite", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def add(
        self,
        parent: Mapping[str, str],
        times_ns: tuple[int, int],
        attributes: Mapping[str, Any],
        failure: tuple[str, str] | None,
    ) -> None:
        """Queue a span from start to end. `parent`: headers that name its parent; `failure`: its error, as name and
        text."""
        context = self._propagator.extract(parent)
        start_ns, end_ns = times_ns
        span = self._tracer.start_span(
            SPAN_NAME, context, kind=SpanKind.SERVER, attributes=attributes, start_time=start_ns
        )
        if failure is not None:
            span.set_attribute("error.type", failure[0])
            span.set_status(Status(StatusCode.ERROR, failure[1]))
        span.end(max(start_ns, end_ns))

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        self._provider.shutdown()


class _Reporting(SpanExporter):
    """An exporter that warns once when a collector begins to refuse spans, and again only after it has taken some."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        self._exporter = exporter
        self._url = url
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            logger.warning("%s takes no spans: they are dropped until it does; requests are not delayed", self._url)
        elif self._is_failing and not is_failing:
            logger.info("%s takes spans again", self._url)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        is_done: bool = self._exporter.force_flush(timeout_millis)
        return is_done


def _resource() -> Resource:
    """The resource by the SDK's variables, named vllm-lite if they give no name."""
    found = Resource.create()
    if not str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        return found
    return found.merge(Resource({SERVICE_NAME: "vllm-lite"}))

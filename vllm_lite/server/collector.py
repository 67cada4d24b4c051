"""Collector: where `--otlp-traces-endpoint` sends spans, and by which protocol. Imports nothing of OpenTelemetry."""

import os
from importlib.util import find_spec
from urllib.parse import urlsplit, urlunsplit

from vllm_lite.errors import ConfigError

_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
_INSTALL = {
    "http/protobuf": "pip install 'vllm-lite[otel]'",
    "grpc": "pip install 'vllm-lite[otel]' opentelemetry-exporter-otlp-proto-grpc",
}


class Collector:
    """A collector: its protocol, by the URL or the SDK's variables, and its URL."""

    def __init__(self, endpoint: str) -> None:
        """Raises ConfigError for a URL or a protocol that no exporter takes."""
        try:
            url = urlsplit(endpoint)
            is_url = url.scheme in ("http", "https", "grpc") and bool(url.hostname) and url.port != 0
        except ValueError:  # a bad port, or half an IPv6 address
            is_url = False
        if not is_url:
            raise ConfigError(f"otlp_traces_endpoint must be a URL like http://localhost:4318, got {endpoint!r}")
        variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        named = next((value for name in variables if (value := os.environ.get(name))), "http/protobuf")
        self.protocol = "grpc" if url.scheme == "grpc" else named
        if self.protocol not in _EXPORTERS:
            raise ConfigError(f"the OTLP protocol must be {' or '.join(_EXPORTERS)}, got {self.protocol!r}")
        if self.protocol == "grpc":
            self.url = urlunsplit(url._replace(scheme="http")) if url.scheme == "grpc" else endpoint
        else:
            self.url = urlunsplit(url._replace(path="/v1/traces")) if url.path in ("", "/") else endpoint

    @property
    def exporter(self) -> str:
        """The module that has the exporter."""
        return _EXPORTERS[self.protocol]

    def check(self) -> None:
        """Raise ConfigError if the packages are missing."""
        for name in ("opentelemetry.sdk.trace", self.exporter):
            if not _is_installed(name):
                raise ConfigError(
                    f"otlp_traces_endpoint needs OpenTelemetry for {self.protocol}: {_INSTALL[self.protocol]}"
                )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False

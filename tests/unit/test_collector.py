"""The setting --otlp-traces-endpoint: URLs, protocols, missing packages, and that nothing else loads OpenTelemetry."""

import subprocess
import sys

import pytest

from tests.deadlines import scaled
from vllm_lite.errors import ConfigError
from vllm_lite.server import collector
from vllm_lite.server.collector import Collector

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PROTOCOL, "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("endpoint", "protocol", "url"),
    [
        ("http://c:4318", "http/protobuf", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "http/protobuf", "https://c/otlp/v1/traces"),
        ("grpc://c:4317", "grpc", "http://c:4317"),
    ],
)
def test_the_scheme_chooses_the_protocol(endpoint: str, protocol: str, url: str) -> None:
    found = Collector(endpoint)
    assert (found.protocol, found.url) == (protocol, url)


def test_the_variable_of_the_sdk_chooses_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL, "grpc")
    assert (Collector("http://c:4317").protocol, Collector("http://c:4317").url) == ("grpc", "http://c:4317")
    monkeypatch.setenv(PROTOCOL, "http/json")
    with pytest.raises(ConfigError, match="http/protobuf or grpc, got 'http/json'"):
        Collector("http://c:4317")


@pytest.mark.parametrize("endpoint", ["localhost:4318", "", "ftp://c", "http://", "http://c:port", "http://[c"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL like http://localhost:4318"):
        Collector(endpoint)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'vllm-lite\[otel\]'"):
        Collector("http://c:4318").check()


def test_nothing_of_opentelemetry_is_loaded_without_the_setting() -> None:
    program = "import sys, vllm_lite.server.wiring; print(any('opentelemetry' in name for name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(60), check=True
    )
    assert done.stdout.strip() == "False"

"""References and clients shared by the tests that run the whole road. `server` is the fixture of the file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests import fork_server
from tests.deadlines import scaled
from tests.e2e.reference import Reference, make_reference
from tests.http_server import Server, client, engine_of
from tests.pages import chromium
from vllm_lite.client.engines.session import Session
from vllm_lite.runtime import supervise


@pytest.fixture(scope="module", autouse=True)
def forked_children() -> Iterator[None]:
    """Engines that tests launch in this process, and their workers, are forked."""
    fork_server.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervise, "Popen", fork_server.Popen)
        yield


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """By family, in float32; each is computed once."""
    folder: Path = tmp_path_factory.mktemp("references")
    return {family: make_reference(folder, family) for family in ("llama", "qwen3")}


@pytest.fixture(scope="session")
def llama(references: dict[str, Reference]) -> Reference:
    return references["llama"]


@pytest.fixture(scope="module")
def http(request: pytest.FixtureRequest, server: Server) -> Iterator[httpx.Client]:
    """With the file's HEADERS, if it has some."""
    with client(server, headers=getattr(request.module, "HEADERS", {})) as http:
        yield http


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=scaled(60)) as api:
        yield api


@pytest.fixture(scope="module")
def session(server: Server) -> Iterator[Session]:
    """A client of the engine; the server was started with --address."""
    with engine_of(server) as session:
        yield session


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one file: while it is there its thread has a running event loop, which other tests must not meet."""
    with chromium() as running:
        yield running

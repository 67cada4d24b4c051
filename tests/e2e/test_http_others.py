"""The server among others' clients: one that vanishes at any moment, LangChain's, and schemathesis' made-up ones."""

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from tests.deadlines import scaled
from tests.examples import examples
from tests.http_server import Server, client, serving, short_socket, until
from vllm_lite.client.engines.session import Session
from vllm_lite.server.openai import openapi

PROMPT = "Once upon a time there was a"
NUM_VANISHING = 200
AT_ONCE = 50


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="vl") as folder,
        serving("--address", short_socket(Path(folder)), "--max-num-seqs", "16", "--log-level", "error") as server,
    ):
        yield server


# ---- clients that vanish


def body_of(number: int, *, max_tokens: int, stream: bool) -> bytes:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream, "seed": number, "n": 1}
    if number % 5 == 0:
        body["n"] = 3
    return json.dumps(body).encode()


async def vanish(host: str, port: int, number: int) -> None:
    """Connect, say some of a request, perhaps all, perhaps read a part of the answer, and go without a word."""
    rng = random.Random(number)
    data = body_of(number, max_tokens=400, stream=rng.random() < 0.7)
    head = b"POST /v1/completions HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    whole = head % len(data) + data
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if rng.random() < 0.25:
            writer.write(whole[: rng.randrange(len(whole))])
            await writer.drain()
            return
        writer.write(whole)
        await writer.drain()
        for _ in range(rng.randrange(4)):  # pieces of the answer
            try:
                async with asyncio.timeout(rng.random()):
                    await reader.read(4096)
            except TimeoutError:
                return
    finally:
        writer.transport.abort() if rng.random() < 0.5 else writer.close()


async def steady(host: str, port: int, text: str) -> str:
    """A well-behaved stream beside them. Returns its text."""
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=scaled(60)) as http:
        body = {"prompt": text, "max_tokens": 60, "temperature": 0, "stream": True}
        pieces = []
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
        return "".join(pieces)


async def test_200_clients_that_vanish_leave_nothing_and_do_not_affect_others(server: Server, session: Session) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    prompts = [f"{PROMPT} {name}" for name in ("bear", "fox", "girl", "king")]

    alone = [await steady(host, int(port), text) for text in prompts]
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            await vanish(host, int(port), number)

    async def among_them() -> list[str]:
        return [await steady(host, int(port), text) for text in prompts * 3]

    others = asyncio.ensure_future(among_them())
    await asyncio.gather(*(one(number) for number in range(NUM_VANISHING)))
    assert await others == alone * 3
    with client(server) as http:
        until(lambda: http.get("/load").json() == {"server_load": 0}, "an idle server")
    until(lambda: session.stats().num_running + session.stats().num_waiting == 0, "an idle engine")
    assert session.stats().num_used_blocks == 0
    assert server.process.poll() is None


# ---- LangChain


async def test_langchain_talks_streams_and_runs_batches(server: Server) -> None:
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI, OpenAI

    http = httpx.Client(timeout=scaled(60))  # theirs would stay open
    settings: Any = {"model": "demo_model", "base_url": server.url + "/v1", "api_key": "none", "max_retries": 0}
    settings |= {"temperature": 0, "max_tokens": 30, "http_client": http}
    messages = [SystemMessage("You tell stories."), HumanMessage("Tell me a story about a bear.")]

    async def asynchronous() -> str:
        async with httpx.AsyncClient(timeout=scaled(60)) as asynchronous_http:
            chat = ChatOpenAI(**settings, http_async_client=asynchronous_http)
            return "".join([str(chunk.content) async for chunk in chat.astream(messages)])

    with http:
        chat = ChatOpenAI(**settings)
        whole = chat.invoke(messages)
        assert whole.content
        assert whole.usage_metadata is not None
        assert 0 < whole.usage_metadata["output_tokens"] <= 30
        assert whole.response_metadata["finish_reason"] in ("length", "stop")
        assert "".join(str(chunk.content) for chunk in chat.stream(messages)) == whole.content
        assert [answer.content for answer in chat.batch([messages] * 3)] == [whole.content] * 3
        assert await asynchronous() == whole.content
        likely = ChatOpenAI(**settings, logprobs=True, top_logprobs=2).invoke(messages)
        tokens = likely.response_metadata["logprobs"]["content"]
        assert [len(token["top_logprobs"]) for token in tokens] == [2] * whole.usage_metadata["output_tokens"]
        with pytest.raises(ContextOverflowError):
            chat.invoke([HumanMessage("word " * 4000)])
        completion = OpenAI(**settings)
        assert "".join(completion.stream(PROMPT)) == completion.invoke(PROMPT) != ""


# ---- schemathesis

OPERATIONS = {
    result.ok().label: result.ok()
    for result in schemathesis.openapi.from_dict(openapi.document()).get_all_operations()
    if isinstance(result, Ok)
}


def nearer(body: dict[str, Any]) -> None:
    """Correct a body by rules that no document can state, so that more requests get past the first checks."""
    body.pop("model", None)
    for message in listed(body, "messages", dict):  # an operation without messages may get anything by that name
        if not isinstance(message.get("content"), str):
            message["content"] = "a story"
    for name in ("token_ids", "tokens"):
        if isinstance(body.get(name), list):
            body[name] = [int(token) % 2048 for token in listed(body, name, (int, float))] or [5]


def listed(body: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> list[Any]:
    """The items of a list in `body` that are of a kind."""
    items = body.get(name)
    return [item for item in items if isinstance(item, kind)] if isinstance(items, list) else []


GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
"""The routes that most clients call; they get more examples than others."""


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("label", OPERATIONS)
def test_whatever_is_asked_is_answered(server: Server, label: str, mode: GenerationMode) -> None:
    """Requests that the document allows, and others: the server never fails or hangs, and statuses and bodies follow
    the document."""

    num_examples = examples(20 if label.endswith(GENERATING) else 7)

    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_examples,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    def ask(case: schemathesis.Case[Any]) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            nearer(case.body)
        # Bounds may depend on the model and on other fields; numbers and flags have more spellings than the document's.
        excluded = [schemathesis.checks.positive_data_acceptance, schemathesis.checks.negative_data_rejection]
        case.call_and_validate(base_url=server.url, timeout=scaled(20), excluded_checks=excluded)

    try:
        ask()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # a route without parameters has no wrong requests

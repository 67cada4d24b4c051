"""Outputs of a model, token by token, as the official clients of four dialects get them: the same items one after the
other and from a server that is busy, which groups the tokens in other ways."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from tests.deadlines import scaled
from tests.groupings import Item, cut, hostile, in_order
from tests.http_server import serving
from tests.response_transcripts import MESSAGES, TOOLS, WRITERS, ids_of, pieces_of, read
from tests.scripted import Script, write_scripted
from vllm_lite.client.text.response import shipped

FORMATS = ("hermes, text", "mistral", "openai")
"""Closed by a text, by the end of the JSON, and by a token."""
MAX_TOKENS = 1000
DEADLINE_S = scaled(60.0)
FUNCTIONS = [tool["function"] for tool in TOOLS]


def outputs(name: str) -> list[str]:
    """Some of the outputs that tests.groupings has of a format, so short that they fit into a checkpoint together."""
    writer = WRITERS[name]
    usual = [text for each in MESSAGES.values() if (text := writer.write(each))]
    texts = [*hostile(name, random.Random(name)), *usual]
    return [text for text in texts if text.strip() and len(text) < 300][:16]


def expected(name: str, text: str) -> list[Item]:
    writer = WRITERS[name]
    ids = ids_of(writer.tokens)
    found = read(shipped.compose(*writer.names, ids), pieces_of(text, ids))
    items: list[Item] = [
        ("call", *found.calls[int(value)]) if kind == "call" else ("text" if kind == "content" else kind, value)
        for kind, value in found.order
    ]
    return in_order(items)


class Clients:
    """One client of each API. Every method returns the items of an answer, and the number of its parts."""

    def __init__(self, url: str) -> None:
        import anthropic  # two seconds, that every process which collects the tests would take

        settings: Any = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE_S}
        self.openai: Any = openai.AsyncOpenAI(base_url=f"{url}/v1", **settings)
        self.anthropic: Any = anthropic.AsyncAnthropic(base_url=url, **settings)
        self.ollama: Any = ollama.AsyncClient(url, timeout=DEADLINE_S)

    async def chat(self, asked: Any) -> tuple[list[Item], int]:
        stream = await self.openai.chat.completions.create(
            model="m", messages=asked, tools=TOOLS, stream=True, max_tokens=MAX_TOKENS
        )
        items: list[Item] = []
        count = 0
        async for chunk in stream:
            delta, count = chunk.choices[0].delta, count + 1
            _add(items, "reasoning", getattr(delta, "reasoning", None))
            _add(items, "text", delta.content)
            for call in delta.tool_calls or ():
                if call.id:
                    items.append(("call", call.function.name, ""))
                items[-1] = (*items[-1][:2], items[-1][2] + call.function.arguments)
        return items, count

    async def response(self, asked: Any) -> tuple[list[Item], int]:
        tools: Any = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
        stream = await self.openai.responses.create(
            model="m", input=asked, tools=tools, stream=True, max_output_tokens=MAX_TOKENS
        )
        items: list[Item] = []
        count = 0
        async for event in stream:
            count += event.type.endswith(".delta")
            if event.type in ("response.completed", "response.incomplete"):
                for item in event.response.output:
                    if item.type == "function_call":
                        items.append(("call", item.name, item.arguments))
                    elif item.type in ("message", "reasoning"):
                        items.append(("text" if item.type == "message" else "reasoning", item.content[0].text))
        return items, count

    async def message(self, asked: Any) -> tuple[list[Item], int]:
        tools: Any = [{"name": it["name"], "input_schema": it["parameters"]} for it in FUNCTIONS]
        items: list[Item] = []
        count = 0
        parts: list[str] = []
        async with self.anthropic.messages.stream(
            model="m", messages=asked, tools=tools, max_tokens=MAX_TOKENS
        ) as stream:
            async for event in stream:
                if event.type == "content_block_start":
                    parts = []
                elif event.type == "content_block_delta":
                    count += 1
                    parts.append(event.delta.partial_json if event.delta.type == "input_json_delta" else "")
                elif event.type == "content_block_stop":
                    block = event.content_block
                    if block.type == "tool_use":
                        items.append(("call", block.name, "".join(parts)))
                    elif block.type in ("text", "thinking"):
                        kind = "text" if block.type == "text" else "reasoning"
                        items.append((kind, block.text if block.type == "text" else block.thinking))
        return items, count

    async def ollama_chat(self, asked: Any) -> tuple[list[Item], int]:
        items: list[Item] = []
        count = 0
        async for part in await self.ollama.chat("m", messages=asked, tools=TOOLS, stream=True):
            message, count = part.message, count + 1
            _add(items, "reasoning", message.thinking)
            _add(items, "text", message.content)
            functions = [call.function for call in message.tool_calls or ()]
            items += [("call", each.name, json.dumps(dict(each.arguments))) for each in functions]
        return items, count

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()
        await self.ollama._client.aclose()


def _add(items: list[Item], kind: str, text: str | None) -> None:
    if text and items and items[-1][0] == kind:
        items[-1] = (kind, items[-1][1] + text)
    elif text:
        items.append((kind, text))


@pytest.fixture(scope="module", params=FORMATS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The name of a format, and the URL of a server whose model writes outputs in it."""
    name = request.param
    writer, rng = WRITERS[name], random.Random(1)
    scripts = [Script(cut(text, writer.tokens, rng)) for text in outputs(name)]
    folder: Path = write_scripted(tmp_path_factory.mktemp("scripted"), scripts, writer.tokens, max_model_len=8192)
    calls, reasoning = writer.names
    flags = ["--tool-call-parser", str(calls), "--reasoning-parser", str(reasoning), "--served-model-name", "m"]
    with serving(str(folder), *flags, "--max-num-seqs", "64") as server:
        yield name, server.url


async def test_clients_get_the_same_items_alone_and_beside_many_others(served: tuple[str, str]) -> None:
    name, url = served
    texts = outputs(name)
    wanted = [expected(name, text) for text in texts]

    clients = Clients(url)
    ways: Sequence[Callable[[Any], Awaitable[tuple[list[Item], int]]]] = (
        clients.chat,
        clients.response,
        clients.message,
        clients.ollama_chat,
    )

    async def ask(way: int, number: int) -> int:
        asked = [{"role": "user", "content": f"script {number}"}]
        items, count = await ways[way](asked)
        what = f"{ways[way].__name__}: {texts[number]!r}"
        assert in_order(items) == wanted[number], what
        return count

    try:
        alone = [await ask(number % 4, number) for number in range(len(texts))]
        everything = [(way, number) for way in range(4) for number in range(len(texts))]
        async with asyncio.TaskGroup() as tasks:
            asked = {each: tasks.create_task(ask(*each)) for each in everything}
        several = [asked[number % 4, number].result() for number in range(len(texts))]
        assert several != alone, "tokens were grouped in other ways"
    finally:
        await clients.close()

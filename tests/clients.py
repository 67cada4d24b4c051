"""AsyncClient connected to a fake engine with the byte_level tokenizer, for tests of its handling of messages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests import tokenizers_for_tests as made
from tests.fakes import DEADLINE_S, FakeEngine, welcome
from vllm_lite.client.async_client import AsyncClient
from vllm_lite.client.outputs import RequestOutput
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.api import GetStats
from vllm_lite.protocol.stats import Stats

TOKENIZER = Tokenizer(made.byte_level())
SIZE = TOKENIZER.vocab_size


@asynccontextmanager
async def connected(folder: Path | None, **options: Any) -> AsyncIterator[tuple[AsyncClient, FakeEngine]]:
    """Connect for at most DEADLINE_S. `folder` has the tokenizer, see the fixture of that name; None: the engine names
    none. `options` are AsyncClient's."""
    tokenizer = None if folder is None else str(folder)
    with FakeEngine(answer=welcome(vocab_size=SIZE, tokenizer=tokenizer)) as engine:
        async with asyncio.timeout(DEADLINE_S), AsyncClient(engine.address, timeout_s=DEADLINE_S, **options) as client:
            yield client, engine


async def expect(engine: FakeEngine, kind: type[Any]) -> Any:
    """The next message that the engine receives; it must be of this kind."""
    return await asyncio.to_thread(engine.expect, kind)


async def settle(client: AsyncClient, engine: FakeEngine) -> None:
    """Returns when readers have been given all that the engine sent so far."""
    stats = asyncio.ensure_future(client.stats())
    await expect(engine, GetStats)
    engine.send(Stats(*range(11)))
    await stats


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)

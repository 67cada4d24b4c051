"""AsyncClient connected to a fake engine with the byte_level tokenizer, for tests of what it makes of messages."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests import tokenizers_for_tests as made
from tests.fakes import DEADLINE_S, FakeEngine, welcome
from vllm_lite.client.async_client import AsyncClient
from vllm_lite.client.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(made.byte_level())
SIZE = TOKENIZER.vocab_size


@asynccontextmanager
async def connected(folder: Path | None, **options: Any) -> AsyncIterator[tuple[AsyncClient, FakeEngine]]:
    """`folder` has the tokenizer, see the fixture of that name; None: the engine names none."""
    tokenizer = None if folder is None else str(folder)
    with FakeEngine(answer=welcome(vocab_size=SIZE, tokenizer=tokenizer)) as engine:
        async with AsyncClient(engine.address, timeout_s=DEADLINE_S, **options) as client:
            yield client, engine


def run(
    folder: Path | None, body: Callable[[AsyncClient, FakeEngine], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """`options` are AsyncClient's."""

    async def main() -> None:
        async with connected(folder, **options) as (client, engine):
            await asyncio.wait_for(body(client, engine), DEADLINE_S)

    asyncio.run(main())


async def expect(engine: FakeEngine, kind: type[Any]) -> Any:
    """The next message that the engine gets."""
    return await asyncio.to_thread(engine.expect, kind)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)

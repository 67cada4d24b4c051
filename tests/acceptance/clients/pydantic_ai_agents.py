"""pydantic-ai: an answer, a stream, an output by a tool and one by a schema."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from common import PROMPT, URL, check
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
SETTINGS = {"max_tokens": 60}


@dataclass
class Cat:
    """A cat."""

    name: Literal["Tom", "Mia"]
    age: Literal[1, 2, 3]


async def streamed() -> str:
    async with Agent(MODEL).run_stream(PROMPT, model_settings=SETTINGS) as result:
        return "".join([part async for part in result.stream_text(delta=True)])


check(Agent(MODEL).run_sync(PROMPT, model_settings=SETTINGS).output)
check(asyncio.run(streamed()))
for form in (Cat, NativeOutput(Cat)):
    cat = Agent(MODEL, output_type=form).run_sync("A cat.", model_settings=SETTINGS).output
    check(isinstance(cat, Cat))

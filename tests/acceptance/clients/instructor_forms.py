"""instructor: a form by a tool and by a schema."""

from typing import Literal

import instructor
import openai
from common import URL, check
from pydantic import BaseModel


class Cat(BaseModel):
    name: Literal["Tom", "Mia"]
    age: Literal[1, 2, 3]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    asked = [{"role": "user", "content": "A cat."}]
    check(
        client.chat.completions.create(model="demo", messages=asked, response_model=Cat, max_tokens=120, max_retries=0)
    )

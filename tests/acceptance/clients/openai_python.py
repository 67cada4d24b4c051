"""OpenAI's package: chat, stream, tools, a form, responses, completions, vectors."""

from typing import Any

import openai
from common import PROMPT, SCHEMA, TOOL, URL, check

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
ask: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60}
check(client.chat.completions.create(**ask).choices[0].message.content)
parts = client.chat.completions.create(**ask, stream=True)
check("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
tools = {"tools": [TOOL], "tool_choice": "required"}
form = {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA, "strict": True}}
check(client.chat.completions.create(**ask | {"response_format": form}).choices[0].message.content)
check(client.chat.completions.create(**ask | tools).choices[0].message.tool_calls)
check(client.responses.create(model="demo", input=PROMPT, max_output_tokens=16).output_text)
events = list(client.responses.create(model="demo", input=PROMPT, max_output_tokens=8, stream=True))
check(events[-1].type in {"response.completed", "response.incomplete"})
check(client.completions.create(model="demo", prompt="Once upon a time", max_tokens=8, logprobs=2).choices[0].logprobs)
check(len(client.embeddings.create(model="demo", input=["a cat", "a dog"]).data) == 2)
check([model.id for model in client.models.list()])

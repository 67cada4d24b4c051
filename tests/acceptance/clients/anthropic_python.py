"""Anthropic's package: messages, stream, tools, counted tokens."""

from typing import Any

import anthropic
from common import SCHEMA, URL, check

client = anthropic.Anthropic(base_url=URL, api_key="none")
ask: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 16}
check(client.messages.create(**ask).content[0].text)
with client.messages.stream(**ask) as stream:
    check("".join(stream.text_stream))
tool = {"name": "feed", "description": "Feed a cat.", "input_schema": SCHEMA}
forced = {"max_tokens": 60, "tools": [tool], "tool_choice": {"type": "tool", "name": "feed"}}
called = client.messages.create(**ask | forced)
check(called.content[-1].type == "tool_use" and called.content[-1].input["name"])
check(client.messages.count_tokens(model="demo", messages=ask["messages"]).input_tokens)

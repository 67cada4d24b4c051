"""Ollama's package: chat, generate, a stream, a form, vectors, lists."""

from typing import Any

import ollama
from common import PROMPT, SCHEMA, URL, check

client = ollama.Client(host=URL)
ask: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}
ask["options"] = {"num_predict": 60}
check(client.chat(**ask).message.content)
check("".join(part.message.content or "" for part in client.chat(**ask, stream=True)))
check(client.chat(**ask, format=SCHEMA).message.content)
check(client.generate(model="demo", prompt="Once", options={"num_predict": 8}).response)
check(len(client.embed(model="demo", input=["a cat", "a dog"]).embeddings) == 2)
check(client.list().models)
check(client.show("demo").modelinfo)

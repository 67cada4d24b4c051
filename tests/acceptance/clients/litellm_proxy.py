"""LiteLLM's proxy before the server: a chat, a stream, a tool, vectors, and Anthropic's messages with a stream."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
from common import PROMPT, TOOL, URL, check

MODELS = {"chat": "hosted_vllm/demo", "plain": "openai/demo", "vectors": "openai/demo"}
KEY = "sk-proxy"
START_S = 180.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(port: int) -> "subprocess.Popen[bytes]":
    """Start the proxy, and wait until it answers."""
    there = {"api_base": f"{URL}/v1", "api_key": "none"}
    models = [{"model_name": name, "litellm_params": {"model": model, **there}} for name, model in MODELS.items()]
    config = {"model_list": models, "general_settings": {"master_key": KEY}}
    Path("proxy.yaml").write_text(json.dumps(config))  # JSON is YAML
    command = [str(Path(sys.executable).with_name("litellm")), "--config", "proxy.yaml", "--host", "127.0.0.1"]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    proxy = subprocess.Popen([*command, "--port", str(port)], env=env)
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and proxy.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).status_code == 200:
                return proxy
        except httpx.HTTPError:
            time.sleep(0.5)
    proxy.kill()
    raise SystemExit("the proxy did not start")


def call(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=60)
    asked: Any = [{"role": "user", "content": PROMPT}]
    tools: Any = [TOOL]
    for model in ("chat", "plain"):
        check(client.chat.completions.create(model=model, messages=asked, max_tokens=20).choices[0].message.content)
        stream = client.chat.completions.create(
            model=model, messages=asked, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        check("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
        check(chunks[-1].usage and chunks[-1].usage.completion_tokens)
    called = client.chat.completions.create(
        model="chat", messages=asked, tools=tools, tool_choice="required", max_tokens=120
    )
    check(called.choices[0].message.tool_calls)
    check(len(client.embeddings.create(model="vectors", input=["a", "b"]).data) == 2)
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    body = {"model": "chat", "max_tokens": 20, "messages": asked}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        answer = http.post("/v1/messages", json=body)
        check(answer.status_code == 200 and answer.json()["content"][0]["text"])
        with http.stream("POST", "/v1/messages", json={**body, "stream": True}) as streamed:
            check("message_stop" in "".join(streamed.iter_lines()))


port = free_port()
proxy = started(port)
try:
    call(f"http://127.0.0.1:{port}")
finally:
    proxy.terminate()
    proxy.wait(30)

"""A server of a checkpoint without a tokenizer.json, with templates that have names, and with sampling defaults."""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from tests.http_server import Server, serving

DEMO = Path(str(files("vllm_lite") / "demo_model"))
TEMPLATES = [
    {"name": "default", "template": "{{ messages[-1].content }}"},
    {"name": "tool_use", "template": "{{ tools[0].function.name }}: {{ messages[-1].content }}"},
]
TOOLS = [{"type": "function", "function": {"name": "Tom", "parameters": {"type": "object"}}}]
CHAT = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO / name)
    model = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    settings = {"tokenizer_class": "GPT2Tokenizer", "chat_template": TEMPLATES, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 2.0, "top_k": 7, "max_new_tokens": 9}))
    defaults = ["--override-generation-config", '{"temperature": 0, "max_new_tokens": 6}']
    env = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with serving(str(folder), "--port", "0", *defaults, env=env) as server:
        yield server


def text_of(http: httpx.Client, body: dict[str, object]) -> str:
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    text: str = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return text


def test_conversion_and_defaults_are_logged(server: Server) -> None:
    assert "vocab.json, once, into" in server.output
    assert "sampling defaults: temperature 0, top_k 7, max_tokens 6" in server.output
    assert "no request gets more than 6 tokens" in server.output


def test_requests_get_the_defaults(http: httpx.Client) -> None:
    """Greedy where they say nothing; never more tokens than the limit."""
    for path, asked in (
        ("/v1/completions", {"prompt": "Once upon a time"}),
        ("/v1/chat/completions", {"messages": CHAT}),
    ):
        answers = [http.post(path, json={**asked, "ignore_eos": True}).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        for more, count in (({}, 6), ({"max_tokens": 100}, 6), ({"max_tokens": 2, "temperature": 1.0}, 2)):
            usage = http.post(path, json={**asked, **more, "ignore_eos": True}).json()["usage"]
            assert usage["completion_tokens"] == count
    card = http.get("/v1/models").json()["data"][0]
    assert "temperature" not in json.dumps(card)


def test_chats_with_tools_have_their_template(http: httpx.Client) -> None:
    assert text_of(http, {"messages": CHAT}) == "Once upon a time"
    assert text_of(http, {"messages": CHAT, "tools": TOOLS}) == "Tom: Once upon a time"
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "tools": TOOLS})
    assert "not shown" not in answer.headers.get("warning", "")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "image"},
    ],
)
def test_images_and_sounds_are_refused(http: httpx.Client, part: dict[str, object]) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    answer = http.post("/v1/chat/completions", json={"messages": chat})
    assert answer.status_code == 400
    kind = part["type"]
    sound = f"messages[0].content holds {kind!r}; only text is supported"
    image = f"messages[0].content[1] is {kind!r}; no images are supported here, only text is"
    assert answer.json()["error"]["message"] == (sound if kind == "input_audio" else image)

"""Images over HTTP: OpenAI's chats, as its client sends them."""

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from tests.deadlines import scaled
from tests.http_server import Server, serving
from tests.images import make_smolvlm, picture

FLAGS = ["--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "8", "--served-model-name", "eyes"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = make_smolvlm(tmp_path_factory.mktemp("smolvlm") / "m")
    with serving("--model", str(path), "--max-model-len", "512", "--num-gpu-blocks-override", "64", *FLAGS) as server:
        yield server


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=scaled(60.0), max_retries=0)


def url_of(width: int, height: int, seed: int, kind: str = "PNG") -> str:
    made = BytesIO()
    Image.fromarray(picture(width, height, seed)).save(made, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(made.getvalue()).decode()}"


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def ask(api: OpenAI, *parts: Any, **more: Any) -> Any:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    messages: Any = [{"role": "user", "content": content}]
    settings = {"max_completion_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return api.chat.completions.create(model="eyes", messages=messages, **{**settings, **more})


def test_a_chat_with_images(server: Server) -> None:
    api = client(server)
    wide, other = part(url_of(90, 60, 1)), part(url_of(90, 60, 2))
    first, again, changed = ask(api, wide, "a page"), ask(api, wide, "a page"), ask(api, other, "a page")
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != changed.choices[0].message.content
    assert first.usage.prompt_tokens == again.usage.prompt_tokens > 5 * 4, "with those of its five tiles"
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16
    assert changed.usage.prompt_tokens_details.cached_tokens == 0
    text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(api, wide, "a page", stream=True))
    assert text == first.choices[0].message.content
    both = ask(api, "one", wide, "two", part(url_of(90, 60, 1, "JPEG")))
    assert both.usage.prompt_tokens > 2 * 5 * 4


def test_tokenize_counts_images(server: Server) -> None:
    message = {"role": "user", "content": [part(url_of(90, 60, 1)), {"type": "text", "text": "a page"}]}
    counted = httpx.post(f"{server.url}/tokenize", json={"model": "eyes", "messages": [message]}).json()
    assert counted["count"] == ask(client(server), part(url_of(90, 60, 1)), "a page").usage.prompt_tokens


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:1/a.png", "has an image at 'http://127.0.0.1:1/a.png'; it must be data:image/"),
        ("file:///etc/passwd", "it must be data:image/"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64,AAAA", "must be a PNG, JPEG, GIF, WEBP file"),
        (url_of(40, 40, 3)[:-400], "the PNG image is damaged or cut off"),
        (None, "an image without a URL"),
    ],
)
def test_images_that_cannot_be_taken_answer_400(server: Server, url: Any, problem: str) -> None:
    with pytest.raises(BadRequestError, match=problem) as caught:
        ask(client(server), part(url), "a page")
    assert caught.value.body["param"] == "messages"  # type: ignore[index]


def test_32_images_at_once(server: Server) -> None:
    """A flood is answered whole, and text beside it."""
    from concurrent.futures import ThreadPoolExecutor

    api = client(server)
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(ask, api, part(url_of(70, 40, seed % 8)), f"say {seed % 4}") for seed in range(32)]
        text = threads.submit(ask, api, "no image")
        answers = [each.result().choices[0].message.content for each in asked]
    assert text.result().usage.prompt_tokens < 40
    for seed in range(8, 32):
        assert answers[seed] == answers[seed % 8]

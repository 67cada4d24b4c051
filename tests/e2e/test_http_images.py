"""Images over HTTP, as the clients of each API send them."""

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from tests.deadlines import scaled
from tests.http_server import Server, serving
from tests.images import make_smolvlm, picture

LIMITS = [
    "--limit-mm-per-prompt",
    '{"image": 6}',
    "--max-image-pixels",
    "10000",
    "--allowed-media-domains",
    "localhost",
]
FLAGS = ["--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "8", "--served-model-name", "eyes"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = make_smolvlm(tmp_path_factory.mktemp("smolvlm") / "m")
    with serving(
        "--model", str(path), "--max-model-len", "512", "--num-gpu-blocks-override", "64", *FLAGS, *LIMITS
    ) as server:
        yield server
        client(server).close()


_clients: dict[str, OpenAI] = {}


def client(server: Server) -> OpenAI:
    if server.url not in _clients:
        _clients[server.url] = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=scaled(60.0), max_retries=0)
    return _clients[server.url]


def url_of(width: int, height: int, seed: int, kind: str = "PNG") -> str:
    made = BytesIO()
    Image.fromarray(picture(width, height, seed)).save(made, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(made.getvalue()).decode()}"


def base64_of(width: int, height: int, seed: int) -> str:
    return url_of(width, height, seed).partition(",")[2]


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
    of_images = [each.usage.prompt_tokens_details.model_extra for each in (first, again, ask(api, "words alone"))]
    assert of_images == [{"multimodal_tokens": {"image": 5 * 4}}] * 2 + [{}]
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
        ("http://127.0.0.1:1/a.png", "has an image at '127.0.0.1'; images are fetched from localhost alone"),
        ("http://localhost:1/a.png", "at 'localhost', which is not at a public address"),
        (url_of(101, 100, 3), "the image has 10100 pixels; at most 10000 are decoded"),
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


def test_the_images_of_a_prompt_are_counted(server: Server) -> None:
    with pytest.raises(BadRequestError, match="a prompt may have at most 6 images, got 7"):
        ask(client(server), *[part(url_of(8, 8, seed)) for seed in range(7)])


def test_a_uuid_names_an_image_sent_with_it(server: Server) -> None:
    """vLLM's: the image is sent once, and named from then on, until another one has the name."""
    api, wide, other = client(server), part(url_of(90, 60, 1)), part(url_of(60, 90, 2))
    named: dict[str, Any] = {"type": "image_url", "image_url": None, "uuid": "sku-1"}
    with pytest.raises(BadRequestError, match="the image with the uuid 'sku-1' is not held here, or not any more"):
        ask(api, named, "a page")
    first = ask(api, wide, "a page")
    for given in ({**wide, "uuid": "sku-1"}, named, {**named, "image_url": {"url": ""}}):
        answer = ask(api, given, "a page")
        assert answer.choices[0].message.content == first.choices[0].message.content
        assert answer.usage.prompt_tokens == first.usage.prompt_tokens
    changed = ask(api, {**other, "uuid": "sku-1"}, "a page")
    assert changed.choices[0].message.content == ask(api, other, "a page").choices[0].message.content
    assert ask(api, named, "a page").choices[0].message.content == changed.choices[0].message.content
    with pytest.raises(BadRequestError, match="a uuid that is not a text of at most 256 characters"):
        ask(api, {**wide, "uuid": "x" * 257}, "a page")


def test_a_request_may_change_the_processors_sizes(server: Server) -> None:
    api, wide = client(server), part(url_of(90, 60, 1))

    def used(**changes: Any) -> int:
        answer = ask(api, wide, "a page", extra_body={"mm_processor_kwargs": changes})
        found: int = answer.usage.prompt_tokens_details.model_extra["multimodal_tokens"]["image"]
        return found

    assert [used(), used(do_image_splitting=False), used(size={"longest_edge": 96})] == [20, 4, 28]
    for changes, problem in (
        ({"max_pixels": 99}, "has max_pixels; the processor of this model takes size, do_image_splitting"),
        ({"size": {"longest_edge": 9999}}, "size.longest_edge is at most 4096, got 9999"),
        ({"size": {"longest_edge": "large"}}, "Expected `int`, got `str`"),
    ):
        with pytest.raises(BadRequestError, match=problem) as caught:
            used(**changes)
        assert caught.value.body["param"] == "messages"  # type: ignore[index]


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "video of a chat": ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "'video_url'"),
    "audio of a chat": ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "'input_audio'"),
    "vLLM's audio": ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}, "'audio_url'"),
    "file": ({"type": "file", "file": {"file_data": "AAAA", "filename": "a.pdf"}}, "'file'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_other_than_images_are_refused_by_their_kind(server: Server, name: str) -> None:
    """In chats, in messages of Anthropic's API, and in responses."""
    given, kind = OTHERS[name]
    url = server.url
    message = {"role": "user", "content": [given, {"type": "text", "text": "what is it?"}]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [message]},
        "/tokenize": {"messages": [message]},
        "/v1/messages": {"messages": [message], "max_tokens": 4},
        "/v1/responses": {"input": [message]},
    }
    for path, body in bodies.items():
        answer = httpx.post(url + path, json={"model": "eyes", **body}, timeout=scaled(30.0))
        assert answer.status_code == 400, (path, answer.text)
        assert kind in answer.text, (path, answer.text)


def test_open_webuis_requests(server: Server) -> None:
    """Open WebUI's requests with a dropped picture, to a server of OpenAI's API and to one of Ollama's."""
    content: list[Any] = [
        {"type": "text", "text": "a page"},
        {"type": "image_url", "image_url": {"url": url_of(90, 60, 1)}},
    ]
    chat: dict[str, Any] = {"stream": True, "model": "eyes", "messages": [{"role": "user", "content": content}]}
    chat |= {"stream_options": {"include_usage": True}, "max_tokens": 8, "temperature": 0}
    same = ask(client(server), *[content[1]], "a page", extra_body={})
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=chat, timeout=scaled(60.0)) as answer:
        assert answer.status_code == 200
        events = [line for line in answer.iter_lines() if line.startswith("data: {")]
    usage = json.loads(events[-1].removeprefix("data: "))["usage"]
    assert usage["prompt_tokens_details"]["multimodal_tokens"] == {"image": 20}
    assert usage["prompt_tokens"] == same.usage.prompt_tokens
    message = {"role": "user", "content": "a page", "images": [base64_of(90, 60, 1)]}
    asked = {"model": "eyes", "messages": [message], "stream": True, "options": {"temperature": 0, "num_predict": 8}}
    answer = httpx.post(f"{server.url}/api/chat", json={**asked, "keep_alive": "5m"}, timeout=scaled(60.0))
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == same.choices[0].message.content
    assert lines[-1]["prompt_eval_count"] == same.usage.prompt_tokens
    shown = httpx.post(f"{server.url}/api/show", json={"model": "eyes"}, timeout=scaled(30.0)).json()
    assert "vision" in shown["capabilities"], "else no client offers to attach an image"
    props = httpx.get(f"{server.url}/props", timeout=scaled(30.0)).json()
    assert props["modalities"] == {"vision": True, "audio": False}


def test_anthropics_client_sends_images(server: Server) -> None:
    """In a message, and in a tool's result, which templates render within a message of the user."""
    from anthropic import Anthropic

    with Anthropic(base_url=server.url, api_key="none", timeout=scaled(60.0), max_retries=0) as api:

        def asked(*messages: Any) -> Any:
            more = {"ignore_eos": True, "temperature": 0}
            return api.messages.create(model="eyes", max_tokens=8, messages=[*messages], extra_body=more)

        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(90, 60, 1)}}
        text: Any = {"type": "text", "text": "a page"}
        answer = asked({"role": "user", "content": [image, text]})
        same = ask(client(server), part(url_of(90, 60, 1)), "a page")
        assert answer.content[0].text == same.choices[0].message.content
        read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        assert read == same.usage.prompt_tokens
        call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [image, {"type": "text", "text": "seen"}]}
        messages: Any = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result, text]}]
        counted = api.messages.count_tokens(model="eyes", messages=[{"role": "user", "content": "look"}, *messages])
        assert counted.input_tokens > 5 * 4, "with those of its five tiles"
        assert asked({"role": "user", "content": "look"}, *messages).content[0].text


def test_ollamas_client_sends_images(server: Server) -> None:
    import ollama

    with closing(ollama.Client(host=server.url, timeout=scaled(60.0))) as api:
        options = {"temperature": 0, "num_predict": 8}
        file = base64_of(90, 60, 1)
        same = ask(client(server), part(url_of(90, 60, 1)), "a page", extra_body={})
        message = {"role": "user", "content": "a page", "images": [file]}
        answer = api.chat(model="eyes", messages=[message], options=options)
        assert answer.message.content == same.choices[0].message.content
        assert answer.prompt_eval_count == same.usage.prompt_tokens
        assert (
            api.generate(model="eyes", prompt="a page", images=[file], options=options).response
            == answer.message.content
        )
        with pytest.raises(ollama.ResponseError, match="images need the chat template"):
            api.generate(model="eyes", prompt="a page", images=[file], raw=True)


def test_responses_take_images(server: Server) -> None:
    """Images are accepted in messages and in outputs of calls, and the conversation continues with them."""
    api = client(server)
    same = ask(api, part(url_of(90, 60, 1)), "a page", extra_body={})
    image = {"type": "input_image", "image_url": url_of(90, 60, 1), "detail": "auto"}
    asked: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": "a page"}]}]
    answer = api.responses.create(model="eyes", input=asked, max_output_tokens=16, temperature=0)
    assert answer.output_text.startswith(same.choices[0].message.content)
    assert answer.usage is not None
    assert answer.usage.input_tokens == same.usage.prompt_tokens
    kept = list(api.responses.input_items.list(answer.id))
    assert kept[0].content[0].image_url == url_of(90, 60, 1)  # type: ignore[union-attr,index]
    more = api.responses.create(model="eyes", input="go on", previous_response_id=answer.id, max_output_tokens=16)
    assert more.usage is not None
    assert more.usage.input_tokens > answer.usage.input_tokens
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [image, {"type": "input_text", "text": "seen"}],
    }
    items: Any = [{"role": "user", "content": "look"}, call, output]
    of_tool = api.responses.create(model="eyes", input=items, max_output_tokens=16)
    assert of_tool.usage is not None
    assert of_tool.usage.input_tokens > 5 * 4
    bad: Any = [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]
    with pytest.raises(BadRequestError, match="an input_image needs image_url, a URL; files are not kept"):
        api.responses.create(model="eyes", input=bad)


def test_langchain_sends_images(server: Server) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    key: Any = "none"
    with httpx.Client(timeout=scaled(60)) as http:  # theirs would stay open
        url = f"{server.url}/v1"
        model = ChatOpenAI(model="eyes", base_url=url, api_key=key, temperature=0, max_retries=0, http_client=http)
        content: Any = [part(url_of(90, 60, 1)), {"type": "text", "text": "a page"}]
        answer: Any = model.bind(max_tokens=8).invoke([HumanMessage(content=content)])
        assert answer.content == ask(client(server), *content[:1], "a page", extra_body={}).choices[0].message.content
        standard: Any = {"type": "image", "base64": base64_of(90, 60, 1), "mime_type": "image/png"}
        again: Any = model.bind(max_tokens=8).invoke([HumanMessage(content=[standard, content[1]])])
        assert again.content == answer.content


def test_metrics_count_images(server: Server) -> None:
    ask(client(server), part(url_of(60, 60, 77)), "once")
    before = counted(server)
    ask(client(server), part(url_of(60, 60, 77)), part(url_of(60, 60, 78)), "twice")
    assert [now - then for now, then in zip(counted(server), before, strict=True)] == [2, 1]


def counted(server: Server) -> list[float]:
    """Counters of images in prompts, and of those that had been preprocessed before."""
    lines = httpx.get(f"{server.url}/metrics", timeout=scaled(30.0)).text.splitlines()
    names = "vllm:mm_cache_queries_total{", "vllm:mm_cache_hits_total{"
    return [float(line.split()[-1]) for name in names for line in lines if line.startswith(name)]

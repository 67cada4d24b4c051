"""Packages for Python: a picture in a chat and in a stream; with OpenAI's package also in a response, with Anthropic's
in a tool's result.

The number of prompt tokens shows whether a picture was seen: it grows by the tokens of the picture.
"""

import base64
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

from common import URL, check

MODEL, SAYS = "eyes", "What is it?"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(side: int = 48) -> bytes:
    rows = b"".join(
        b"\0" + bytes((x * 5 % 256, y * 3 % 256, 90)[c] for x in range(side) for c in range(3)) for y in range(side)
    )
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


FILE = png()
BASE64 = base64.b64encode(FILE).decode()
DATA = f"data:image/png;base64,{BASE64}"


def check_more(seen: int | None, plain: int | None) -> None:
    """End the program with an error unless a prompt with the picture has more tokens than the one without."""
    check(seen is not None and plain is not None and seen > plain + 3)


def openai() -> None:
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    text = {"type": "text", "text": SAYS}
    shown = [text, {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}]

    def asked(content: Any, **more: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, **more)

    plain = asked([text]).usage.prompt_tokens
    check_more(asked(shown).usage.prompt_tokens, plain)
    *_, last = asked(shown, stream=True, stream_options={"include_usage": True})
    check_more(last.usage.prompt_tokens, plain)
    own = [{"type": "input_text", "text": SAYS}, {"type": "input_image", "image_url": DATA, "detail": "auto"}]
    both: list[Any] = [[{"role": "user", "content": content}] for content in (own, own[:1])]
    usages = [client.responses.create(model=MODEL, input=each, max_output_tokens=16).usage for each in both]
    check_more(*(None if usage is None else usage.input_tokens for usage in usages))


def anthropic() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none")
    text = {"type": "text", "text": SAYS}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}
    tool: Any = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}

    def messages(*contents: Any) -> Any:
        return [{"role": ("user", "assistant")[place % 2], "content": each} for place, each in enumerate(contents)]

    def asked(*contents: Any) -> int:
        answer = client.messages.create(model=MODEL, messages=messages(*contents), max_tokens=8, tools=[tool])
        return answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

    check_more(asked([image, text]), asked([text]))
    results = [[{"type": "tool_result", "tool_use_id": "toolu_1", "content": each}] for each in ([image], [text])]
    check_more(*(asked([text], [call], result) for result in results))
    with client.messages.stream(model=MODEL, messages=messages([image, text]), max_tokens=8) as stream:
        check(stream.get_final_message().usage.output_tokens)


def ollama() -> None:
    import ollama

    client = ollama.Client(host=URL)
    check("vision" in (client.show(MODEL).capabilities or []))
    path = Path("picture.png")
    path.write_bytes(FILE)
    few = {"num_predict": 8}

    def asked(**more: Any) -> int | None:
        return client.chat(MODEL, [{"role": "user", "content": SAYS, **more}], options=few).prompt_eval_count

    plain = asked()
    for image in (FILE, BASE64, str(path)):
        check_more(asked(images=[image]), plain)
    *_, last = client.generate(MODEL, SAYS, images=[FILE], options=few, stream=True)
    check(last.done and last.prompt_eval_count)


def langchain() -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    there: dict[str, Any] = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_completion_tokens": 8}
    text = {"type": "text", "text": SAYS}
    own = {"type": "image", "source_type": "base64", "data": BASE64, "mime_type": "image/png"}
    standard = {"type": "image", "base64": BASE64, "mime_type": "image/png"}
    url = {"type": "image_url", "image_url": {"url": DATA}}
    chats: list[Any] = [
        ChatOpenAI(**there),
        ChatOpenAI(**there, use_responses_api=True),
        ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_tokens=8),
        ChatOllama(model=MODEL, base_url=URL, num_predict=8),
    ]
    for chat in chats:
        plain = tokens_of(chat, [text])
        for image in (url, own, standard):
            check_more(tokens_of(chat, [text, image]), plain)
        check(list(chat.stream([{"role": "user", "content": [text, url]}])))


def tokens_of(chat: Any, content: list[Any]) -> int:
    return int(chat.invoke([{"role": "user", "content": content}]).usage_metadata["input_tokens"])


if __name__ == "__main__":
    {each.__name__: each for each in (openai, anthropic, ollama, langchain)}[sys.argv[1]]()

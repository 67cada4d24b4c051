"""Images in messages of Anthropic's API and the Responses API, and their places in the chat."""

from typing import Any

import msgspec
import pytest

from vllm_lite.server.messages.bodies import CountTokensBody
from vllm_lite.server.messages.chats import chat_of, name_of
from vllm_lite.server.openai.bodies import ChatMessage, Part
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.responses import history, items
from vllm_lite.server.responses.toolbox import Toolbox

BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PART = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def result(name: str, *content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": [*content]}


def anthropic(*content: Any) -> list[Any]:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    sent = [{"role": "assistant", "content": [call, {**call, "id": "b"}]}, {"role": "user", "content": [*content]}]
    body = msgspec.convert({"messages": sent}, CountTokensBody)
    messages = chat_of(body, 100).messages
    assert [name_of(body, place) for place in range(1, len(messages))] == ["messages[1]"] * (len(messages) - 1)
    return [shown(message) for message in messages[1:]]


def shown(message: ChatMessage) -> tuple[str, Any]:
    """The role and the content, an image as IMAGE."""
    content = message.content
    if not isinstance(content, list):
        return message.role, content
    return message.role, [_shown(part) for part in content]


def _shown(part: str | Part) -> str | None:
    if isinstance(part, str):
        return part
    return "IMAGE" if part.type in ("image", "input_image") else part.text


def test_images_of_results_follow_the_last_of_these() -> None:
    """A user's message between two results would part them from the calls that they answer."""
    seen = "[image, shown below]"
    found = anthropic(result("a", BLOCK, text("one")), result("b", text("two"), BLOCK), text("go on"), BLOCK)
    tools = [("tool", f"{seen}\none"), ("tool", f"two\n{seen}")]
    assert found == [*tools, ("user", ["IMAGE", "IMAGE", "go on", "IMAGE"])]
    assert anthropic(result("a", BLOCK), text("so"), result("b", text("two"))) == [
        ("tool", seen),
        ("user", ["IMAGE", "so"]),
        ("tool", "two"),
    ]
    assert anthropic(result("a", BLOCK)) == [("tool", seen), ("user", ["IMAGE"])]
    assert anthropic({**result("a", BLOCK), "is_error": True})[0] == ("tool", f"Error: {seen}")


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_only_users_show_images(role: str) -> None:
    body = msgspec.convert({"messages": [{"role": role, "content": [BLOCK]}]}, CountTokensBody)
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\] is of type 'image', which is not supported here"):
        chat_of(body, 100)


def responses(*given: Any) -> list[Any]:
    calls = [{"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"} for name in ("a", "b")]
    read = items.read([*calls, *given], "resp_1", {}, sees=True)
    assert not read.left_out
    return [shown(message) for message in history.messages(None, read.items, Toolbox(()))][1:]


def output(name: str, *parts: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": [*parts]}


def test_images_of_outputs_follow_the_last_of_these() -> None:
    seen, words = "[image, shown below]", {"type": "input_text", "text": "one"}
    both = [("tool", f"{seen}\none"), ("tool", seen)]
    asked = {"role": "user", "content": [words, PART]}
    assert responses(output("a", PART, words), output("b", PART), asked) == [
        *both,
        ("user", ["IMAGE", "IMAGE", "one", "IMAGE"]),
    ]
    assert responses(output("a", PART, words), output("b", PART)) == [*both, ("user", ["IMAGE", "IMAGE"])]
    system = {"role": "developer", "content": "stop"}
    assert responses(output("a", PART, words), output("b", PART), system) == [
        *both,
        ("user", ["IMAGE", "IMAGE"]),
        ("developer", "stop"),
    ]


def test_models_without_images_get_a_text_for_an_output_and_refuse_a_message() -> None:
    read = items.read([output("a", PART)], "resp_1", {})
    assert read.left_out == ["input[0] input_image"]
    assert read.items[0]["output"] == [{"type": "input_text", "text": "[input_image, which is not shown]"}]
    with pytest.raises(ApiError, match=r"input\[0\].content\[0\] holds 'input_image'; only text is supported"):
        items.read([{"role": "user", "content": [PART]}], "resp_1", {})


def test_only_users_show_images_of_a_response() -> None:
    with pytest.raises(ApiError, match="holds 'input_image'; only text is supported"):
        items.read([{"role": "assistant", "content": [PART]}], "resp_1", {}, sees=True)

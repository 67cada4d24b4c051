"""Converts a conversation of items to the messages of a chat."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from vllm_lite.server.openai.bodies import CalledFunction, ChatMessage, Part, ToolCall
from vllm_lite.server.openai.errors import ApiError, shown
from vllm_lite.server.openai.steady import steady
from vllm_lite.server.responses.call_outputs import IMAGE, call_of, images_in, output_text
from vllm_lite.server.responses.client_tools import CALLS, OUTPUTS, Item
from vllm_lite.server.responses.items import PROVIDED
from vllm_lite.server.responses.toolbox import Toolbox


def text_in(item: Item, field: str = "content") -> str:
    content = item.get(field)
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", part.get("refusal", "")) for part in content or ())


def _content(item: Item) -> str | list[str | Part]:
    """Content of a message: one text, or parts, which some templates format differently."""
    content = item["content"]
    if len(content) < 2 and not images_in(item):
        return text_in(item)
    return [_image(part) if part["type"] == IMAGE else Part("text", part["text"]) for part in content]


def _image(part: Item) -> Part:
    return Part(IMAGE, image_url=part["image_url"])


def later_tools(items: Iterable[Item]) -> Iterator[tuple[str, Item]]:
    """Yield the tools that items bring, with their paths."""
    for item in items:
        if item["type"] in ("additional_tools", "tool_search_output"):
            for place, tool in enumerate(item["tools"]):
                yield f"{item['type']}.tools[{place}]", tool


def _provided(item: Item) -> str:
    """Format a provider's action as text. Images among its results are left out."""
    given = {name: item[name] for name in PROVIDED[item["type"]] if item.get(name)}
    if isinstance(given.get("outputs"), list):
        given["outputs"] = [each["logs"] for each in given["outputs"] if isinstance(each, dict) and "logs" in each]
    return f"[{item['type']} {msgspec.json.encode(given).decode()}]"


class _Answer:
    """One assistant message, built of reasoning, texts and calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    @property
    def is_open_to_text(self) -> bool:
        """Whether reasoning and texts can still be added: after a call they start another message."""
        return not self.calls

    def message(self) -> ChatMessage | None:
        if not (self.reasoning or self.texts or self.calls):
            return None
        return ChatMessage(
            "assistant",
            "\n".join(self.texts) if self.texts or not self.calls else None,
            tool_calls=self.calls or None,
            reasoning="\n".join(self.reasoning) or None,
        )


def _images_shown(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, and after outputs with images a user message that has them, as templates accept images only
    there. A user message that follows gets them at its start."""
    seen = list[Item]()
    for item in items:
        if seen and item["type"] not in OUTPUTS:
            is_users = item["type"] == "message" and item["role"] == "user"
            yield {"type": "message", "role": "user", "content": [*seen, *(item["content"] if is_users else ())]}
            seen = []
            if is_users:
                continue
        yield item
        if item["type"] in OUTPUTS:
            seen += images_in(item)
    if seen:
        yield {"type": "message", "role": "user", "content": seen}


def messages(
    instructions: str | None, items: Iterable[Item], tools: Toolbox, left_out: Sequence[str] = ()
) -> list[ChatMessage]:
    """Make the messages of a chat. Instructions and leading system messages are joined, as many templates take only
    one. Raises ApiError for the output of an unknown call, and if there is no message; `left_out` are then named."""
    system, found, answer = [steady(instructions or "")], list[ChatMessage](), _Answer()
    known = dict[str, str]()

    def flush() -> None:
        nonlocal answer
        if (message := answer.message()) is not None:
            found.append(message)
        answer = _Answer()

    for item in _images_shown(items):
        kind, role = item["type"], item.get("role")
        if kind == "reasoning":
            if answer.texts or answer.calls:
                flush()
            answer.reasoning += [text_in(item) or text_in(item, "summary")]
        elif kind in CALLS:
            known |= {item["call_id"]: item["call_id"], item["id"]: item["call_id"]}
            answer.calls.append(_call(item, tools))
        elif kind in PROVIDED or (kind == "message" and role == "assistant"):
            if not answer.is_open_to_text:
                flush()
            answer.texts.append(_provided(item) if kind in PROVIDED else text_in(item))
        elif kind in OUTPUTS:
            flush()
            found.append(_result(item, known))
        elif kind == "message":
            flush()
            if role == "user" or found:
                found.append(ChatMessage(item["role"], _content(item)))
            else:
                system.append(steady(text_in(item)))
    flush()
    text = "\n\n".join(each for each in system if each)
    start = [ChatMessage("system", text)] if text else []
    if not start and not found and left_out:
        names = shown(", ".join(left_out))
        text = f"nothing of input is shown to the model (left out: {names}); give a text or messages"
        raise ApiError(400, text, "input")
    if not start and not found:
        raise ApiError(400, "input is empty: give a text or a list of items", "input")
    return start + found


def _call(item: Item, tools: Toolbox) -> ToolCall:
    name, arguments = CALLS[item["type"]].arguments(item)
    return ToolCall(CalledFunction(tools.function(name, item.get("namespace")), arguments), item["call_id"])


def _result(item: Item, known: Mapping[str, str]) -> ChatMessage:
    """Convert the output of an earlier call; `known` maps the ids by which outputs may name a call to its id."""
    call_id = known.get(call_of(item) or "")
    if call_id is None:
        shown = str(call_of(item))[:80]
        raise ApiError(
            400, f"no {OUTPUTS[item['type']].call} before it has the call_id {shown!r} of this output", "input"
        )
    return ChatMessage("tool", output_text(item), tool_call_id=call_id)

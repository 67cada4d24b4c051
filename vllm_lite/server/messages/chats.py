"""Converts bodies of Anthropic's API to ChatBody."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from vllm_lite.server.messages.bodies import (
    MAX_BLOCKS,
    AnswerForm,
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    ContentBlock,
    CountTokensBody,
    MessagesBody,
    ThinkingConfig,
)
from vllm_lite.server.openai.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CalledFunction,
    ChatBody,
    ChatMessage,
    Part,
    ToolCall,
)
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.forms import check_depth

_SAME = "stream temperature top_k top_p seed min_p ignore_eos priority cache_salt deadline_ms"
"""Fields that ChatBody has under the same names."""
RESULT_IMAGE = "[image, shown below]"
"""Placeholder for an image in a tool's result."""
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that chat templates do not know, and their replacements."""


def chat_of(body: CountTokensBody, max_model_len: int) -> ChatBody:
    """Convert a body to a ChatBody. `max_tokens`, which is mandatory here, may exceed the context. Raises ApiError."""
    if body.mcp_servers:
        raise ApiError(400, "mcp_servers: this server calls no other; let the client call them, as tools")
    _check_count(body)
    messages = [message for _, message in _turns(body)]
    if len(messages) > MAX_MESSAGES:
        raise ApiError(400, f"messages and tool results are {len(messages)}; at most {MAX_MESSAGES}")
    fields = _sampled(body, max_model_len) if isinstance(body, MessagesBody) else {}
    return ChatBody(
        messages=messages,
        model=body.model,
        **fields,
        **_continued(messages[-1]),
        **_tools(body.tools or [], body.tool_choice),
        **_thinking(body.thinking, body.chat_template_kwargs or {}),
        **_form(body),
    )


def name_of(body: CountTokensBody, place: int) -> str:
    """Name in `body` of the chat message at index `place`, for errors."""
    return _turns(body)[place][0]


def _turns(body: CountTokensBody) -> list[tuple[str, ChatMessage]]:
    """Convert the messages of a body, each with its name in the body. Several of one speaker in a row become one, as in
    Anthropic's API: many templates refuse them."""
    named = [("system", message) for message in _system(body.system)]
    for place, given in enumerate(body.messages):
        named += [(f"messages[{place}]", message) for message in _messages(place, given)]
    by_speaker = groupby(enumerate(named), _speaker)
    return [_as_one([pair for _, pair in each]) for _, each in by_speaker]


def _speaker(numbered: tuple[int, tuple[str, ChatMessage]]) -> str | int:
    """Equal for messages in a row that become one."""
    number, (_, message) = numbered
    return message.role if message.role in ("user", "assistant") else number


def _as_one(several: Sequence[tuple[str, ChatMessage]]) -> tuple[str, ChatMessage]:
    name, first = several[0]
    if len(several) == 1:
        return name, first
    messages = [message for _, message in several]
    content = list[str | Part]()
    for message in messages:
        content += [message.content] if isinstance(message.content, str) else message.content or []
    calls = [call for message in messages for call in message.tool_calls or []]
    thoughts = [message.reasoning for message in messages if message.reasoning]
    return name, ChatMessage(first.role, content, tool_calls=calls or None, reasoning="\n".join(thoughts) or None)


def _sampled(body: MessagesBody, max_model_len: int) -> dict[str, Any]:
    user = None if body.metadata is None else body.metadata.user_id
    same = {name: getattr(body, name) for name in _SAME.split()}
    return {
        **same,
        "user": user,
        "stop": body.stop_sequences or None,
        "max_tokens": min(body.max_tokens, max_model_len),
    }


def _check_count(body: CountTokensBody) -> None:
    several = [content for content in _contents(body) if not isinstance(content, str)]
    count = sum(map(len, several))
    if count <= MAX_BLOCKS:  # blocks in tool results count as well
        count += sum(len(block.content) for each in several for block in each if isinstance(block.content, list))
    if count > MAX_BLOCKS:
        raise ApiError(400, f"messages have {count} content blocks; at most {MAX_BLOCKS}")


def _contents(body: CountTokensBody) -> Iterator[str | list[ContentBlock]]:
    yield body.system or ""
    for message in body.messages:
        yield message.content


def _system(given: str | list[ContentBlock] | None) -> list[ChatMessage]:
    if not given:
        return []
    if isinstance(given, str):
        return [ChatMessage("system", given)]
    return [ChatMessage("system", [_text(block, f"system[{place}]") for place, block in enumerate(given)])]


def _messages(place: int, message: AnthropicMessage) -> Iterator[ChatMessage]:
    """Convert a message to chat messages: tool results become messages of their own."""
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content)
        return
    texts, thoughts, calls = list[str | Part](), list[str](), list[ToolCall]()
    seen = list[str | Part]()  # images of tool results, which follow in a user message
    is_empty = True
    for number, block in enumerate(message.content):
        where = f"messages[{place}].content[{number}]"
        if block.type == "tool_result" and message.role == "user":
            if texts:
                yield ChatMessage("user", [*seen, *texts])
                seen = []
            text, images = _result(block, where)
            yield ChatMessage("tool", text, tool_call_id=_given(block.tool_use_id, where, "tool_use_id"))
            seen += images
            texts, is_empty = [], False
        elif block.type == "tool_use" and message.role == "assistant":
            calls.append(_call(block, where))
        elif block.type == "thinking" and message.role == "assistant":
            thoughts.append(_given(block.thinking, where, "thinking"))
        elif block.type != "redacted_thinking" or message.role != "assistant":
            texts.append(_image(block) if block.type == "image" and message.role == "user" else _text(block, where))
    if len(calls) > MAX_TOOLS:
        raise ApiError(400, f"messages[{place}] has {len(calls)} tool_use blocks; at most {MAX_TOOLS}")
    if message.role == "assistant":
        yield ChatMessage("assistant", texts, tool_calls=calls or None, reasoning="\n".join(thoughts) or None)
    elif seen or texts or is_empty:
        yield ChatMessage(message.role, [*seen, *texts])


def _text(block: ContentBlock, where: str) -> Part:
    if block.type != "text":
        raise ApiError(400, f"{where} is of type {block.type!r}, which is not supported here; text is")
    return Part("text", _given(block.text, where, "text"))


def _image(block: ContentBlock) -> Part:
    return Part("image", source=block.source)


def _call(block: ContentBlock, where: str) -> ToolCall:
    check_depth(block.input, f"{where}.input", "messages")
    function = CalledFunction(_given(block.name, where, "name"), block.input or {})
    return ToolCall(function, _given(block.id, where, "id"))


def _result(block: ContentBlock, where: str) -> tuple[str, list[Part]]:
    """Text and images of a tool's result. Templates accept images in user messages only, and have no failed results, so
    the text says it."""
    content, images = block.content or "", list[Part]()
    if not isinstance(content, str):
        images = [_image(inner) for inner in content if inner.type == "image"]
        texts = [
            RESULT_IMAGE if inner.type == "image" else _text(inner, f"{where}.content[{number}]").text or ""
            for number, inner in enumerate(content)
        ]
        content = "\n".join(texts)
    return f"Error: {content}" if block.is_error else content, images


def _given(value: str | None, where: str, field: str) -> str:
    if value is None:
        raise ApiError(400, f"{where}.{field} is missing")
    return value


def _continued(last: ChatMessage) -> dict[str, Any]:
    """The chat field with which a last message of the assistant is continued."""
    if last.role != "assistant":
        return {}
    if last.tool_calls:
        raise ApiError(400, "messages: the last one has tool_use; the tool_result of each has to follow")
    return {"continue_final_message": True}


def _tools(tools: Sequence[AnthropicTool], choice: AnthropicToolChoice | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"tools": [_tool(tool, place) for place, tool in enumerate(tools)] or None}
    if choice is None:
        return fields
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice of type 'tool' needs the name of the tool")
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {**fields, "tool_choice": {"any": "required"}.get(choice.type, choice.type)}


def _tool(tool: AnthropicTool, place: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        text = f"tools[{place}] is of type {tool.type[:64]!r}, which this server does not know; give an input_schema"
        raise ApiError(400, f"{text} without a type")
    if tool.input_schema is None:
        raise ApiError(400, f"tools[{place}].input_schema is missing")
    said = {"description": tool.description, "strict": tool.strict}
    more = {name: value for name, value in said.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **more, "parameters": tool.input_schema}}


def _thinking(config: ThinkingConfig | None, given: dict[str, Any]) -> dict[str, Any]:
    """Template variables and fields for thinking; if `config` is None, the template's default applies."""
    if config is None:
        return {"chat_template_kwargs": given}
    if config.type == "enabled" and config.budget_tokens is None:
        raise ApiError(400, "thinking of type 'enabled' needs budget_tokens")
    thinks = config.type != "disabled"
    return {
        "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks, **given},
        "thinking_token_budget": config.budget_tokens if config.type == "enabled" else None,
        "include_reasoning": thinks and config.display != "omitted",
    }


def _form(body: CountTokensBody) -> dict[str, Any]:
    """The answer's schema, which has two names, and the reasoning effort."""
    config = body.output_config
    form: AnswerForm | None = body.output_format or (None if config is None else config.format)
    fields: dict[str, Any] = {}
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
    if form is not None:
        schema = {"name": "answer", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields

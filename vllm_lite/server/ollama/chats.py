"""Converts bodies of Ollama's API to ChatBody and CompletionBody."""

from typing import Any

import msgspec

from vllm_lite.server.ollama.bodies import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaMessage, OllamaOptions
from vllm_lite.server.openai.bodies import CalledFunction, ChatBody, ChatMessage, CompletionBody, Part, ToolCall
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.forms import check_depth

_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
_LEVELS = ("low", "medium", "high", "max")


def chat_of(body: OllamaChatBody, max_model_len: int) -> ChatBody:
    """Convert a body to a ChatBody. Raises ApiError."""
    messages = [_message(message, f"messages[{place}]") for place, message in enumerate(body.messages or [])]
    return ChatBody(messages=messages, tools=body.tools or None, **_common(body, max_model_len), **_of_chat(body))


def prompted(body: OllamaGenerateBody, max_model_len: int) -> ChatBody:
    """Convert a prompt to a chat: an optional system message and a user message. Raises ApiError."""
    system = [ChatMessage("system", body.system)] if body.system else []
    messages = [*system, ChatMessage("user", _content(body.prompt or "", body.images, "images"))]
    return ChatBody(messages=messages, **_common(body, max_model_len), **_of_chat(body))


def completion_of(body: OllamaGenerateBody, max_model_len: int) -> CompletionBody:
    """Convert a verbatim prompt to a CompletionBody. Raises ApiError."""
    fields = {"max_tokens": max_model_len, **_common(body, max_model_len)}
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return CompletionBody(
        prompt=(body.system or "") + (body.prompt or ""), suffix=body.suffix, logprobs=logprobs, **fields
    )


def ignored(body: OllamaBody) -> list[str]:
    return [f"options.{name}" for name in sorted((body.options or {}).keys() - set(OllamaOptions.__struct_fields__))]


def _content(text: str, images: list[Any] | None, where: str) -> str | list[str | Part]:
    """Content of a message: its images, files in base64, and then its text. Raises ApiError."""
    if not images:
        return text
    parts = list[str | Part]()
    for place, image in enumerate(images):
        if not isinstance(image, str):
            raise ApiError(400, f"{where}[{place}] must be a file in base64, got {type(image).__name__}")
        source = {"type": "url", "url": image} if image[:5] == "data:" else {"type": "base64", "data": image}
        parts.append(Part("image", source=source))
    return [*parts, Part("text", text)]


def _message(message: OllamaMessage, where: str) -> ChatMessage:
    calls = []
    for call in message.tool_calls or ():
        check_depth(call.function.arguments, f"{where}.tool_calls", "messages")
        calls.append(ToolCall(CalledFunction(call.function.name, call.function.arguments or {}), call.id))
    return ChatMessage(
        role=message.role,
        content=_content(message.content or "", message.images, f"{where}.images"),
        name=message.tool_name,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning=message.thinking,
    )


def _common(body: OllamaBody, max_model_len: int) -> dict[str, Any]:
    """The sampling fields, and the answer's schema."""
    try:
        options = msgspec.convert(body.options or {}, OllamaOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"options: {str(error).replace('`$.', '`')}") from error
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAME}
    if options.num_predict is not None and options.num_predict > 0:  # any other number: no limit
        fields["max_tokens"] = min(options.num_predict, max_model_len)
    fields |= {"repetition_penalty": options.repeat_penalty, "stop": options.stop or None}
    return {**fields, "stream": body.stream is not False, "response_format": _form(body.format)}


def _form(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
    if not given:
        return None
    if given != "json":
        raise ApiError(400, f"format must be 'json' or a JSON schema, got {given[:64]!r}")
    return {"type": "json_object"}


def _of_chat(body: OllamaBody) -> dict[str, Any]:
    """Fields that only chats have: template variables for thinking, and logprobs."""
    fields: dict[str, Any] = {}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    think = body.think
    if think is None or think == "":
        return fields
    if isinstance(think, str):
        if think not in _LEVELS:
            raise ApiError(400, f"think must be true, false, {', '.join(_LEVELS)}; got {think[:64]!r}")
        fields["reasoning_effort"] = think
    thinks = bool(think)
    variables = {"enable_thinking": thinks, "thinking": thinks}
    return {**fields, "chat_template_kwargs": variables, "include_reasoning": thinks}

"""Converts a request to a chat, and to the response object that every answer repeats."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.generation import Asked, Generation, Made
from vllm_lite.server.openai.bodies import FORM, SAMPLING, ChatBody, ChatMessage
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.openai.forms import check_depth
from vllm_lite.server.responses.bodies import LOGPROBS, ResponseBody
from vllm_lite.server.responses.toolbox import Toolbox, shown_tool

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Fields of a chat, and their names in a response."""
_RENAMED = re.compile(r"\b(max_completion_tokens|max_tokens|messages|response_format)\b(?!`)")
MAX_FORMAT_DEPTH = 128
"""Maximum nesting of text.format: deeper than any schema that compiles, and still encodable."""


class ChatTurns(NamedTuple):
    """Input of the model: messages, and the tools that they and the request bring."""

    messages: list[ChatMessage]
    tools: Toolbox


async def made(generation: Generation, asked: Asked[ResponseBody], shown: ChatTurns, call_id: str) -> Made:
    """Make the call, without starting it. With truncation, the oldest messages are dropped until the rest fits. Raises
    ApiError."""
    try:
        return await _chat(generation, asked, shown, call_id)
    except ApiError as error:
        if asked.body.truncation != "auto" or error.code != "context_length_exceeded":
            raise _renamed(error) from error
        refusal = error
    # Rendering and tokenizing is expensive, so the smallest number to drop is found by bisection.
    least, most, found = 1, len(_rest(shown.messages)) - 1, None
    while least <= most:
        middle = (least + most) // 2
        try:
            fewer = shown._replace(messages=_without(shown.messages, middle))
            found = await _chat(generation, asked, fewer, call_id)
            most = middle - 1
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise _renamed(error) from error
            least = middle + 1
    if found is None:
        raise _renamed(refusal)
    return found


def _rest(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    return messages[1:] if messages[0].role == "system" else messages


def _without(messages: list[ChatMessage], count: int) -> list[ChatMessage]:
    """Drop the `count` oldest messages, except a first system message, and tool outputs whose calls are dropped."""
    rest = _rest(messages)
    start = len(messages) - len(rest)
    while count < len(rest) - 1 and rest[count].role == "tool":
        count += 1
    return [*messages[:start], *rest[count:]]


async def _chat(generation: Generation, asked: Asked[ResponseBody], shown: ChatTurns, call_id: str) -> Made:
    chat = Asked(asked.request, as_chat(asked.body, shown), asked.headers, asked.model)
    return await generation.chat(chat, call_id)


def as_chat(body: ResponseBody, shown: ChatTurns) -> ChatBody:
    """Convert `body` to a ChatBody. Raises ApiError."""
    shared = {name: getattr(body, name) for name in (*SAMPLING, *FORM)}
    kwargs, effort = body.chat_template_kwargs, body.reasoning.effort if body.reasoning else None
    if effort == "none":
        kwargs = {"enable_thinking": False, **(kwargs or {})}
    if (form := _format(body)) is not None:
        shared["response_format"] = form
    has_logprobs = body.includes(LOGPROBS)
    return ChatBody(
        **shared,
        messages=shown.messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=has_logprobs,
        top_logprobs=(body.top_logprobs or 0) if has_logprobs else None,
        chat_template_kwargs=kwargs,
        add_special_tokens=body.add_special_tokens,
        reasoning_effort=effort,
        tools=shown.tools.functions or None,
        tool_choice=shown.tools.choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
    )


def _format(body: ResponseBody) -> dict[str, Any] | None:
    """Convert text.format to a chat's response_format."""
    given = body.text.format if body.text else None
    check_depth(given, "text.format", "text.format", MAX_FORMAT_DEPTH)
    if given is None or given.get("type") != "json_schema" or "json_schema" in given:
        return given
    if not isinstance(given.get("schema"), dict):
        raise ApiError(400, "text.format.schema must be a JSON schema, an object", "text.format.schema")
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


def _renamed(error: ApiError) -> ApiError:
    """Replace names of chat fields in an error by those of a response."""
    param = error.param and _RENAMED.sub(lambda match: _NAMES[match.group()], error.param)
    message = _RENAMED.sub(lambda match: _NAMES[match.group()], error.message)
    return ApiError(error.status, message, param, error.headers, error.code)


def response_object(body: ResponseBody, response_id: str, model: str, created: int, params: SamplingParams) -> Any:
    """Make the response object as it is before any output."""
    reasoning = body.reasoning
    text = body.text
    shape = (text.format if text else None) or {"type": "text"}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": shape, **({"verbosity": text.verbosity} if text and text.verbosity else {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }

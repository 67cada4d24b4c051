"""The body of POST /v1/responses. Fields that chats have as well have the same meaning."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.server.openai.bodies import MAX_MESSAGES, FormFields, Name, RequestId, Tools, Variables
from vllm_lite.server.openai.errors import ApiError

MAX_METADATA = 16
MAX_ID_CHARS = 256
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_HARMLESS_INCLUDES = {
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
}
"""Values of `include` for tools and parts that do not exist here, accepted without effect."""
_REFUSED = {
    "conversation": "conversations are not kept; use previous_response_id",
    "prompt": "prompt templates are not kept; send instructions and input",
    "context_management": "nothing is compacted here; use truncation",
    "moderation": "this server moderates nothing",
}
_ONE_ANSWER = {"n": (None, 1), "best_of": (None, 1), "use_beam_search": (None, False), "prompt_logprobs": (None,)}


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Reasoning options: `effort` is passed to the template, and "none" turns thinking off. There are no summaries."""

    effort: Name | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """Text options: `format` is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name",
    "schema"}."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """Stream options; events are never padded."""

    include_obfuscation: bool | None = None


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]
Items = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
ResponseId = Annotated[str, Meta(max_length=MAX_ID_CHARS)]


class ResponseBody(FormFields, frozen=True, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=256)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=256)] | None = None
    service_tier: Name | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    chat_template_kwargs: Variables | None = None
    add_special_tokens: bool | None = None
    request_id: RequestId | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None

    @property
    def is_kept(self) -> bool:
        return self.store is not False

    def includes(self, name: str) -> bool:
        return name in (self.include or ())


def check(body: ResponseBody) -> None:
    """Raise ApiError for invalid values that decoding accepts."""
    for name, reason in _REFUSED.items():
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: {reason}", name)
    for name, harmless in _ONE_ANSWER.items():
        if getattr(body, name) not in harmless:
            raise ApiError(400, f"{name} is not supported here: a response is one answer, without scored prompts", name)
    if body.background and not body.is_kept:
        raise ApiError(400, "background needs store: a response that is not kept cannot be fetched", "background")
    if body.truncation not in (None, "auto", "disabled"):
        raise ApiError(400, f"truncation must be auto or disabled, got {body.truncation[:40]!r}", "truncation")
    for name in body.include or ():
        if name not in (LOGPROBS, ENCRYPTED) and name not in _HARMLESS_INCLUDES:
            raise ApiError(400, f"include takes {LOGPROBS} and {ENCRYPTED}, got {name[:80]!r}", "include")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise ApiError(400, f"top_logprobs must be between 0 and 20, got {body.top_logprobs}", "top_logprobs")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise ApiError(400, f"max_output_tokens must be at least 1, got {body.max_output_tokens}", "max_output_tokens")

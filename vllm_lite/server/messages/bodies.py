"""Request bodies of Anthropic's API, as structs. Unknown fields are ignored."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_lite.server.openai.bodies import MAX_MESSAGES, MAX_TOOL_NAME_CHARS, MAX_TOOLS, Name, Variables

MAX_BLOCKS = 16_384
"""Maximum number of content blocks in all messages of a request."""


class ContentBlock(msgspec.Struct, frozen=True):
    """A part of a message; `type` says which of the other fields it has."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: Annotated[str, Meta(max_length=MAX_TOOL_NAME_CHARS)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None
    source: dict[str, Any] | None = None


class AnthropicMessage(msgspec.Struct, frozen=True):
    """One message. If the last message is the assistant's, it is continued."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, frozen=True):
    """A client's tool; tools that Anthropic runs or defines by a `type` are refused."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnswerForm(msgspec.Struct, frozen=True, rename={"schema_": "schema"}):
    type: Literal["json_schema"]
    schema_: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerForm | None = None


class RequestMetadata(msgspec.Struct, frozen=True):
    user_id: Name | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerForm | None = None
    mcp_servers: list[Any] | None = None
    chat_template_kwargs: Variables | None = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """POST /v1/messages. From `seed` on, the fields are not Anthropic's but OpenAI's for chats."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: RequestMetadata | None = None
    seed: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: Name | None = None
    deadline_ms: int | None = None

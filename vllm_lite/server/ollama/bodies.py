"""Request bodies of Ollama's API, as structs. Unknown fields are ignored."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.server.openai.bodies import MAX_MESSAGES, MAX_TOOLS, Tools
from vllm_lite.server.openai.decoding import MAX_FIELDS


class OllamaOptions(msgspec.Struct, frozen=True):
    """Options that affect generation. Others, like `num_ctx` and `num_gpu`, are the server's settings, and ignored."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | None = None


class OllamaToolCall(msgspec.Struct, frozen=True):
    """A tool call in an earlier answer."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chats and completions share. An answer is a stream unless `stream` is false. The model is always
    loaded: `keep_alive` changes nothing."""

    model: str | None = None
    stream: bool | None = None
    options: Annotated[dict[str, Any], Meta(max_length=MAX_FIELDS)] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/chat; without messages, the answer only says that the model is loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/generate: a prompt for the chat template, or verbatim if it is `raw` or there is a `suffix`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class OllamaEmbedBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/embed; unless `truncate` is false, long texts are cut to their first tokens."""

    input: str | Annotated[list[str], Meta(max_length=16_384)] | None = None
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaPromptBody(OllamaBody, frozen=True, kw_only=True):
    """POST /api/embeddings."""

    prompt: str | None = None


class OllamaModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show and /api/pull; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None

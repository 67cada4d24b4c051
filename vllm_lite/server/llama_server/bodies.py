"""Request bodies of llama.cpp's server, as structs. Other fields that it has are ignored, or refused by name if they
would change the answer (bodies.REFUSED)."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.server.openai.bodies import MAX_PROMPTS

Mixed = list[str | int]
"""One prompt of token ids and texts."""


class PromptObject(msgspec.Struct, frozen=True):
    """A prompt with media, which must be none."""

    prompt_string: str
    multimodal_data: list[Any] | None = None


class LlamaCppBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of completions and of gaps. `n_predict` and `max_tokens` are two names, also `n_cmpl` and `n`."""

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    n_cmpl: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: list[list[Any]] | dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: int | None = None
    post_sampling_probs: bool | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None


class LlamaCppCompletionBody(LlamaCppBody, frozen=True, kw_only=True):
    """POST /completion: a text, a list of token ids and texts, or a list of such prompts."""

    prompt: str | PromptObject | list[str | int | Mixed | PromptObject]


class ExtraFile(msgspec.Struct, frozen=True):
    """Text of another file, which is shown to the model before the gap."""

    text: str
    filename: str | None = None


class LlamaCppInfillBody(LlamaCppBody, frozen=True, kw_only=True):
    """POST /infill: the gap between `input_prefix`, continued by `prompt`, and `input_suffix`."""

    input_prefix: str
    input_suffix: str
    prompt: str | None = None
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_PROMPTS)] | None = None

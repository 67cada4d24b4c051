"""Converts bodies of llama.cpp's server to prompts and to the fields of a CompletionBody."""

import os
from typing import Any, NamedTuple

from vllm_lite.protocol.params import MAX_BIASES, MAX_LOGPROBS
from vllm_lite.server.llama_server.bodies import LlamaCppBody, LlamaCppCompletionBody, Mixed, PromptObject
from vllm_lite.server.openai.bodies import MAX_PROMPTS
from vllm_lite.server.openai.errors import ApiError

RANDOM_SEED = 2**32 - 1
"""The seed that asks for a random one, like every negative seed."""
BANNED = -100.0
"""The least bias, for `false`."""
_SAME = ("min_p", "presence_penalty", "frequency_penalty", "ignore_eos", "json_schema", "stream")
_PARTS = "a text, a list of token ids and texts, or a list of such prompts"


def prompts_of(body: LlamaCppCompletionBody) -> list[str | Mixed]:
    """The prompts of a body: a list with a number in it is one prompt. Raises ApiError."""
    given = body.prompt
    if not isinstance(given, list):
        return [_one(given)]
    if not any(isinstance(part, int) for part in given):
        if not 0 < len(given) <= MAX_PROMPTS:
            raise ApiError(400, f"prompt must be {_PARTS}, at most {MAX_PROMPTS}; got a list of {len(given)}", "prompt")
        return [_one(part) for part in given]  # type: ignore[arg-type]
    parts = [part for part in given if isinstance(part, (int, str))]
    if len(parts) < len(given):
        raise ApiError(400, "prompt has numbers beside lists or objects; a list with a number is one prompt", "prompt")
    return [_one(parts)]


def _one(given: str | Mixed | PromptObject) -> str | Mixed:
    if isinstance(given, PromptObject):
        if given.multimodal_data:
            raise ApiError(400, "multimodal_data is not supported here; send images to /v1/chat/completions", "prompt")
        return given.prompt_string
    if isinstance(given, list) and sum(isinstance(part, str) for part in given) > MAX_PROMPTS:
        raise ApiError(400, f"a prompt takes at most {MAX_PROMPTS} texts between token ids", "prompt")
    return given


def max_tokens_of(body: LlamaCppBody) -> int:
    """The limit on generated tokens; -1 for no limit."""
    wanted = body.max_tokens if body.n_predict is None else body.n_predict
    return -1 if wanted is None or wanted < 0 else wanted


def fields_of(body: LlamaCppBody, max_model_len: int) -> dict[str, Any]:
    """The fields of a CompletionBody other than its prompt and biases. Raises ApiError."""
    if body.post_sampling_probs:
        text = "post_sampling_probs is not supported; n_probs are of the model's own distribution"
        raise ApiError(400, text, "post_sampling_probs")
    num_probs = body.n_probs or 0
    if not 0 <= num_probs <= MAX_LOGPROBS:
        raise ApiError(400, f"n_probs must be between 0 and {MAX_LOGPROBS}, got {num_probs}", "n_probs")
    limit = max_tokens_of(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields |= {
        "n": body.n if body.n_cmpl is None else body.n_cmpl,
        "max_tokens": max_model_len if limit < 0 else max(1, min(limit, max_model_len)),
        "temperature": None if body.temperature is None else max(0.0, body.temperature),
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "top_p": body.top_p,
        "repetition_penalty": body.repeat_penalty,
        "seed": None if body.seed is None or body.seed < 0 or body.seed == RANDOM_SEED else body.seed,
        "stop": body.stop or None,
        "grammar": body.grammar or None,
        "logprobs": num_probs or None,
        "cache_salt": os.urandom(8).hex() if body.cache_prompt is False else None,
    }
    return fields


class BiasEntry(NamedTuple):
    """An entry of `logit_bias`: `key` is a token id, or a text for whose tokens the bias is."""

    key: str
    is_text: bool
    bias: float


def biases_of(body: LlamaCppBody) -> list[BiasEntry]:
    """The entries of `logit_bias`, of pairs or an object. Raises ApiError."""
    given = body.logit_bias or []
    pairs = [list(pair) for pair in given.items()] if isinstance(given, dict) else given
    if len(pairs) > MAX_BIASES:
        raise ApiError(400, f"logit_bias takes at most {MAX_BIASES} entries, got {len(pairs)}", "logit_bias")
    found = list[BiasEntry]()
    for pair in pairs:
        key, bias = pair if len(pair) == 2 else list[Any]((None, None))
        is_key = isinstance(key, str) or type(key) is int
        if not is_key or not (bias is False or type(bias) in (int, float)):
            text = "an entry of logit_bias is a token id or a text, and a number or false"
            raise ApiError(400, f"{text}; got {pair!r}"[:200], "logit_bias")
        is_text = isinstance(key, str) and not (isinstance(given, dict) and key.isdecimal())
        found.append(BiasEntry(str(key), is_text, BANNED if bias is False else bias))
    return found

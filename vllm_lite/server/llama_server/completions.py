"""Converts bodies of llama.cpp's server to prompts and to the fields of a CompletionBody."""

import os
from collections.abc import Callable, Sequence
from typing import Any

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


def fields_of(body: LlamaCppBody, max_model_len: int, encode: Callable[[str], Sequence[int]]) -> dict[str, Any]:
    """The fields of a CompletionBody other than its prompt; `encode` makes token ids of a text. Raises ApiError."""
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
        "logit_bias": None if not body.logit_bias else _biases(body.logit_bias, encode),
        "cache_salt": os.urandom(8).hex() if body.cache_prompt is False else None,
    }
    return fields


def _biases(given: list[list[Any]] | dict[str, Any], encode: Callable[[str], Sequence[int]]) -> dict[str, Any]:
    """Biases by token id, of pairs or an object. A key that is a text is for each of its tokens. Raises ApiError."""
    pairs = [list(pair) for pair in given.items()] if isinstance(given, dict) else given
    found = dict[str, Any]()
    if len(pairs) > MAX_BIASES:
        raise ApiError(400, f"logit_bias takes at most {MAX_BIASES} entries, got {len(pairs)}", "logit_bias")
    for pair in pairs:
        key, bias = pair if len(pair) == 2 else (None, None)
        is_key = isinstance(key, str) or type(key) is int
        if not is_key or not (bias is False or type(bias) in (int, float)):
            text = "an entry of logit_bias is a token id or a text, and a number or false"
            raise ApiError(400, f"{text}; got {pair!r}"[:200], "logit_bias")
        is_id = not isinstance(key, str) or (isinstance(given, dict) and key.isdecimal())
        for token in (key,) if is_id else encode(str(key)):
            found[str(token)] = BANNED if bias is False else bias
    return found

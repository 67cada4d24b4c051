"""What a user may ask, checked before anything is sent. Each error names the wrong value and what would be right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from vllm_lite.client.tokenizer import Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.protocol.api import Welcome
from vllm_lite.protocol.params import SamplingParams


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    """`prompt` is the text that they came from, for the output; nothing is made of it."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


PromptLike = str | Sequence[int] | TextPrompt | TokensPrompt
_FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that the engine will take."""

    text: str | None
    token_ids: list[int]


def read_prompt(given: PromptLike, tokenizer: Tokenizer | None, limits: Welcome, num_kept: int | None = None) -> Prompt:
    """Tokenize and check one prompt. Of one that is longer than `num_kept` tokens only the last ones count, together
    with those that a tokenizer puts at the ends of a text. Raises RequestError."""
    plain, text = _unwrap(given)
    if isinstance(plain, str):
        prompt = Prompt(plain, encode(plain, tokenizer, num_kept=num_kept))
    else:
        checked = _checked_ids(plain, limits.vocab_size)
        prompt = Prompt(text, checked if num_kept is None else checked[-num_kept:])
    if not prompt.token_ids:
        raise RequestError("the prompt is empty; it needs at least one token")
    length = len(prompt.token_ids)
    if length >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens, but {limits.max_model_len} is the most for prompt and output together; "
            f"shorten it to {limits.max_model_len - 1} or fewer"
        )
    return prompt


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, limits: Welcome) -> None:
    """Check what depends on the model served. Raises RequestError."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer; this model has none, so use stop_token_ids")
    if params.use_beam_search and (params.stop or params.logprobs is not None):
        raise RequestError(
            "beam search takes no stop strings and gives no logprobs; use stop_token_ids and cumulative_logprob"
        )
    if params.bad_words and tokenizer is None:
        raise RequestError("bad_words need a tokenizer; this model has none, so use bad_words_token_ids")
    try:
        params.check_vocabulary(limits.vocab_size)
    except ValueError as error:
        raise RequestError(str(error)) from error


def check_fork(parent: SamplingParams, params: SamplingParams, have: int) -> None:
    """Check what a fork of a request with `have` tokens so far may ask. Raises RequestError."""
    for whose, which in (("of the request to fork", parent), ("of a fork", params)):
        if which.use_beam_search or (which.best_of or which.n) > 1:
            raise RequestError(f"the sampling_params {whose} must have one sample (n=1), and no beams")
    if params.max_tokens is not None and params.max_tokens <= have:
        raise RequestError(f"max_tokens counts the {have} tokens a fork begins with; got {params.max_tokens}")
    if have and params.logprobs is not None and parent.logprobs is None:
        raise RequestError("a fork can have logprobs only if the request it begins with has them")
    if params.prompt_logprobs is not None and parent.prompt_logprobs is None:
        raise RequestError("a fork can have prompt_logprobs only if the request it begins with has them")


def _unwrap(given: Any) -> tuple[str | Sequence[int], str | None]:
    """The prompt, and the text beside token ids."""
    plain, text = given, None
    if isinstance(given, Mapping):
        if not given or not given.keys() <= {"prompt", "prompt_token_ids"}:
            raise RequestError(f"a prompt must be {_FORMS}, got a dict with keys {list(given)}")
        key = "prompt_token_ids" if "prompt_token_ids" in given else "prompt"
        plain = given[key]
        if isinstance(plain, str) != (key == "prompt"):
            raise RequestError(f"a prompt must be {_FORMS}, got a {type(plain).__name__} under {key!r}")
        text = given.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"a prompt must be {_FORMS}, got a {type(text).__name__} under 'prompt'")
    if not isinstance(plain, Sequence) or isinstance(plain, (bytes, bytearray)):
        raise RequestError(f"a prompt must be {_FORMS}, got {type(plain).__name__}")
    return plain, text


def encode(
    text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True, num_kept: int | None = None
) -> list[int]:
    """Token ids of a text that a user gave. Raises RequestError."""
    if tokenizer is None:
        raise RequestError("a text prompt needs a tokenizer; this model has none, so give token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, of which the library would not tell where it is
        raise RequestError(f"the prompt is not valid Unicode at character {error.start}: {error.reason}") from error
    return tokenizer.encode(text, add_special_tokens=add_special_tokens, num_kept=num_kept)


def _checked_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    for place, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            raise RequestError(f"token ids must be integers, got {token_id!r} at position {place}")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token ids must be between 0 and {vocab_size - 1}, got {token_id} at position {place}")
    return list(token_ids)

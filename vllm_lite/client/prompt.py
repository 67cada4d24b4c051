"""Checks prompts and params before anything is sent. Each error names the wrong value and what is allowed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

from vllm_lite.client.spans import Span, flatten
from vllm_lite.client.text.tokenizer import SLICE_CHARS, Tokenizer
from vllm_lite.errors import ContextLengthError, RequestError
from vllm_lite.protocol.api import MAX_MARKS, Welcome
from vllm_lite.protocol.encoder import MediaContent
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.spans import Media


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    """`prompt`: the text of the ids, only copied to the output. `marks`: ascending positions in tokens where later
    prompts are likely to diverge from this one, such as ends of messages; a model with recurrent layers saves its state
    there. By default the positions after the model's end tokens."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    marks: NotRequired[Sequence[int] | None]


class SpansPrompt(TypedDict):
    """Text and media, in order. `shown_as`: the text from which they came, only copied to the output."""

    spans: Sequence[Span]
    shown_as: NotRequired[str | None]


class ImagesPrompt(TypedDict):
    """A text with a placeholder for each image, and the images under "image": one or a list, each a path, bytes, a
    data: URL or a Pillow image. `multi_modal_uuids` names them likewise; an image that is None is one sent before under
    its name. `mm_processor_kwargs`: sizes for the processor."""

    prompt: str
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


MIN_TEXT_BYTES = 512 * 1024
"""Texts up to this size are always tokenized at once; the library takes about 180 bytes of memory per byte of text."""
BYTES_PER_TOKEN = 32
"""Maximum average bytes per token of a prompt. A text with more bytes per token of the context is not tokenized."""
USUAL_BYTES_PER_TOKEN = 4

PromptLike = str | Sequence[int] | TextPrompt | TokensPrompt | SpansPrompt | ImagesPrompt
Prompts = PromptLike | Sequence[PromptLike]
_FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt, which the engine will accept."""

    text: str | None
    token_ids: list[int]
    marks: tuple[int, ...] = ()
    """Positions in tokens where later prompts are likely to diverge: the user's marks, or the ends of messages for an
    engine that uses them."""
    media: tuple[Media, ...] = ()
    """Media at the placeholders of `token_ids`."""
    contents: tuple[MediaContent, ...] = ()
    """Contents of the media for an encoder."""


def message_ends(token_ids: list[int], limits: Welcome) -> tuple[int, ...]:
    """Positions of the ends of messages, after each of which templates write the model's end token. If there are too
    many, the first and the last are kept."""
    if not limits.wants_marks:
        return ()
    ends = frozenset(limits.eos_token_ids)
    marks = [place for place, token in enumerate(token_ids, 1) if token in ends]
    return (*marks[:1], *marks[1:][1 - MAX_MARKS :])


def checked_marks(marks: Any, num_tokens: int) -> tuple[int, ...]:
    """Check a user's marks in a prompt of `num_tokens` tokens. Raises RequestError."""
    if not isinstance(marks, Sequence) or isinstance(marks, (str, bytes, bytearray)) or len(marks) > MAX_MARKS:
        got = f"{len(marks)}" if isinstance(marks, Sequence) else type(marks).__name__
        raise RequestError(f"marks must be a list of at most {MAX_MARKS} numbers of tokens, got {got}")
    last = 0
    for mark in marks:
        if type(mark) is not int or not last < mark <= num_tokens:
            raise RequestError(f"marks must ascend from 1 to at most {num_tokens}, the prompt's tokens; got {mark!r}")
        last = mark
    return tuple(marks)


def read_prompt(
    given: PromptLike,
    tokenizer: Tokenizer | None,
    limits: Welcome,
    params: SamplingParams,
    check: Callable[[], None] = lambda: None,
) -> Prompt:
    """Tokenize and check one prompt. At least one generated token has to fit after it.

    `max_tokens` is an upper limit; if fewer fit, the engine stops there. If `params` truncate the prompt, its last or
    first tokens are kept, together with the special tokens that a tokenizer adds at the ends of a text. Raises
    RequestError, and the errors of `check`, which is called now and then while a long text is tokenized.
    """
    if isinstance(given, Mapping) and "spans" in given:
        return _of_spans(given, limits, params)
    plain, text = unwrap(given)
    most, kept = limits.max_model_len, _num_kept(params, limits)
    side = params.truncation_side or "left"
    if isinstance(plain, str):
        check_text(plain, tokenizer, most, params, check)
        prompt = Prompt(plain, encode(plain, tokenizer, num_kept=kept, side=side))
    else:
        if kept is None and len(plain) >= most:
            raise ContextLengthError(most, len(plain), params.max_tokens)
        checked = checked_ids(plain, limits.vocab_size)
        prompt = Prompt(text, checked if kept is None else checked[-kept:] if side == "left" else checked[:kept])
    if not prompt.token_ids:
        raise RequestError("the prompt is empty; it needs at least one token")
    if len(prompt.token_ids) >= most:
        raise ContextLengthError(most, len(prompt.token_ids), params.max_tokens)
    marks = given.get("marks") if isinstance(given, Mapping) else None
    if marks is None:
        return replace(prompt, marks=message_ends(prompt.token_ids, limits))
    num_cut = len(plain) - len(prompt.token_ids) if side == "left" else 0
    num_kept = len(prompt.token_ids)
    kept_marks = (mark - num_cut for mark in checked_marks(marks, len(plain)) if 0 < mark - num_cut <= num_kept)
    return replace(prompt, marks=tuple(kept_marks))


def _of_spans(given: Mapping[str, Any], limits: Welcome, params: SamplingParams) -> Prompt:
    """Make a prompt of text and media."""
    spans = given["spans"]
    if (
        not given.keys() <= {"spans", "shown_as"}
        or not isinstance(spans, Sequence)
        or isinstance(spans, (str, bytes, bytearray))
    ):
        raise RequestError("a prompt of spans must be {'spans': [Text or Media, ...]} and nothing else")
    if params.truncate_prompt_tokens is not None:
        raise RequestError("a prompt of spans cannot be truncated; leave out truncate_prompt_tokens")
    flat = flatten(spans, limits)
    if not flat.token_ids:
        raise RequestError("the prompt is empty; it needs at least one token")
    ids = checked_ids(flat.token_ids, limits.vocab_size)
    return Prompt(given.get("shown_as"), ids, message_ends(ids, limits), flat.media, flat.contents)


def _num_kept(params: SamplingParams, limits: Welcome) -> int | None:
    """Number of a prompt's tokens to keep; None means all."""
    if params.truncate_prompt_tokens != -1:
        return params.truncate_prompt_tokens
    return max(1, limits.max_model_len - (params.max_tokens or 1))


def max_text_bytes(max_model_len: int) -> int:
    """Maximum bytes of a text that is tokenized for a context of `max_model_len` tokens."""
    return max(MIN_TEXT_BYTES, BYTES_PER_TOKEN * max_model_len)


def check_text(
    text: str,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    params: SamplingParams | None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Raise RequestError for a text that is too long to be tokenized, ContextLengthError if it exceeds the context.

    A text of a usual length for the context passes, as it will be tokenized whole. More than max_text_bytes() are
    always too many. In between, slices are tokenized in turn until their tokens are too many. If `params` truncate the
    text, only a part of its tokens has to fit, and without `params` none; then only memory limits it.
    """
    num_bytes = _num_bytes(text)
    if num_bytes > max_text_bytes(max_model_len):
        raise too_many_bytes(num_bytes, max_model_len, params)
    is_cut = _is_cut(params)
    usual = MIN_TEXT_BYTES if is_cut else min(MIN_TEXT_BYTES, USUAL_BYTES_PER_TOKEN * max_model_len)
    if tokenizer is None or num_bytes <= max(SLICE_CHARS, usual):
        return
    most = max(max_model_len, MIN_TEXT_BYTES) if is_cut else max_model_len
    if tokenizer.is_longer(text, most, check):
        if params is not None and not is_cut:
            raise ContextLengthError(max_model_len, most + 1, params.max_tokens)
        raise RequestError(f"the prompt has more than {most} tokens, too many to keep only the last of them")


def too_many_bytes(num_bytes: int, max_model_len: int, params: SamplingParams | None) -> RequestError:
    """Make the error for a text of more than max_text_bytes(). It estimates the tokens without counting them."""
    if params is not None and not _is_cut(params):
        return ContextLengthError(max_model_len, num_bytes // BYTES_PER_TOKEN, params.max_tokens)
    most = f"{max_text_bytes(max_model_len)} are tokenized for a context of {max_model_len} tokens"
    return RequestError(f"the prompt has {num_bytes} bytes; at most {most}")


def _is_cut(params: SamplingParams | None) -> bool:
    return params is None or params.truncate_prompt_tokens is not None


def _num_bytes(text: str) -> int:
    """Count the bytes in UTF-8. Raises RequestError for a text that is not valid Unicode."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:  # a lone surrogate, whose position the library would not report
        raise RequestError(f"the prompt is not valid Unicode at character {error.start}: {error.reason}") from error


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, limits: Welcome) -> None:
    """Check params against the served model. Raises RequestError."""
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


def check_room(prompts: Iterable[Prompt], max_tokens: int | None, max_model_len: int) -> None:
    """Raise ContextLengthError for a `max_tokens` above the context, however short the prompt; a smaller one is limited
    to the tokens that fit."""
    if max_tokens is not None and max_tokens > max_model_len:
        raise ContextLengthError(max_model_len, max(len(prompt.token_ids) for prompt in prompts), max_tokens)


def check_fork(parent: SamplingParams, params: SamplingParams, have: int) -> None:
    """Check the params of a fork of a request with `have` tokens so far. Raises RequestError."""
    for whose, which in (("of the request to fork", parent), ("of a fork", params)):
        if which.use_beam_search or (which.best_of or which.n) > 1:
            raise RequestError(f"the sampling_params {whose} must have one sample (n=1), and no beams")
    if params.max_tokens is not None and params.max_tokens <= have:
        raise RequestError(f"max_tokens counts the {have} tokens a fork begins with; got {params.max_tokens}")
    if have and params.logprobs is not None and parent.logprobs is None:
        raise RequestError("a fork can have logprobs only if the request it begins with has them")
    if params.prompt_logprobs is not None and parent.prompt_logprobs is None:
        raise RequestError("a fork can have prompt_logprobs only if the request it begins with has them")


def unwrap(given: Any) -> tuple[str | Sequence[int], str | None]:
    """Separate the prompt from the text that may accompany token ids. Raises RequestError."""
    plain, text = given, None
    if isinstance(given, Mapping):
        if not given or not given.keys() <= {"prompt", "prompt_token_ids", "marks"}:
            raise RequestError(f"a prompt must be {_FORMS}, got a dict with keys {list(given)}")
        key = "prompt_token_ids" if "prompt_token_ids" in given else "prompt"
        plain = given[key]
        if isinstance(plain, str) != (key == "prompt"):
            raise RequestError(f"a prompt must be {_FORMS}, got a {type(plain).__name__} under {key!r}")
        if key == "prompt" and given.get("marks") is not None:
            raise RequestError("marks count tokens, so they need prompt_token_ids, not a text")
        text = given.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"a prompt must be {_FORMS}, got a {type(text).__name__} under 'prompt'")
    if not isinstance(plain, Sequence) or isinstance(plain, (bytes, bytearray)):
        raise RequestError(f"a prompt must be {_FORMS}, got {type(plain).__name__}")
    return plain, text


def encode(
    text: str,
    tokenizer: Tokenizer | None,
    *,
    add_special_tokens: bool = True,
    num_kept: int | None = None,
    side: str = "left",
) -> list[int]:
    """Tokenize a user's text. Raises RequestError."""
    if tokenizer is None:
        raise RequestError("a text prompt needs a tokenizer; this model has none, so give token ids")
    _num_bytes(text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens, num_kept=num_kept, side=side)


def checked_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Copy a user's token ids. Raises RequestError for one that is not in the vocabulary."""
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return list(token_ids)
    for place, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            raise RequestError(f"token ids must be integers, got {token_id!r} at position {place}")
        if not 0 <= token_id < vocab_size:
            within = f"token ids must be between 0 and {vocab_size - 1}"
            raise RequestError(f"{within}, got {token_id} at position {place}, which is out of vocabulary")
    return list(token_ids)

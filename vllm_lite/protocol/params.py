"""SamplingParams: what a user may ask of one request. The same struct is the user's class and the wire's."""

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 64
MAX_SAMPLES = 64
MAX_STOPS = 64
MAX_BIASES = 4096
MAX_ALLOWED = 1 << 20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_EXTRA_ARGS = 64
MIN_REPETITION_PENALTY = 0.01
"""Divides logits: near zero they would not be finite."""
MAX_REPETITION_PENALTY = 100.0
MAX_SEED = 2**64 - 1
MAX_SHOWN_CHARS = 200
MAX_NAME_CHARS = 256
MAX_WORD_CHARS = 1024
"""Of one stop string, or one of `bad_words`: each token's text is searched for the one, the other is tokenized."""
GREEDY_BELOW = 1e-5
"""A temperature below this means: take the most likely token."""

_BOUNDS: dict[str, tuple[type, float, float]] = {
    "n": (int, 1, MAX_SAMPLES),
    "best_of": (int, 1, MAX_SAMPLES),
    "length_penalty": (float, -10.0, 10.0),
    "priority": (int, -(2**31), 2**31 - 1),
    "deadline_ms": (int, 1, 2**31 - 1),
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "top_k": (int, -1, 2**31 - 1),
    "max_tokens": (int, 1, 2**31 - 1),
    "min_tokens": (int, 0, 2**31 - 1),
    "seed": (int, 0, MAX_SEED),
    "logprobs": (int, 0, MAX_LOGPROBS),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "truncate_prompt_tokens": (int, -1, 2**31 - 1),
}
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of", "deadline_ms", "truncate_prompt_tokens"}
_ABOVE_ZERO = ("top_p",)
_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "use_beam_search",
    "early_stopping",
)
_NAMES = ("user", "cache_salt")
_EMPTY_BY_DEFAULT = ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids")


class RequestOutputKind(Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """All so far."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """There is one output, at the end."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to continue one prompt. Names and defaults are those that vLLM's users know.

    Of the model's logits, in this order: what is not in `allowed_token_ids`, what would complete one of `bad_words` in
    the output, and, before `min_tokens`, what would end it, is ruled out; `logit_bias` is added; `repetition_penalty`
    divides positive logits of tokens in prompt or output and multiplies negative ones; `frequency_penalty` is
    subtracted as often as a token was generated, `presence_penalty` once if it was. Then they are divided by
    `temperature`, and filtered: top_k, top_p (renormalised within the top k), min_p (relative to the most likely
    token). temperature below 1e-5 is greedy; top_k of 0 or -1 and top_p of 1 are off. `logprobs` and `prompt_logprobs`
    are of the model's own logits, before all this.

    `seed` fixes the draw of every position whatever else the engine is doing; without one the client draws it.
    `max_tokens=None` means: up to the context length. `bad_words` are texts, which the client turns into
    `bad_words_token_ids`. `truncate_prompt_tokens` keeps the last tokens of a prompt, -1 as many as fit.

    `output_kind` is what AsyncClient yields. `extra_args` are the caller's own, and change nothing. A field whose
    default is an empty sequence takes None for it, and `seed` -1 for None.

    `n` samples share one prompt; `best_of` draws more and keeps the likeliest. `use_beam_search` searches with n beams.
    Lower `priority` is served first under that policy, `user` is whose share counts under the fair one. `cache_salt`
    keeps cached prefixes apart. A request that takes longer than `deadline_ms` ends with an error.

    Raises ValueError or TypeError with the name, the value and the range.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = 16
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    stop: Annotated[Sequence[str], Meta(max_length=MAX_STOPS)] = ()
    stop_token_ids: Annotated[Sequence[int], Meta(max_length=MAX_STOPS)] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[Sequence[int], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[Sequence[str], Meta(max_length=MAX_BAD_WORDS)] = ()
    bad_words_token_ids: Annotated[
        Sequence[Annotated[Sequence[int], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]],
        Meta(max_length=2 * MAX_BAD_WORDS),
    ] = ()
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    early_stopping: bool = False
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    user: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: Annotated[dict[str, Any], Meta(max_length=MAX_EXTRA_ARGS)] | None = None
    structured_outputs: Any = None

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Like the constructor, but None means: the default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self, **changes: Any) -> Self:
        """A copy, with other values for the fields in `changes`; the original cannot be changed."""
        return msgspec.structs.replace(self, **changes)

    def __post_init__(self) -> None:
        if self.seed == -1:
            self._set("seed", None)
        for name, (kind, low, high) in _BOUNDS.items():
            _check_number(name, getattr(self, name), kind, low, high)
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n ({self.n}), got {self.best_of}")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        self._check_lists()
        self._check_rest()
        if self.use_beam_search:
            self._check_beams()
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, because they are looked for in the text")

    def _check_lists(self) -> None:
        """Of all fields with several entries; what is given as a list becomes a tuple."""
        for name in _EMPTY_BY_DEFAULT:
            if getattr(self, name) is None:
                self._set(name, ())
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        self._set("stop", _checked_tuple("stop", self.stop, str))
        self._set("stop_token_ids", _checked_tuple("stop_token_ids", self.stop_token_ids, int))
        if any(not text for text in self.stop):
            raise ValueError("stop strings must not be empty")
        _check_chars("stop", self.stop)
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _checked_tuple("allowed_token_ids", self.allowed_token_ids, int, MAX_ALLOWED)
            if not allowed:
                raise ValueError("allowed_token_ids must name at least one token, or be None to allow all")
            self._set("allowed_token_ids", tuple(dict.fromkeys(allowed)))
        if self.bad_words:
            self._set("bad_words", _checked_tuple("bad_words", self.bad_words, str, MAX_BAD_WORDS))
            if not all(word.strip() for word in self.bad_words):
                raise ValueError("bad_words must not be empty or blank")
            _check_chars("bad_words", self.bad_words)
        if self.bad_words_token_ids:
            self._set("bad_words_token_ids", _checked_sequences("bad_words_token_ids", self.bad_words_token_ids))

    def _check_rest(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {_shown(getattr(self, name))}")
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or len(value) > MAX_NAME_CHARS):
                raise TypeError(f"{name} must be a text of at most {MAX_NAME_CHARS} characters, got {_shown(value)}")
        for name in (*_NAMES, "stop", "bad_words"):
            _check_unicode(name, getattr(self, name) or "")
        if self.structured_outputs is not None:
            raise ValueError("structured_outputs is not supported yet")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        if self.extra_args is not None:
            if not isinstance(self.extra_args, dict) or not all(isinstance(name, str) for name in self.extra_args):
                raise TypeError(f"extra_args must be a dict with names as keys, got {_shown(self.extra_args)}")
            if len(self.extra_args) > MAX_EXTRA_ARGS:
                raise ValueError(f"extra_args takes at most {MAX_EXTRA_ARGS} entries, got {len(self.extra_args)}")

    def _check_beams(self) -> None:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of has no meaning with use_beam_search, whose width is n")
        if self.changes_logits or self.prompt_logprobs is not None:
            raise ValueError(
                "use_beam_search follows the model's own logprobs; it takes no penalties, logit_bias, "
                "allowed_token_ids, bad_words or prompt_logprobs"
            )

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)

    @property
    def penalises(self) -> bool:
        """Whether what was generated, or prompted, counts against tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def changes_logits(self) -> bool:
        """Whether draws are not from the model's own logits; min_tokens aside, which is about the end only."""
        words = self.bad_words or self.bad_words_token_ids
        return bool(self.penalises or self.logit_bias or self.allowed_token_ids is not None or words)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError for a token id that is not in the vocabulary."""
        given: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": chain.from_iterable(self.bad_words_token_ids),
        }
        for name, token_ids in given.items():
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} must be between 0 and {vocab_size - 1}, got {token_id}")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _check_number(name: str, value: Any, kind: type, low: float, high: float) -> None:
    if value is None and name in _OPTIONAL:
        return
    accepted = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError(f"{name} must be {'a number' if kind is float else 'an integer'}, got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{name} must be between {low} and {high}, got {value!r}")
    if not value and name in _ABOVE_ZERO:
        raise ValueError(f"{name} must be greater than 0 and at most {high:g}, got {value!r}")


def _check_unicode(name: str, texts: str | Sequence[str]) -> None:
    """Half a surrogate pair, which a Python string may hold, cannot be sent."""
    for text in (texts,) if isinstance(texts, str) else texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} must be valid Unicode, got {_shown(text)}: {error.reason}") from None


def _shown(value: Any) -> str:
    """For an error message, which a long list would drown."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _checked_tuple(name: str, value: Any, kind: type, most: int = MAX_STOPS) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(item) is kind for item in value):
        raise TypeError(f"{name} must be a list of {'strings' if kind is str else 'token ids'}, got {_shown(value)}")
    if len(value) > most:
        raise ValueError(f"{name} takes at most {most} entries, got {len(value)}")
    return tuple(value)


def _check_chars(name: str, texts: Sequence[str]) -> None:
    longest = max(map(len, texts), default=0)
    if longest > MAX_WORD_CHARS:
        raise ValueError(f"{name} takes texts of at most {MAX_WORD_CHARS} characters, got one of {longest}")


def _checked_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list of lists of token ids, got {_shown(value)}")
    if len(value) > 2 * MAX_BAD_WORDS:
        raise ValueError(f"{name} takes at most {2 * MAX_BAD_WORDS} entries, got {len(value)}")
    sequences = tuple(_checked_tuple(name, item, int, MAX_BAD_WORD_TOKENS) for item in value)
    if not all(sequences):
        raise ValueError(f"{name} must not hold empty lists")
    return tuple(dict.fromkeys(sequences))


def _checked_bias(value: Any) -> dict[int, float]:
    """A copy; ids may be spelled as strings, as in JSON."""
    if not isinstance(value, dict):
        raise TypeError(f"logit_bias must be a dict of token ids and numbers, got {_shown(value)}")
    if len(value) > MAX_BIASES:
        raise ValueError(f"logit_bias takes at most {MAX_BIASES} entries, got {len(value)}")
    checked = {}
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else key
        if type(token_id) is not int:
            raise TypeError(f"logit_bias must have token ids as keys, got {key!r}")
        _check_number(f"logit_bias of token {token_id}", bias, float, -100.0, 100.0)
        checked[token_id] = float(bias)
    return checked

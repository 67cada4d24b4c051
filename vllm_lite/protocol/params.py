"""SamplingParams: the sampling parameters of one request. Users and the wire use the same struct.

A parameter is declared only here: range checks, fields of OpenAI's bodies and the protocol's documents follow from the
annotation; other APIs list the parameters that they accept. A parameter that the sampler reads is also a field of
Sampling, which `for_worker` fills; one that changes logits is a field of LogitRules (`logit_rules`).
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import msgspec
from msgspec import Meta

from vllm_lite.protocol import Message
from vllm_lite.protocol.structured import MAX_GRAMMAR_CHARS, StructuredOutputsParams, Thinking

MAX_LOGPROBS = 64
MAX_SAMPLES = 64
MAX_STOPS = 64
MAX_BIASES = 4096
MAX_ALLOWED = 1 << 20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_EXTRA_ARGS = 64
MIN_REPETITION_PENALTY = 0.01
"""Lower bound of the penalty, which divides logits: near zero they would not be finite."""
MAX_REPETITION_PENALTY = 100.0
MAX_SEED = 2**64 - 1
"""Upper bound of an integer whose annotation has none: msgspec accepts no bound of more than 63 bits."""
MAX_SHOWN_CHARS = 200
MAX_SHOWN_KEYS = 5
MAX_NAME_CHARS = 256
MAX_WORD_CHARS = 1024
"""Maximum length of a stop string or bad word: the text of each token is searched for stop strings, and bad words are
tokenized."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the most likely token is taken."""


class RequestOutputKind(Enum):
    """Content of each output of a stream."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """The tokens since the previous output."""
    FINAL_ONLY = 2
    """A single output, at the end."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of one prompt. Names and defaults are vLLM's.

    A token is sampled in these steps. Tokens that are not in `allowed_token_ids`, that would complete one of
    `bad_words` in the output, or that would end it before `min_tokens`, are ruled out. `logit_bias` is added.
    `repetition_penalty` divides positive logits of tokens in prompt or output and multiplies negative ones;
    `frequency_penalty` is subtracted once per time that a token was generated, `presence_penalty` once if it was. Then
    the logits are divided by `temperature`, and filtered: top_k, top_p (renormalised within the top k), min_p (relative
    to the most likely token). A temperature below 1e-5 is greedy; top_k of 0 or -1 and top_p of 1 are off. `logprobs`
    and `prompt_logprobs` are of the model's own logits, before all of this. With `logprob_token_ids` the former are
    reported for these tokens and the sampled one, instead of the likeliest ones; `logprobs` is then their number.

    `seed` determines the draw at every position, whatever other requests run; without one the client draws a seed.
    `max_tokens=None` means: up to the context length. `bad_words` are texts, which the client converts to
    `bad_words_token_ids`. `truncate_prompt_tokens` keeps the last tokens of a prompt (-1: as many as fit), or with a
    `truncation_side` of "right" the first ones.

    `structured_outputs` constrains the output; if the model thinks first, after the end of its thinking. The client
    converts it to a `grammar` in the format of llguidance, and the model's thinking tokens to `thinking`.
    `thinking_token_budget` bounds the thinking.

    `output_kind` selects the outputs that AsyncClient yields. `extra_args` are for the caller and have no effect. A
    field whose default is an empty sequence accepts None, and `seed` accepts -1 for None.

    `n` samples share one prompt; `best_of` draws more and keeps the likeliest. `use_beam_search` searches with n beams.
    Under the policy "priority" the lowest `priority` is served first; `user` is the tenant of the policy "fair".
    `cache_salt` separates cached prefixes. A request that takes longer than `deadline_ms` ends with an error.

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
    logprob_token_ids: Annotated[Sequence[int], Meta(max_length=MAX_LOGPROBS)] = ()
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
    truncation_side: Literal["left", "right"] | None = None
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
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] | None = None
    thinking: Thinking | None = None

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Like the constructor, but None stands for the default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self, **changes: Any) -> Self:
        """A copy, with other values for the fields in `changes`; the original cannot be changed."""
        return msgspec.structs.replace(self, **changes)

    def __post_init__(self) -> None:
        if self.seed == -1:
            self._set("seed", None)
        if isinstance(self.stop, str):
            self._set("stop", (self.stop,))
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is default:
                continue
            checked = () if value is None and default == () else check(name, value)
            if checked is not value:
                self._set(name, checked)
        if not all(self.stop):
            raise ValueError("stop strings must not be empty")
        if not all(word.strip() for word in self.bad_words):
            raise ValueError("bad_words must not be empty or blank")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must name at least one token, or be None to allow all")
            self._set("allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
        if self.logprob_token_ids:
            self._set("logprob_token_ids", tuple(dict.fromkeys(self.logprob_token_ids)))
            self._check_named()
        if self.structured_outputs is not None and self.grammar is not None:
            raise ValueError("structured_outputs and grammar are two forms of one output; give one of them")
        self._check_relations()

    def _check_relations(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n ({self.n}), got {self.best_of}")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.use_beam_search:
            self._check_beams()
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, because they are looked for in the text")

    def _check_named(self) -> None:
        if self.use_beam_search:
            raise ValueError("logprob_token_ids have no meaning with use_beam_search")
        count = len(self.logprob_token_ids)
        if self.logprobs not in (None, count):
            raise ValueError(f"logprobs must be the number of logprob_token_ids ({count}), got {self.logprobs}")
        self._set("logprobs", count)

    def _check_beams(self) -> None:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of has no meaning with use_beam_search, whose width is n")
        if self.changes_logits or self.prompt_logprobs is not None:
            raise ValueError(
                "use_beam_search follows the model's own logprobs; it takes no penalties, logit_bias, "
                "allowed_token_ids, bad_words, structured_outputs, thinking_token_budget or prompt_logprobs"
            )

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)

    @property
    def changes_logits(self) -> bool:
        """Whether any parameter changes the model's logits; min_tokens, which only delays the end, does not count."""
        unread = self.allowed_token_ids, self.bad_words, self.structured_outputs, self.thinking_token_budget
        return any(part not in ((), None) for part in unread) or self.logit_rules() is not None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for a token id that is not in the vocabulary."""
        given: dict[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias or (),
            "logprob_token_ids": self.logprob_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": chain.from_iterable(self.bad_words_token_ids),
            "thinking": (*self.thinking.begin, *self.thinking.end) if self.thinking is not None else (),
        }
        for name, token_ids in given.items():
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} must be between 0 and {vocab_size - 1}, got {token_id}")

    def for_worker(
        self, sample: int, num_prompt: int, stop_ids: Collection[int], num_candidates: int | None, *, unscored: bool
    ) -> "Sampling":
        """The workers' parameters for one sequence: sample `sample` of a prompt of `num_prompt` tokens.

        `stop_ids` end it. `num_candidates`: likeliest tokens per position that beam search reads; None: no beam search.
        `unscored`: the sequence still has to compute the prompt logprobs, if any are requested.
        """
        is_beam = num_candidates is not None
        banned = stop_ids if self.min_tokens else ()
        return Sampling(
            temperature=0.0 if self.greedy or is_beam else self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed or 0,
            sample=sample,
            logprobs=num_candidates if is_beam else self.logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids),
            min_tokens_until=num_prompt + self.min_tokens if banned else 0,
            stop_ids=tuple(sorted(banned)),
            rules=self.logit_rules(),
            prompt_logprobs=self.prompt_logprobs if unscored else None,
        )

    def logit_rules(self) -> "LogitRules | None":
        """The parameters that change logits; None if none does."""
        rules = LogitRules(
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
            tuple((self.logit_bias or {}).items()),
            array("I", self.allowed_token_ids or ()).tobytes(),
            tuple(map(tuple, self.bad_words_token_ids)),
            self.grammar or "",
            self.thinking,
        )
        return None if rules == _NO_RULES else rules


class LogitRules(Message):
    """Changes to a sequence's logits before sampling; SamplingParams has their order.

    Ids are within the vocabulary; no id has two biases.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: Annotated[bytes, Meta(max_length=4 * MAX_ALLOWED)] = b""
    """Token ids as little-endian u32; empty: all tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    """Grammar that the output must follow, in the format of llguidance; empty: none."""
    thinking: Thinking | None = None

    @property
    def penalises(self) -> bool:
        """Whether tokens of the output, or of the prompt, are penalised."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


_NO_RULES = LogitRules()


class Sampling(Message):
    """The sampler's parameters of one sequence. `sample` is its index among the samples of one prompt."""

    temperature: float
    """0 for a greedy sequence."""
    top_k: int
    """0: off."""
    top_p: float
    min_p: float
    seed: int
    sample: int = 0
    logprobs: int | None = None
    min_tokens_until: int = 0
    """Sequence length before which no token of `stop_ids` may be sampled; 0 = no such rule."""
    stop_ids: tuple[int, ...] = ()
    rules: LogitRules | None = None
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report at each position of the prompt; None: no prompt logprobs. Only for a
    NewRequest that computes its whole prompt."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens to report instead of the most likely ones; `logprobs` is their number."""

    @property
    def is_ruled(self) -> bool:
        """Whether any rule may change the sequence's logits."""
        return self.rules is not None or self.min_tokens_until > 0


# ---- checks, derived from the annotations

_Check = Callable[[str, Any], Any]
"""Takes a field's name and value, and returns the value to store. Raises TypeError or ValueError."""


def _check_of(hint: Any) -> _Check:
    """The check of a field with the annotation `hint`."""
    if NoneType in get_args(hint):
        return partial(_checked_optional, _check_of(get_args(hint)[0]))
    kind, meta = get_args(hint) if get_origin(hint) is Annotated else (hint, Meta())
    if kind in (int, float):
        low, high = meta.ge if meta.gt is None else meta.gt, MAX_SEED if meta.le is None else meta.le
        return partial(_checked_number, kind, kind(low), kind(high), meta.gt is not None)
    if kind is bool:
        return _checked_flag
    if kind is str:
        return partial(_checked_name, meta.max_length)
    origin, of = get_origin(kind), get_args(kind)
    if origin is Literal:
        return partial(_checked_choice, of)
    if origin is Sequence and of[0] in (int, str):
        return partial(_checked_tuple, of[0], meta.max_length)
    if origin is Sequence:
        return partial(_checked_sequences, meta.max_length, _check_of(of[0]))
    if origin is dict:
        if of[0] is int:
            return partial(_checked_bias, meta.max_length, _check_of(of[1]))
        return partial(_checked_extra_args, meta.max_length)
    if kind is RequestOutputKind:
        return _checked_kind
    if kind is StructuredOutputsParams:
        return _checked_form
    if kind is Thinking:
        return _checked_thinking
    if kind is Any:
        return lambda _name, value: value
    raise TypeError(f"there is no check for a parameter that is a {hint}")


def _checked_optional(check: _Check, name: str, value: Any) -> Any:
    return None if value is None else check(name, value)


def _checked_number(kind: type, low: float, high: float, above: bool, name: str, value: Any) -> Any:
    accepted = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError(f"{name} must be {'a number' if kind is float else 'an integer'}, got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{name} must be between {low} and {high}, got {value!r}")
    if above and value == low:
        raise ValueError(f"{name} must be greater than {low:g} and at most {high:g}, got {value!r}")
    return kind(value)  # a number of NumPy, which is a float, has no place on the wire


def _checked_choice(choices: tuple[str, ...], name: str, value: Any) -> Any:
    _expect(value in choices, name, " or ".join(choices), value)
    return str.__str__(value)


def _checked_flag(name: str, value: Any) -> Any:
    _expect(isinstance(value, bool), name, "True or False", value)
    return value


def _checked_name(most: int, name: str, value: Any) -> Any:
    fits = isinstance(value, str) and len(value) <= most
    _expect(fits, name, f"a text of at most {most} characters", value)
    _check_unicode(name, value)
    return str.__str__(value)  # str() of a member of an enumeration would be its name


def _checked_kind(name: str, value: Any) -> Any:
    if not isinstance(value, RequestOutputKind):
        raise TypeError(f"{name} must be a RequestOutputKind, got {value!r}")
    return value


def _checked_form(name: str, value: Any) -> Any:
    """Accept the struct, or a dict of its fields."""
    if isinstance(value, dict):
        try:
            return msgspec.convert(value, StructuredOutputsParams)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}") from error
    _expect(isinstance(value, StructuredOutputsParams), name, "a StructuredOutputsParams", value)
    return value


def _checked_thinking(name: str, value: Any) -> Any:
    _expect(isinstance(value, Thinking), name, "a Thinking", value)
    return value


def _checked_tuple(kind: type, most: int, name: str, value: Any) -> tuple[Any, ...]:
    """Check a list of strings or token ids, by `kind`."""
    is_list = isinstance(value, (list, tuple)) and all(type(item) is kind for item in value)
    _expect(is_list, name, f"a list of {'strings' if kind is str else 'token ids'}", value, most)
    if kind is str:
        longest = max(map(len, value), default=0)
        if longest > MAX_WORD_CHARS:
            raise ValueError(f"{name} takes texts of at most {MAX_WORD_CHARS} characters, got one of {longest}")
        for text in value:
            _check_unicode(name, text)
    return tuple(value)


def _checked_sequences(most: int, check: _Check, name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    _expect(isinstance(value, (list, tuple)), name, "a list of lists of token ids", value, most)
    sequences = tuple(check(name, item) for item in value)
    if not all(sequences):
        raise ValueError(f"{name} must not hold empty lists")
    return tuple(dict.fromkeys(sequences))


def _checked_bias(most: int, check: _Check, name: str, value: Any) -> dict[int, float]:
    """Check and copy a bias dict; ids may be strings, as in JSON."""
    _expect(isinstance(value, dict), name, "a dict of token ids and numbers", value, most)
    ids = {key: int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else key for key in value}
    if wrong := [key for key, token_id in ids.items() if type(token_id) is not int]:
        more = f" and {len(wrong) - MAX_SHOWN_KEYS} others" if len(wrong) > MAX_SHOWN_KEYS else ""
        shown = ", ".join(_shown(key) for key in wrong[:MAX_SHOWN_KEYS])
        raise TypeError(f"{name} must have token ids as keys, got {shown}{more}")
    return {ids[key]: float(check(f"{name} of token {ids[key]}", bias)) for key, bias in value.items()}


def _checked_extra_args(most: int, name: str, value: Any) -> Any:
    is_named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    _expect(is_named, name, "a dict with names as keys", value, most)
    return value


def _expect(is_right: bool, name: str, what: str, value: Any, most: int | None = None) -> None:
    """Raise an error unless the value `is_right`, which means that it is `what`, and has at most `most` entries."""
    if not is_right:
        raise TypeError(f"{name} must be {what}, got {_shown(value)}")
    if most is not None and len(value) > most:
        raise ValueError(f"{name} takes at most {most} entries, got {len(value)}")


def _check_unicode(name: str, text: str) -> None:
    """Refuse half a surrogate pair, which a Python string can hold but which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {_shown(text)}: {error.reason}") from None


def _shown(value: Any) -> str:
    """The value for an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


_CHECKS = tuple(
    (name, default, _check_of(hint))
    for (name, hint), default in zip(
        SamplingParams.__annotations__.items(), SamplingParams.__struct_defaults__, strict=True
    )
)
"""(name, default, check) of each field; the default needs no check."""

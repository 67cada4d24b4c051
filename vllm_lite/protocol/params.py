"""SamplingParams: what a user may ask of one request. The same struct is the user's class and the wire's."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_LOGPROBS = 64
MAX_SAMPLES = 64
MAX_STOPS = 64
MAX_SEED = 2**64 - 1
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
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to continue one prompt. Names and defaults are those that vLLM's users know.

    temperature below 1e-5 is greedy; top_k of 0 or -1 and top_p of 1 are off. Filters apply in the order top_k,
    top_p (renormalised within the top k), min_p (relative to the most likely token). `seed` fixes the draw of every
    position whatever else the engine is doing; without one the client draws it. `max_tokens=None` means: up to the
    context length.

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
    detokenize: bool = True
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    early_stopping: bool = False
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    user: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    def __post_init__(self) -> None:
        for name, (kind, low, high) in _BOUNDS.items():
            _check_number(name, getattr(self, name), kind, low, high)
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of must be at least n ({self.n}), got {self.best_of}")
        if self.use_beam_search and self.best_of not in (None, self.n):
            raise ValueError("best_of has no meaning with use_beam_search, whose width is n")
        if self.top_p == 0:
            raise ValueError("top_p must be greater than 0 and at most 1, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            msgspec.structs.force_setattr(self, name, _checked_tuple(name, getattr(self, name), kind))
        if any(not text for text in self.stop):
            raise ValueError("stop strings must not be empty")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, because they are looked for in the text")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _check_number(name: str, value: Any, kind: type, low: float, high: float) -> None:
    if value is None and name in ("max_tokens", "seed", "logprobs", "best_of", "deadline_ms"):
        return
    accepted = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError(f"{name} must be {'a number' if kind is float else 'an integer'}, got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{name} must be between {low} and {high}, got {value!r}")


def _checked_tuple(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(item) is kind for item in value):
        raise TypeError(f"{name} must be a list of {'strings' if kind is str else 'token ids'}, got {value!r}")
    if len(value) > MAX_STOPS:
        raise ValueError(f"{name} takes at most {MAX_STOPS} entries, got {len(value)}")
    return tuple(value)

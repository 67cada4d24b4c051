"""Rope: rotary position embedding as described in config.json: the rotated elements of a head, and their frequencies.
No torch.

`layers/attention/rope.py` makes tables of it. Sources: Su et al. 2021 (rotary embedding), Peng et al. 2023 (YaRN), Ding
et al. 2024 (LongRoPE), and the releases of Llama 3.1 and Gemma.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.typed_json import Positive, Size, convert
from vllm_lite.errors import ModelError

DEFAULT_THETA = 10000.0
MAX_LISTED = 8
"""Maximum number of layer types listed in an error."""


class LinearScaling(msgspec.Struct, frozen=True, tag=True):
    """Positions are divided by `factor`."""

    factor: float


class Dynamic(msgspec.Struct, frozen=True, tag=True):
    """Theta grows with the length beyond `original` (NTK scaling). Here it is fixed for the maximum sequence length, as
    a request's output must not depend on the length of others."""

    factor: float
    original: int


class Llama3(msgspec.Struct, frozen=True, tag=True):
    """Frequencies with wavelengths longer than the `original` context are divided by `factor`, those that fit it
    `high_freq_factor` times are kept, and those in between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


class Yarn(msgspec.Struct, frozen=True, tag=True):
    """Pairs with fewer than `beta_slow` rotations in the `original` context have their frequency divided by `factor`,
    those with more than `beta_fast` are kept, and those in between are blended by index."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the blend starts and ends at whole pairs."""


class LongRope(msgspec.Struct, frozen=True, tag=True):
    """Each pair has its own divisor: `short` if the maximum sequence length is at most `original`, else `long`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int

    @property
    def is_fixed(self) -> bool:
        """Whether both are equal, as in GGUF files with precomputed factors of Llama 3."""
        return self.short == self.long


class Proportional(msgspec.Struct, frozen=True, tag=True):
    """Only the first `num_pairs` pairs of the head are rotated, with the frequencies of a fully rotated head divided by
    `factor`."""

    num_pairs: int
    factor: float = 1.0


Scaling = LinearScaling | Dynamic | Llama3 | Yarn | LongRope | Proportional


class Rope(msgspec.Struct, frozen=True):
    """Rotation of a layer's heads."""

    theta: float
    scaling: Scaling | None = None
    rotary_size: int | None = None
    """Number of rotated elements, the first of each head; None = all."""
    interleaved: bool = False
    """Whether element 2 i is rotated with element 2 i + 1 in the checkpoint; else i with i + rotary_size / 2."""
    attention_factor: float = 1.0
    """Factor on rotated elements."""
    axes: tuple[int, ...] | None = None
    """For each rotated pair, the axis of its positions, if images have positions along time, height and width (0, 1,
    2); None: a single axis. Text has equal positions along all axes."""

    def order(self, head_size: int) -> tuple[int, ...] | None:
        """For each element of a head in the kernels' order, its index in the checkpoint's head; None: the same order.

        Kernels rotate element i with element i + head_size / 2, so unrotated elements are distributed after both
        halves. The same order for Q and K does not change scores.
        """
        return _order(self.rotary_size or head_size, head_size, self.interleaved)

    def reach(self, max_position_embeddings: int) -> int:
        """Maximum sequence length; config.json's number may be that before the context was extended."""
        if isinstance(self.scaling, Dynamic | Yarn):
            return max(max_position_embeddings, int(self.scaling.factor * self.scaling.original))
        return max_position_embeddings

    def pinned(self, max_model_len: int) -> str | None:
        """A short description of the effect that the maximum length has on all requests; None: no effect."""
        scaling = self.scaling
        if not isinstance(scaling, Dynamic | LongRope) or (isinstance(scaling, LongRope) and scaling.is_fixed):
            return None
        longer = max_model_len > scaling.original
        if isinstance(scaling, LongRope):
            chosen = "the long factors are used" if longer else "the short factors are used"
        else:
            chosen = f"theta is made for {max_model_len} positions" if longer else "theta is not changed"
        return (
            f"max_model_len {max_model_len} {'exceeds' if longer else 'fits'} the {scaling.original} of the model's "
            f"original context, so {chosen} for every request"
        )


@lru_cache
def _order(rotary_size: int, head_size: int, interleaved: bool) -> tuple[int, ...] | None:
    half, rest = rotary_size // 2, range(rotary_size, head_size)
    if interleaved:
        first, second = range(0, rotary_size, 2), range(1, rotary_size, 2)
    else:
        first, second = range(half), range(half, rotary_size)
    middle = len(rest) // 2
    order = (*first, *rest[:middle], *second, *rest[middle:])
    return None if order == tuple(range(head_size)) else order


class RawRope(msgspec.Struct):
    """Keys of `rope_parameters` (new) or `rope_scaling` (old, where the type may be called `type`)."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Meta(gt=0, le=1)] | None = None
    factor: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False


class RopeContext(msgspec.Struct, frozen=True):
    """Inputs of a rope other than its parameters: further keys of config.json, and the family's defaults."""

    head_size: int
    max_position_embeddings: int
    theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    interleaved: bool = False


def read_rope(values: Mapping[str, Any], key: str, context: RopeContext) -> Rope:
    """Read the rope in config.json's `key`. Raises ModelError that names the key and the value."""
    raw = convert(dict(values), RawRope, within=key)
    kind = raw.rope_type or raw.type or "default"
    if kind in ("su", "longrope") or (kind == "yarn" and raw.short_factor is not None):
        kind = "longrope"
    reader = _READERS.get(kind)
    if reader is None:
        raise ModelError(f"{key}.rope_type {kind!r} is not supported; supported: {', '.join(_READERS)}")
    share = raw.partial_rotary_factor or context.partial_rotary_factor
    rotary_size = 2 * math.ceil(int(context.head_size * share) / 2)
    scaling, attention_factor = reader(raw, key, context)
    if kind == "proportional":
        scaling = Proportional(int(share * context.head_size // 2), raw.factor or 1.0)
        rotary_size = context.head_size
    if isinstance(scaling, LongRope) and {len(scaling.short), len(scaling.long)} != {rotary_size // 2}:
        raise ModelError(
            f"{key}: short_factor and long_factor have {len(scaling.short)} and {len(scaling.long)} numbers; they must "
            f"have {rotary_size // 2}, one for each rotated pair"
        )
    return Rope(
        theta=raw.rope_theta or context.theta,
        scaling=scaling,
        rotary_size=None if rotary_size == context.head_size else rotary_size,
        interleaved=context.interleaved,
        attention_factor=attention_factor,
        axes=_axes(raw, rotary_size // 2),
    )


def _axes(raw: RawRope, num_pairs: int) -> tuple[int, ...] | None:
    """The axis of each pair: sections side by side, or height and width at every third pair up to their counts. None
    for sections that do not match the pairs."""
    sections = raw.mrope_section
    if sections is None or sum(sections) != num_pairs:
        return None
    if not raw.mrope_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs))


def _needed(raw: RawRope, key: str, *names: str) -> list[Any]:
    missing = [name for name in names if getattr(raw, name) is None]
    if missing:
        raise ModelError(f"{key} of type {raw.rope_type or raw.type} needs {', '.join(missing)}")
    return [getattr(raw, name) for name in names]


def _original(raw: RawRope, context: RopeContext) -> int:
    outside = context.original_max_position_embeddings
    return outside or raw.original_max_position_embeddings or context.max_position_embeddings


def _default(raw: RawRope, key: str, context: RopeContext) -> tuple[Scaling | None, float]:  # noqa: ARG001
    return None, 1.0


def _linear(raw: RawRope, key: str, context: RopeContext) -> tuple[Scaling | None, float]:  # noqa: ARG001
    (factor,) = _needed(raw, key, "factor")
    return LinearScaling(factor), 1.0


def _dynamic(raw: RawRope, key: str, context: RopeContext) -> tuple[Scaling | None, float]:
    (factor,) = _needed(raw, key, "factor")
    return Dynamic(factor, context.max_position_embeddings), 1.0


def _llama3(raw: RawRope, key: str, context: RopeContext) -> tuple[Scaling | None, float]:
    factor, low, high = _needed(raw, key, "factor", "low_freq_factor", "high_freq_factor")
    if high <= low:
        raise ModelError(f"{key}.high_freq_factor {high} must be greater than low_freq_factor {low}")
    return Llama3(factor, low, high, _original(raw, context)), 1.0


def _yarn(raw: RawRope, key: str, context: RopeContext) -> tuple[Scaling | None, float]:  # noqa: ARG001
    original = _original(raw, context)
    factor = raw.factor or context.max_position_embeddings / original
    attention_factor = raw.attention_factor or _yarn_attention_factor(factor, raw.mscale, raw.mscale_all_dim)
    fast, slow = raw.beta_fast or 32.0, raw.beta_slow or 1.0
    return Yarn(factor, original, fast, slow, raw.truncate), attention_factor


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    if mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, scale: float) -> float:
    """YaRN's factor on Q and K; `scale` is mscale in config.json."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(raw: RawRope, key: str, context: RopeContext) -> tuple[Scaling | None, float]:
    short, long = _needed(raw, key, "short_factor", "long_factor")
    original = _original(raw, context)
    factor = raw.factor or context.max_position_embeddings / original
    attention_factor = raw.attention_factor
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(tuple(short), tuple(long), original), attention_factor


_READERS = {
    "default": _default,
    "mrope": _default,  # for images, along three axes; text has equal positions along all of them
    "axial": _default,  # another name of it
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _default,
}

"""Rotary position embedding, as config.json describes it: which elements of a head turn, and how fast. No torch.

`layers/attention/rope.py` makes tables of it. Sources: Su et al. 2021 (rotary embedding), Peng et al. 2023 (YaRN), Ding
et al. 2024 (LongRoPE), and Llama 3.1's and Gemma's own.
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
"""How many layer types an error lists."""


class LinearScaling(msgspec.Struct, frozen=True, tag=True):
    """Every position counts for 1 / `factor` of one."""

    factor: float


class Dynamic(msgspec.Struct, frozen=True, tag=True):
    """Theta grows with the length beyond `original` (NTK scaling), here once and for all with the longest that a
    sequence may become: what a request gives must not depend on how long its neighbours are."""

    factor: float
    original: int


class Llama3(msgspec.Struct, frozen=True, tag=True):
    """Wavelengths that did not fit into the `original` context turn slower by `factor`, those that fit it
    `high_freq_factor` times stay, and in between both are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


class Yarn(msgspec.Struct, frozen=True, tag=True):
    """Pairs with less than `beta_slow` turns in the `original` context turn slower by `factor`, those with more than
    `beta_fast` stay, and the pairs in between are blended, by their number."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the blend begins and ends at whole pairs."""


class LongRope(msgspec.Struct, frozen=True, tag=True):
    """Each pair has a divisor of its own: `short` where no sequence may become longer than `original`, else `long`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int

    @property
    def is_fixed(self) -> bool:
        """Whether both are the same, as where GGUF files have Llama 3's blend computed."""
        return self.short == self.long


class Proportional(msgspec.Struct, frozen=True, tag=True):
    """Only the first `num_pairs` pairs of the head turn, as fast as if all did, divided by `factor`."""

    num_pairs: int
    factor: float = 1.0


Scaling = LinearScaling | Dynamic | Llama3 | Yarn | LongRope | Proportional


class Rope(msgspec.Struct, frozen=True):
    """Rotation of a layer's heads."""

    theta: float
    scaling: Scaling | None = None
    rotary_size: int | None = None
    """So many elements turn, the first of each head; None = all."""
    interleaved: bool = False
    """Whether element 2 i turns with element 2 i + 1 in the checkpoint; else i with i + rotary_size / 2."""
    attention_factor: float = 1.0
    """What turns is multiplied by it."""
    axes: tuple[int, ...] | None = None
    """For each rotated pair the axis whose positions rotate it, where images have positions along time, height and
    width (0, 1, 2); None: there is one axis. Text has the same position along all of them."""

    def order(self, head_size: int) -> tuple[int, ...] | None:
        """Position in the checkpoint's head of each element of a head as kernels see it; None: in the same order.

        Kernels turn element i with element i + head_size / 2, so what does not turn is shared out behind both halves.
        The same order on Q and K leaves every score as it is.
        """
        return _order(self.rotary_size or head_size, head_size, self.interleaved)

    def reach(self, max_position_embeddings: int) -> int:
        """Largest length of a sequence; config.json's number may be that before the context was extended."""
        if isinstance(self.scaling, Dynamic | Yarn):
            return max(max_position_embeddings, int(self.scaling.factor * self.scaling.original))
        return max_position_embeddings

    def pinned(self, max_model_len: int) -> str | None:
        """The consequence of the largest length for all requests, in a few words; None: there is none."""
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
    """`rope_parameters` (new) or `rope_scaling` (old, where the kind may be called `type`)."""

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
    """Facts for a rope from outside of its parameters: other keys of config.json, and the family's."""

    head_size: int
    max_position_embeddings: int
    theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    interleaved: bool = False


def read_rope(values: Mapping[str, Any], key: str, context: RopeContext) -> Rope:
    """Read one kind of rope, config.json's `key`. Raises ModelError that names the key and the value."""
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
    """The axis of each pair: sections one behind another, or height and width at every third pair as long as they last.
    None for sections that are not of these pairs."""
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
    """By how much YaRN enlarges Q and K, `scale` being what config.json calls mscale."""
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
    "mrope": _default,  # of images, along three axes; along all of them text has the same positions
    "axial": _default,  # its other name
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _default,
}

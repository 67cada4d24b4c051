"""Common keys of all families' config.json, and the parts of a ModelSpec made of them.

Both spellings are read: the old (`rope_theta`, `rope_scaling`, `torch_dtype`) and the new (`rope_parameters`, `dtype`).
Every ModelError names the key and the value; `load_spec` prefixes the file's name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.layer_specs.activation import Activation
from vllm_lite.checkpoint.layer_specs.pooling import HeadSpec, Kind, PoolingSpec
from vllm_lite.checkpoint.layer_specs.rope import DEFAULT_THETA, Rope, RopeContext, read_rope
from vllm_lite.checkpoint.model_spec import (
    DTYPE_BYTES,
    AttentionSpec,
    EncoderSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    make_kv_groups,
)
from vllm_lite.checkpoint.quantization.read import read_kv_cache, read_quantization
from vllm_lite.checkpoint.typed_json import Positive, Size, TokenId
from vllm_lite.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
KEEP_KV = {FULL, SLIDING, "attention"}
"""The values of `layer_types` for layers with attention."""
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class RawConfig(msgspec.Struct, kw_only=True):
    """Keys that are read for every family; a family adds its own, also those that must have a value (Literal). All
    others are ignored."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)]
    num_attention_heads: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Meta(gt=0, le=1)] | None = None
    original_max_position_embeddings: Size | None = None
    tie_word_embeddings: bool = False
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


class OlderConfig(RawConfig, kw_only=True):
    """Keys of families older than Llama, whose heads are tied by default."""

    layer_norm_epsilon: Positive = 1e-5
    tie_word_embeddings: bool = True


class Family(NamedTuple):
    """Architectures whose config.json is read in the same way."""

    config: type[RawConfig]
    read: Callable[[str, Any], ModelSpec]
    """Called as read(architecture, the converted config)."""
    aliases: Mapping[str, str] = {}
    """Keys with other names in this family: its name -> that of RawConfig."""
    by_type: Mapping[str, "Family"] = {}
    """Families by `model_type` of the text part, for architectures whose text part may be of several families."""


class EncoderParts(NamedTuple):
    """Parts of an encoder other than its layers. `head` is a text classifier's, which pools by `kind`; `token_head` a
    token classifier's."""

    encoder: EncoderSpec
    intermediate_size: int
    head: HeadSpec
    kind: Kind = "cls"
    token_head: HeadSpec = HeadSpec(output="classifier", output_bias=True)
    token_labels: tuple[str, ...] = ()
    """Default labels of tokens."""


def attention_of(raw: RawConfig, *, default_head_dim: int | None = None) -> AttentionSpec:
    """Attention with the usual scale and no extras; a family replaces fields that differ."""
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {raw.num_attention_heads}"
        )
    head_size = raw.head_dim or default_head_dim
    if head_size is None:
        head_size, remainder = divmod(raw.hidden_size, raw.num_attention_heads)
        if remainder:
            raise ModelError(
                f"hidden_size {raw.hidden_size} is not a multiple of num_attention_heads {raw.num_attention_heads}; "
                "without a head_dim it must be"
            )
    return AttentionSpec(raw.num_attention_heads, num_kv_heads, head_size, scale=head_size**-0.5)


def ropes_of(
    raw: RawConfig,
    head_size: int,
    *,
    interleaved: bool = False,
    theta: float = DEFAULT_THETA,
    partial_rotary_factor: float = 1.0,
) -> dict[str, Rope]:
    """The rope of each layer type, equal if config.json does not distinguish them; `theta` and `partial_rotary_factor`
    are the family's defaults."""
    context = _rope_context(
        raw,
        head_size,
        theta=raw.rope_theta or theta,
        partial_rotary_factor=raw.partial_rotary_factor or partial_rotary_factor,
        interleaved=interleaved,
    )
    key, values = _rope_values(raw)
    nested = {name: value for name, value in values.items() if name in (FULL, SLIDING) and isinstance(value, dict)}
    if nested:
        return {name: read_rope(value, f"{key}.{name}", context) for name, value in nested.items()}
    others = [name for name, value in values.items() if isinstance(value, dict)]
    if others:
        raise ModelError(f"{key} has layer types {', '.join(others[:8])}; supported: {FULL}, {SLIDING}")
    rope = read_rope(values, key, context)
    return {FULL: rope, SLIDING: rope}


def ropes_by_type(raw: RawConfig, head_size: int, thetas: Mapping[str, float]) -> dict[str, Rope]:
    """The rope of each layer type for families whose sliding layers differ. Values that config.json does not give by
    layer type apply to full attention only; sliding layers get default rope. `thetas`: default theta of each type."""
    key, values = _rope_values(raw)
    by_type = FULL in values or SLIDING in values
    ropes = {}
    for kind, theta in thetas.items():
        own = values.get(kind) if by_type else values if kind == FULL else None
        own = {} if own is None else own
        if not isinstance(own, dict):
            raise ModelError(f"{key}.{kind} {own!r} is not an object of rope parameters")
        ropes[kind] = read_rope(own, f"{key}.{kind}" if by_type else key, _rope_context(raw, head_size, theta=theta))
    return ropes


def _rope_values(raw: RawConfig) -> tuple[str, dict[str, Any]]:
    """Key and value of the rope parameters in config.json."""
    key = "rope_parameters" if raw.rope_parameters is not None else "rope_scaling"
    return key, raw.rope_parameters or raw.rope_scaling or {}


def _rope_context(raw: RawConfig, head_size: int, **own: Any) -> RopeContext:
    if head_size % 2:
        raise ModelError(f"head_dim {head_size} is odd; rotary embedding turns pairs, so it must be even")
    return RopeContext(
        head_size=head_size,
        max_position_embeddings=raw.max_position_embeddings,
        original_max_position_embeddings=raw.original_max_position_embeddings,
        **own,
    )


def rope_of(raw: RawConfig, head_size: int, **options: Any) -> Rope:
    """The rope of a model with equal rope in all layers. `options` as for `ropes_of`."""
    ropes = ropes_of(raw, head_size, **options)
    if len(set(ropes.values())) > 1:
        raise ModelError("rope_parameters differs by layer type; one for all layers is supported")
    return next(iter(ropes.values()))


def layer_types_of(
    raw: RawConfig, default: Callable[[int], str] = lambda _: FULL, known: tuple[str, ...] = (FULL, SLIDING)
) -> list[str]:
    """The type of each layer, one of `known`, by config.json or by `default`. Raises ModelError if none keeps KV."""
    types = raw.layer_types
    if types is None:
        types = [default(layer) for layer in range(raw.num_hidden_layers)]
    others = sorted(set(types) - set(known))
    if others:
        raise ModelError(f"layer_types {', '.join(others)} not supported; supported: {', '.join(known)}")
    if len(types) != raw.num_hidden_layers:
        raise ModelError(f"layer_types has {len(types)} entries for {raw.num_hidden_layers} layers")
    if not KEEP_KV & set(types):
        raise ModelError(f"layer_types has no {FULL}; at least one layer must keep KV")
    return types


def windows_of(types: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer by its type; None for full attention."""
    if SLIDING in types and window is None:
        raise ModelError(f"layer_types has {SLIDING}, but sliding_window is not set")
    return [window if kind == SLIDING else None for kind in types]


def every_nth(pattern: int) -> Callable[[int], str]:
    """For `layer_types_of`: every `pattern`-th layer has full attention, the others are sliding."""
    return lambda layer: SLIDING if (layer + 1) % pattern else FULL


def layers_of(
    attention: AttentionSpec, windows: Sequence[int | None], ropes: Sequence[Rope | None]
) -> tuple[LayerSpec, ...]:
    """Layers that differ only by window and rope."""
    both = zip(windows, ropes, strict=True)
    return tuple(LayerSpec(msgspec.structs.replace(attention, window=window), rope) for window, rope in both)


def rotating(layers: Sequence[LayerSpec], rotates: Sequence[object]) -> tuple[LayerSpec, ...]:
    """The layers, without rope where `rotates` is false."""
    both = zip(layers, rotates, strict=False)
    return tuple(own if turns else msgspec.structs.replace(own, rope=None) for own, turns in both)


def equal_layers(raw: RawConfig, attention: AttentionSpec, rope: Rope | None = None) -> tuple[LayerSpec, ...]:
    """Layers that do not differ."""
    return (LayerSpec(attention, rope),) * raw.num_hidden_layers


def typed_layers(
    attention: AttentionSpec, types: Sequence[str], window: int | None, ropes: Mapping[str, Rope] | Rope
) -> tuple[LayerSpec, ...]:
    """Layers that differ by their types: sliding ones have `window`, and those of a type its rope, if it has one."""
    by_type = ropes if isinstance(ropes, Mapping) else dict.fromkeys(types, ropes)
    return layers_of(attention, windows_of(types, window), [by_type.get(kind) for kind in types])


def decoder(
    architecture: str, raw: RawConfig, layers: tuple[LayerSpec, ...], norm: NormSpec, intermediate_size: int, **own: Any
) -> ModelSpec:
    """Make a decoder's spec of its layers. `own`: other fields of the ModelSpec that the family sets."""
    usual: dict[str, Any] = {
        "activation": own.get("activation") or activation_of(raw.hidden_act),
        "tie_word_embeddings": raw.tie_word_embeddings,
        "bos_token_id": raw.bos_token_id,
        "eos_token_ids": as_ids(raw.eos_token_id),
        "max_position_embeddings": max(
            raw.max_position_embeddings if own.rope is None else own.rope.reach(raw.max_position_embeddings)
            for own in layers
        ),
    }
    return ModelSpec(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=intermediate_size,
        layers=layers,
        norm=norm,
        dtype=_dtype(raw),
        kv_groups=make_kv_groups(layers),
        quantization=read_quantization(raw.quantization_config),
        kv_cache_dtype=read_kv_cache(raw.quantization_config),
        **(usual | own),
    )


def encoder(
    architecture: str, raw: RawConfig, layers: tuple[LayerSpec, ...], norm: NormSpec, parts: EncoderParts, **own: Any
) -> ModelSpec:
    """Make an encoder's spec of its layers. `own` as for `decoder`."""
    spec, size = parts.encoder, raw.hidden_size
    heads = {"ForSequenceClassification": parts.head, "ForTokenClassification": parts.token_head}
    head = next((own for ending, own in heads.items() if architecture.endswith(ending)), None)
    return msgspec.structs.replace(
        decoder(architecture, raw, layers, norm, parts.intermediate_size, **({"tie_word_embeddings": True} | own)),
        kv_groups=(),
        encoder=spec,
        pooling=PoolingSpec(kind=parts.kind, tasks=(), head=head, labels=parts.token_labels),
        extra_parameters=(spec.num_positions + spec.num_types) * size,
    )


def activation_of(name: str, key: str = "hidden_act") -> Activation:
    """The activation called `name` in config.json's `key`."""
    if name not in ACTIVATIONS:
        raise ModelError(f"{key} {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids from config.json's null, integer or list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _dtype(raw: RawConfig) -> str:
    """The checkpoint's dtype; float32 if it is not given, as this loses nothing."""
    name = (raw.dtype or raw.torch_dtype or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return name

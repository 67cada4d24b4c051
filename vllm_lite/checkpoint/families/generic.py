"""Any decoder-only model of transformers, read by common keys of config.json and their other names.

These keys have what the engine needs: numbers of layers and heads, and windows. The computation is transformers'; a
worker compares both before it loads weights (models/transformers).
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import (
    FULL,
    SLIDING,
    RawConfig,
    attention_of,
    decoder,
    layer_types_of,
    layers_of,
    windows_of,
)
from vllm_lite.checkpoint.layer_specs.rope import Rope
from vllm_lite.checkpoint.model_spec import ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Size, convert
from vllm_lite.errors import ModelError

OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads"),
    "max_position_embeddings": ("n_positions", "max_sequence_length", "max_seq_len", "seq_length"),
    "head_dim": ("kv_channels", "head_size", "attention_head_dim"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "attn_logit_softcapping": ("attn_logit_softcap",),
}
"""Key -> its other names."""
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of architectures that generate text."""
MLP_RATIO = 4
"""Default ratio of intermediate_size to hidden_size."""


class GenericConfig(RawConfig, kw_only=True):
    intermediate_size: Size | None = None
    sliding_window: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # 0: none, as Qwen's are written
    use_sliding_window: bool = True
    max_window_layers: Annotated[int, Meta(ge=0)] = 0
    sliding_window_pattern: Annotated[int, Meta(ge=1)] | Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    attn_logit_softcapping: Annotated[float, Meta(ge=0)] | None = None


def read_generic(architecture: str, text: Mapping[str, Any]) -> ModelSpec:
    """Make a spec of `text`, the part of config.json about the text model.

    Raises ModelError, with the model's type, if it is not a decoder of attention layers, or keys are missing.
    """
    _check_kind(architecture, text)
    raw = convert(_usual_names(text), GenericConfig)
    if raw.quantization_config:
        method = raw.quantization_config.get("quant_method")
        raise ModelError(f"quantization_config {method!r} is not supported for a model that transformers computes")
    attention = msgspec.structs.replace(attention_of(raw), soft_cap=raw.attn_logit_softcapping or 0.0)
    windows = windows_of(layer_types_of(raw, lambda layer: _default_type(raw, layer)), raw.sliding_window or None)
    ropes: list[Rope | None] = [None] * raw.num_hidden_layers  # transformers applies rope
    width = raw.intermediate_size or MLP_RATIO * raw.hidden_size
    own: dict[str, Any] = {
        "implementation": "transformers",
        "activation": "silu",
    }  # the activation is transformers' as well
    return decoder(architecture, raw, layers_of(attention, windows, ropes), NormSpec(1.0), width, **own)


def _check_kind(architecture: str, text: Mapping[str, Any]) -> None:
    kind = f"{architecture} (model_type {text.get('model_type')!r})"
    if text.get("is_encoder_decoder"):
        raise ModelError(f"{kind} has an encoder and a decoder; models that have a decoder only are supported")
    if not architecture.endswith(ENDINGS):
        raise ModelError(f"{kind} does not write text; its architecture must be one of *{', *'.join(ENDINGS)}")
    if text.get("kv_lora_rank") is not None:
        raise ModelError(f"{kind} has latent attention (kv_lora_rank), which is not supported")
    types = text.get("layer_types")
    others = sorted({str(name) for name in types} - {FULL, SLIDING}) if isinstance(types, list) else None
    if others:
        raise ModelError(f"{kind} has {', '.join(others)} layers; supported are {FULL} and {SLIDING}")
    for key in NEEDED:
        names = (key, *OTHER_NAMES.get(key, ()))
        if all(text.get(name) is None for name in names):
            raise ModelError(f"{kind}: has none of {', '.join(names)}, which a model of attention layers has")


def _usual_names(text: Mapping[str, Any]) -> dict[str, Any]:
    """The known keys of `text`, under their usual names. Null counts as missing."""
    named = {key: value for key, value in text.items() if value is not None}
    for key, others in OTHER_NAMES.items():
        value = next((named[name] for name in (key, *others) if name in named), None)
        if value is not None:
            named[key] = value
    return {key: value for key, value in named.items() if key in GenericConfig.__struct_fields__ and key not in _UNREAD}


_UNREAD = ("hidden_act", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Keys of RawConfig that are not read here, as transformers reads them."""


def _default_type(raw: GenericConfig, layer: int) -> str:
    """Default type of a layer."""
    if not raw.sliding_window or not raw.use_sliding_window or layer < raw.max_window_layers:
        return FULL
    pattern = raw.sliding_window_pattern
    if isinstance(pattern, str):  # like LLLG: local, local, local, global
        return SLIDING if pattern[layer % len(pattern)] == "L" else FULL
    return FULL if pattern is not None and (layer + 1) % pattern == 0 else SLIDING

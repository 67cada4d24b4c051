"""Llama and those that differ from it by numbers only: Mistral, Qwen3."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.common import (
    FULL,
    SLIDING,
    Family,
    RawConfig,
    attention_of,
    decoder,
    layer_types_of,
    layers_of,
    rope_of,
    windows_of,
)
from vllm_lite.checkpoint.model_spec import ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

DEFAULT_SLIDING_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
QWEN3_HEAD_DIM = 128


class LlamaConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    rms_norm_eps: Positive
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Size | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0)] = DEFAULT_MAX_WINDOW_LAYERS


def llama_like(
    architecture: str, raw: LlamaConfig, windows: list[int | None], *, head_dim: int | None = None, **own: Any
) -> ModelSpec:
    """A model of Llama's layers. `head_dim`: the family's, where config.json has none; `own` as for `decoder`."""
    attention = attention_of(raw, default_head_dim=head_dim)
    rope = rope_of(raw, attention.head_size)
    layers = layers_of(attention, windows, [rope] * len(windows))
    biases = {"qkv_bias": raw.attention_bias, "output_bias": raw.attention_bias, "mlp_bias": raw.mlp_bias}
    return decoder(architecture, raw, layers, NormSpec(raw.rms_norm_eps), raw.intermediate_size, **(biases | own))


def qwen_windows(raw: LlamaConfig) -> list[int | None]:
    """Qwen writes a sliding_window that use_sliding_window then turns off, or on from layer max_window_layers on."""
    window = DEFAULT_SLIDING_WINDOW if raw.sliding_window is msgspec.UNSET else raw.sliding_window
    window = window if raw.use_sliding_window else None
    if window is None and SLIDING in (raw.layer_types or ()):
        raise ModelError(f"layer_types has {SLIDING}, but sliding_window or use_sliding_window is off")
    first = raw.max_window_layers if window is not None else raw.num_hidden_layers
    return windows_of(layer_types_of(raw, lambda layer: FULL if layer < first else SLIDING), window)


def _llama(architecture: str, raw: LlamaConfig) -> ModelSpec:
    if SLIDING in (raw.layer_types or ()):
        raise ModelError(f"layer_types {SLIDING} not supported; supported: {FULL}")
    layer_types_of(raw)
    asked = raw.sliding_window if raw.use_sliding_window is None else raw.use_sliding_window
    if asked:
        raise ModelError(f"sliding_window {raw.sliding_window} is not supported; every layer must use full attention")
    return llama_like(architecture, raw, [None] * raw.num_hidden_layers)


def _mistral(architecture: str, raw: LlamaConfig) -> ModelSpec:
    layer_types_of(raw)
    window = DEFAULT_SLIDING_WINDOW if raw.sliding_window is msgspec.UNSET else raw.sliding_window
    return llama_like(architecture, raw, [window] * raw.num_hidden_layers)


def _qwen3(architecture: str, raw: LlamaConfig) -> ModelSpec:
    return llama_like(architecture, raw, qwen_windows(raw), head_dim=QWEN3_HEAD_DIM, qk_norm="head")


FAMILIES = {
    "LlamaForCausalLM": Family(LlamaConfig, _llama),
    "MistralForCausalLM": Family(LlamaConfig, _mistral),
    "Qwen3ForCausalLM": Family(LlamaConfig, _qwen3),
}

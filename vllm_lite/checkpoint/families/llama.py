"""Llama, and the common parts of families that differ from it only by numbers."""

from collections.abc import Sequence
from typing import Any

import msgspec

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
)
from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size
from vllm_lite.errors import ModelError

DEFAULT_SLIDING_WINDOW = 4096


class LlamaConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    rms_norm_eps: Positive
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Size | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool | None = None


class SeedOssConfig(LlamaConfig, kw_only=True):
    attention_bias: bool = True
    attention_out_bias: bool = False


class InternLM3Config(LlamaConfig, kw_only=True):
    head_dim: Size | None = 128


def llama_layers(
    raw: LlamaConfig, windows: Sequence[int | None], *, head_dim: int | None = None, **rope: Any
) -> tuple[LayerSpec, ...]:
    """Layers that differ only by their windows. `head_dim`: the family's default; `rope` as for `rope_of`."""
    attention = attention_of(raw, default_head_dim=head_dim)
    return layers_of(attention, windows, [rope_of(raw, attention.head_size, **rope)] * len(windows))


def llama_like(architecture: str, raw: LlamaConfig, layers: tuple[LayerSpec, ...], **own: Any) -> ModelSpec:
    """Make the spec of a model with Llama's layout of norms and blocks. `own` as for `decoder`."""
    biases = {"qkv_bias": raw.attention_bias, "output_bias": raw.attention_bias, "mlp_bias": raw.mlp_bias}
    return decoder(architecture, raw, layers, NormSpec(raw.rms_norm_eps), raw.intermediate_size, **(biases | own))


def full_attention(raw: LlamaConfig) -> list[int | None]:
    """The windows of a family without any. Raises ModelError if config.json requests some."""
    if SLIDING in (raw.layer_types or ()):
        raise ModelError(f"layer_types {SLIDING} not supported; supported: {FULL}")
    layer_types_of(raw)
    asked = raw.sliding_window if raw.use_sliding_window is None else raw.use_sliding_window
    if asked:
        raise ModelError(f"sliding_window {raw.sliding_window} is not supported; every layer must use full attention")
    return [None] * raw.num_hidden_layers


def window_of(raw: LlamaConfig, default: int | None = DEFAULT_SLIDING_WINDOW) -> int | None:
    """The sliding window in config.json, where null means none and a missing key `default`."""
    return default if isinstance(raw.sliding_window, msgspec.UnsetType) else raw.sliding_window


def _llama(architecture: str, raw: LlamaConfig) -> ModelSpec:
    return llama_like(architecture, raw, llama_layers(raw, full_attention(raw)))


def _seed_oss(architecture: str, raw: SeedOssConfig) -> ModelSpec:
    layers = llama_layers(raw, full_attention(raw), head_dim=128)
    return llama_like(architecture, raw, layers, output_bias=raw.attention_out_bias)


FAMILIES = {
    "LlamaForCausalLM": Family(LlamaConfig, _llama),
    "SeedOssForCausalLM": Family(SeedOssConfig, _seed_oss),
    "InternLM3ForCausalLM": Family(InternLM3Config, _llama, {"qkv_bias": "attention_bias", "bias": "mlp_bias"}),
}

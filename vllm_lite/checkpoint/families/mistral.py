"""Mistral, Ministral and Mistral Small, up to Mistral 4: windows, YaRN, and queries scaled by their position.

Mistral 4 has DeepSeek's latent attention, and experts with softmax routing.
"""

from typing import Any

import msgspec

from vllm_lite.checkpoint.families.common import FULL, SLIDING, Family, RawConfig, layer_types_of, windows_of
from vllm_lite.checkpoint.families.deepseek import DeepseekConfig, latent_decoder
from vllm_lite.checkpoint.families.llama import LlamaConfig, llama_layers, llama_like, window_of
from vllm_lite.checkpoint.families.mixture import Index, grouped_routing_of
from vllm_lite.checkpoint.model_spec import ModelSpec, QueryGrowth
from vllm_lite.checkpoint.typed_json import Positive, Size, convert
from vllm_lite.errors import ModelError

MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Default rope of Ministral 3."""
MISTRAL4_ROPE: dict[str, Any] = MINISTRAL3_ROPE | {
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}
"""Default rope of Mistral 4."""


class MistralConfig(LlamaConfig, kw_only=True):
    model_type: str = ""


class Mistral4Config(DeepseekConfig, kw_only=True):
    rms_norm_eps: Positive = 1e-6
    n_shared_experts: Index | None = 1
    norm_topk_prob: bool = True
    rope_interleave: bool = True


class _Growth(msgspec.Struct):
    """Keys of `rope_parameters` for the scaling of queries by position."""

    llama_4_scaling_beta: Positive | None = None
    original_max_position_embeddings: Size | None = None


def _mistral(architecture: str, raw: MistralConfig) -> ModelSpec:
    layer_types_of(raw)
    return llama_like(architecture, raw, llama_layers(raw, [window_of(raw)] * raw.num_hidden_layers))


def _ministral(architecture: str, raw: MistralConfig) -> ModelSpec:
    window = window_of(raw)
    types = layer_types_of(raw, lambda _: FULL if window is None else SLIDING)
    return llama_like(architecture, raw, llama_layers(raw, windows_of(types, window)))


def _ministral3(architecture: str, raw: MistralConfig) -> ModelSpec:
    layer_types_of(raw)
    if raw.rope_parameters is None and raw.rope_scaling is None:
        raw.rope_parameters = MINISTRAL3_ROPE
    layers = llama_layers(raw, [window_of(raw, default=None)] * raw.num_hidden_layers, head_dim=128)
    growth = _growth(raw)
    return llama_like(architecture, raw, tuple(msgspec.structs.replace(layer, query_growth=growth) for layer in layers))


def _growth(raw: RawConfig) -> QueryGrowth | None:
    said = convert(raw.rope_parameters or raw.rope_scaling, _Growth, within="rope_parameters")
    if said.llama_4_scaling_beta is None:
        return None
    original = said.original_max_position_embeddings or raw.max_position_embeddings
    return QueryGrowth(said.llama_4_scaling_beta, original)


def _mistral4(architecture: str, raw: Mistral4Config) -> ModelSpec:
    """Read a Mistral 4. Its partial_rotary_factor refers to the whole head before absorption, so it is dropped here."""
    values = raw.rope_parameters or raw.rope_scaling or MISTRAL4_ROPE
    raw.rope_parameters = {key: value for key, value in values.items() if key != "partial_rotary_factor"}
    raw.partial_rotary_factor = None
    routing = grouped_routing_of(raw, epsilon=1e-20, group_score="top two")
    return latent_decoder(architecture, raw, routing, interleaved=raw.rope_interleave, growth=_growth(raw))


def _unknown(_architecture: str, raw: MistralConfig) -> ModelSpec:
    raise ModelError(f"text_config.model_type {raw.model_type!r} is not supported; supported: {', '.join(TEXT_PARTS)}")


MISTRAL4 = Family(Mistral4Config, _mistral4, {"num_local_experts": "n_routed_experts"})
TEXT_PARTS = {
    "mistral": Family(MistralConfig, _mistral),
    "ministral3": Family(MistralConfig, _ministral3),
    "mistral4": MISTRAL4,
}
"""Text parts of models that also see images, by their model_type."""
FAMILIES = {
    "Mistral4ForCausalLM": MISTRAL4,
    "MistralForCausalLM": Family(MistralConfig, _mistral),
    "MinistralForCausalLM": Family(MistralConfig, _ministral),
    "Ministral3ForCausalLM": Family(MistralConfig, _ministral3),
    "Mistral3ForConditionalGeneration": Family(MistralConfig, _unknown, by_type=TEXT_PARTS),
}

"""Mistral, Ministral, Ministral 3 and Mistral Small: windows, YaRN, and queries that grow with their position."""

from typing import Any

import msgspec

from vllm_lite.checkpoint.families.common import FULL, SLIDING, Family, layer_types_of, windows_of
from vllm_lite.checkpoint.families.llama import LlamaConfig, llama_layers, llama_like, window_of
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
"""Where config.json has none."""


class MistralConfig(LlamaConfig, kw_only=True):
    model_type: str = ""


class _Growth(msgspec.Struct):
    """What `rope_parameters` says of how Q grows."""

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


def _growth(raw: MistralConfig) -> QueryGrowth | None:
    said = convert(raw.rope_parameters or raw.rope_scaling, _Growth, within="rope_parameters")
    if said.llama_4_scaling_beta is None:
        return None
    original = said.original_max_position_embeddings or raw.max_position_embeddings
    return QueryGrowth(said.llama_4_scaling_beta, original)


def _mistral3(architecture: str, raw: MistralConfig) -> ModelSpec:
    """The text part of a model that also sees images."""
    readers = {"mistral": _mistral, "ministral3": _ministral3}
    if raw.model_type not in readers:
        raise ModelError(f"text_config.model_type {raw.model_type!r} is not supported; supported: {', '.join(readers)}")
    return readers[raw.model_type](architecture, raw)


FAMILIES = {
    "MistralForCausalLM": Family(MistralConfig, _mistral),
    "MinistralForCausalLM": Family(MistralConfig, _ministral),
    "Ministral3ForCausalLM": Family(MistralConfig, _ministral3),
    "Mistral3ForConditionalGeneration": Family(MistralConfig, _mistral3),
}

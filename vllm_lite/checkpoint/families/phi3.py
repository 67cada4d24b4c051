"""Phi-3 and Phi-4: Llama with fused projections, and longrope if the context was extended."""

from vllm_lite.checkpoint.families.common import Family, layer_types_of
from vllm_lite.checkpoint.families.llama import LlamaConfig, llama_layers, llama_like, window_of
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Size


class Phi3Config(LlamaConfig, kw_only=True):
    original_max_position_embeddings: Size | None = 4096


def _phi3(architecture: str, raw: Phi3Config) -> ModelSpec:
    layer_types_of(raw)
    return llama_like(architecture, raw, llama_layers(raw, [window_of(raw, default=None)] * raw.num_hidden_layers))


FAMILIES = {"Phi3ForCausalLM": Family(Phi3Config, _phi3)}

"""SmolLM3: some layers have no rope, and only these may have a window."""

from typing import Annotated

from msgspec import Meta

from vllm_lite.checkpoint.families.common import FULL, SLIDING, Family, layer_types_of, rotating, windows_of
from vllm_lite.checkpoint.families.llama import LlamaConfig, llama_layers, llama_like, window_of
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ModelError


class SmolLM3Config(LlamaConfig, kw_only=True):
    num_key_value_heads: Annotated[int, Meta(ge=1)] | None = 4
    tie_word_embeddings: bool = True
    no_rope_layers: list[int] | None = None
    """For each layer 1 if it has rope, despite the name."""
    no_rope_layer_interval: Annotated[int, Meta(ge=1)] = 4


def _smollm3(architecture: str, raw: SmolLM3Config) -> ModelSpec:
    rotates = raw.no_rope_layers
    if rotates is None:
        rotates = [(layer + 1) % raw.no_rope_layer_interval for layer in range(raw.num_hidden_layers)]
    if len(rotates) < raw.num_hidden_layers:
        raise ModelError(f"no_rope_layers has {len(rotates)} entries for {raw.num_hidden_layers} layers")
    window = window_of(raw, default=None) if raw.use_sliding_window else None
    types = layer_types_of(raw, lambda layer: FULL if window is None or rotates[layer] else SLIDING)
    windows = [None] * len(types) if window is None else windows_of(types, window)
    return llama_like(architecture, raw, rotating(llama_layers(raw, windows, theta=2e6), rotates))


FAMILIES = {"SmolLM3ForCausalLM": Family(SmolLM3Config, _smollm3)}

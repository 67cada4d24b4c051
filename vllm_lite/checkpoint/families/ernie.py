"""ERNIE 4.5: Llama whose rope turns neighbours, with one switch for all biases."""

from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.families.llama import LlamaConfig, full_attention, llama_layers, llama_like
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.typed_json import Size


class ErnieConfig(LlamaConfig, kw_only=True):
    num_key_value_heads: Size | None = 2
    head_dim: Size | None = 128
    tie_word_embeddings: bool = True
    use_bias: bool | None = False


def _ernie(architecture: str, raw: ErnieConfig) -> ModelSpec:
    raw.attention_bias = raw.mlp_bias = bool(raw.use_bias)
    layers = llama_layers(raw, full_attention(raw), theta=500000.0, interleaved=True)
    return llama_like(architecture, raw, layers)


FAMILIES = {"Ernie4_5ForCausalLM": Family(ErnieConfig, _ernie)}

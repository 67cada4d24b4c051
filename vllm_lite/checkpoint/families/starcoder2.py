"""StarCoder2: LayerNorms and biases, unlike Llama, ungated MLPs, often a window."""

from vllm_lite.checkpoint.families.common import Family, RawConfig, attention_of, decoder, layers_of, rope_of
from vllm_lite.checkpoint.model_spec import ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size, TokenId


class Starcoder2Config(RawConfig, kw_only=True):
    intermediate_size: Size
    num_key_value_heads: Size | None = 2
    max_position_embeddings: Size = 4096
    hidden_act: str = "gelu_pytorch_tanh"
    norm_epsilon: Positive = 1e-5
    sliding_window: Size | None = None
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 50256
    eos_token_id: TokenId | list[TokenId] | None = 50256
    use_bias: bool = True


def _starcoder2(architecture: str, raw: Starcoder2Config) -> ModelSpec:
    attention = attention_of(raw)
    rope = rope_of(raw, attention.head_size)
    return decoder(
        architecture,
        raw,
        layers_of(attention, [raw.sliding_window] * raw.num_hidden_layers, [rope] * raw.num_hidden_layers),
        NormSpec(raw.norm_epsilon, "layer", bias=True),
        raw.intermediate_size,
        gated_mlp=False,
        qkv_bias=raw.use_bias,
        output_bias=raw.use_bias,
        mlp_bias=raw.use_bias,
    )


FAMILIES = {"Starcoder2ForCausalLM": Family(Starcoder2Config, _starcoder2)}

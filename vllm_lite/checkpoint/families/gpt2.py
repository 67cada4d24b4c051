"""GPT-2 and OPT: learned positions, which bound the context by the table's rows, and biases in every layer."""

from typing import Literal

import msgspec

from vllm_lite.checkpoint.families.common import Family, OlderConfig, RawConfig, attention_of, decoder, equal_layers
from vllm_lite.checkpoint.model_spec import ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Size, TokenId
from vllm_lite.errors import ModelError

OPT_POSITION_OFFSET = 2
"""Number of rows of OPT's position table before that of position 0."""
OPT_NORM_EPS = 1e-5


class GPT2Config(OlderConfig, kw_only=True):
    max_position_embeddings: Size = 1024
    n_inner: Size | None = None
    hidden_act: str = "gelu_new"
    bos_token_id: TokenId | None = 50256
    eos_token_id: TokenId | list[TokenId] | None = 50256
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False


class OPTConfig(RawConfig, kw_only=True):
    ffn_dim: Size
    max_position_embeddings: Size = 2048
    hidden_act: str = "relu"
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenId | list[TokenId] | None = 2
    word_embed_proj_dim: Size | None = None
    enable_bias: bool = True
    do_layer_norm_before: Literal[True] = True
    layer_norm_elementwise_affine: Literal[True] = True
    remove_final_layer_norm: Literal[False] = msgspec.field(default=False, name="_remove_final_layer_norm")


def _learned(architecture: str, raw: RawConfig, eps: float, inner: int, *, offset: int, scaled: bool) -> ModelSpec:
    attention = attention_of(raw)
    if not scaled:
        attention = msgspec.structs.replace(attention, scale=1.0)
    return decoder(
        architecture,
        raw,
        equal_layers(raw, attention),
        NormSpec(eps, "layer", bias=True),
        inner,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        extra_parameters=(raw.max_position_embeddings + offset) * raw.hidden_size,
    )


def _gpt2(architecture: str, raw: GPT2Config) -> ModelSpec:
    inner = raw.n_inner or 4 * raw.hidden_size
    return _learned(architecture, raw, raw.layer_norm_epsilon, inner, offset=0, scaled=raw.scale_attn_weights)


def _opt(architecture: str, raw: OPTConfig) -> ModelSpec:
    if raw.word_embed_proj_dim not in (None, raw.hidden_size):
        raise ModelError(
            f"word_embed_proj_dim {raw.word_embed_proj_dim} is not supported; it must be hidden_size {raw.hidden_size}"
        )
    spec = _learned(architecture, raw, OPT_NORM_EPS, raw.ffn_dim, offset=OPT_POSITION_OFFSET, scaled=True)
    biases = raw.enable_bias
    return msgspec.structs.replace(spec, qkv_bias=biases, output_bias=biases, mlp_bias=biases)


FAMILIES = {
    "GPT2LMHeadModel": Family(
        GPT2Config,
        _gpt2,
        {
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
        },
    ),
    "OPTForCausalLM": Family(OPTConfig, _opt, {"activation_function": "hidden_act"}),
}

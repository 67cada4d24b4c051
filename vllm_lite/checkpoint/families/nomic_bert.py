"""nomic-bert: BERT with rope and gated MLPs, without biases on matrices. Its config.json has two spellings."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_lite.checkpoint.families.bert import BERT_HEAD
from vllm_lite.checkpoint.families.common import (
    EncoderParts,
    Family,
    RawConfig,
    attention_of,
    encoder,
    equal_layers,
    rope_of,
)
from vllm_lite.checkpoint.model_spec import EncoderSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size


class NomicBertConfig(RawConfig, kw_only=True):
    """The last keys are of the older spelling; other kinds of models set them differently."""

    intermediate_size: Size
    hidden_act: str = "silu"
    layer_norm_eps: Positive = 1e-12
    type_vocab_size: Size = 2
    rotary_emb_base: Positive | None = None
    max_trained_positions: Size | None = None
    activation_function: Literal["swiglu"] | None = None
    prenorm: Literal[False] = False
    parallel_block: Literal[False] = False
    qkv_proj_bias: Literal[False] = False
    mlp_fc1_bias: Literal[False] = False
    mlp_fc2_bias: Literal[False] = False
    use_rms_norm: Literal[False] | None = False
    rotary_emb_interleaved: Literal[False] = False
    rotary_emb_fraction: Annotated[float, Meta(ge=1, le=1)] = 1.0
    num_experts: Literal[0] = 0


def _nomic_bert(architecture: str, raw: NomicBertConfig) -> ModelSpec:
    attention = attention_of(raw)
    rope = rope_of(raw, attention.head_size, theta=raw.rotary_emb_base or 1000.0)
    longest = min(raw.max_position_embeddings, raw.max_trained_positions or raw.max_position_embeddings)
    layers = equal_layers(raw, attention, rope)
    return encoder(
        architecture,
        msgspec.structs.replace(raw, hidden_act="silu" if raw.activation_function else raw.hidden_act),
        layers,
        NormSpec(raw.layer_norm_eps, "layer", bias=True),
        EncoderParts(EncoderSpec(num_types=raw.type_vocab_size), raw.intermediate_size, BERT_HEAD),
        max_position_embeddings=longest,
    )


_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
}
FAMILIES = {
    f"NomicBert{ending}": Family(NomicBertConfig, _nomic_bert, _ALIASES)
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification")
}

"""nomic-bert: BERT with rope and gated MLPs, without biases on matrices. Its config.json has two spellings."""

from typing import Any

import msgspec

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
from vllm_lite.errors import ModelError

_MUST_BE: dict[str, Any] = {
    "prenorm": False,
    "parallel_block": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "use_rms_norm": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0,
    "num_experts": 0,
}
"""Required values of keys in the older spelling, which other kinds of models set differently."""


class NomicBertConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    hidden_act: str = "silu"
    layer_norm_eps: Positive = 1e-12
    type_vocab_size: Size = 2
    rotary_emb_base: Positive | None = None
    max_trained_positions: Size | None = None
    activation_function: str | None = None
    prenorm: bool = False
    parallel_block: bool = False
    qkv_proj_bias: bool = False
    mlp_fc1_bias: bool = False
    mlp_fc2_bias: bool = False
    use_rms_norm: bool | None = False
    rotary_emb_interleaved: bool = False
    rotary_emb_fraction: float = 1.0
    num_experts: int = 0


def _nomic_bert(architecture: str, raw: NomicBertConfig) -> ModelSpec:
    for key, wanted in _MUST_BE.items():
        if (getattr(raw, key) or wanted) != wanted:
            raise ModelError(f"{key} {getattr(raw, key)!r} is not supported; it must be {wanted!r}")
    if raw.activation_function not in (None, "swiglu"):
        raise ModelError(f"activation_function {raw.activation_function!r} is not supported; it must be 'swiglu'")
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

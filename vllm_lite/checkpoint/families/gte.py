"""GTE and its multilingual variant ("New"): BERT with rope and gated MLPs, Q, K and V in one matrix."""

from typing import Literal

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
from vllm_lite.checkpoint.layer_specs.rope import LinearScaling
from vllm_lite.checkpoint.model_spec import EncoderSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size

DEFAULT_THETA = 160_000.0


class GteConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    hidden_act: str = "gelu"
    layer_norm_eps: Positive = 1e-12
    layer_norm_type: Literal["layer_norm"] = "layer_norm"
    type_vocab_size: int = 1
    position_embedding_type: Literal["rope"] = "rope"
    logn_attention_scale: Literal[False] = False


def _gte(architecture: str, raw: GteConfig) -> ModelSpec:
    attention = attention_of(raw)
    scaling = raw.rope_scaling or {}
    is_ntk = scaling.get("type") == "ntk"
    plain = msgspec.structs.replace(raw, rope_scaling=None) if is_ntk else raw
    rope = rope_of(plain, attention.head_size, theta=DEFAULT_THETA)
    if is_ntk:  # theta is multiplied by the factor, and all frequencies divided so that the slowest is by that factor
        factor = float(scaling.get("factor", 1.0))
        slower = LinearScaling(factor ** (2 / attention.head_size))
        rope = msgspec.structs.replace(rope, theta=rope.theta * factor, scaling=slower)
    layers = equal_layers(raw, attention, rope)
    return encoder(
        architecture,
        raw,
        layers,
        NormSpec(raw.layer_norm_eps, "layer", bias=True),
        EncoderParts(EncoderSpec(num_types=max(0, raw.type_vocab_size)), raw.intermediate_size, BERT_HEAD),
        qkv_bias=True,
        output_bias=True,
    )


FAMILIES = {
    f"{stem}{ending}": Family(GteConfig, _gte)
    for stem in ("Gte", "New")
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification")
}

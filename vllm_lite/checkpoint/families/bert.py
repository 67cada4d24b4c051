"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT: learned positions, norms after the blocks, biases everywhere."""

from typing import Literal

from vllm_lite.checkpoint.families.common import EncoderParts, Family, RawConfig, attention_of, encoder, equal_layers
from vllm_lite.checkpoint.layer_specs.pooling import HeadSpec
from vllm_lite.checkpoint.model_spec import EncoderSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Positive, Size, TokenId
from vllm_lite.errors import ModelError

BERT_HEAD = HeadSpec(output="classifier", output_bias=True, dense="pooler.dense", activation="tanh")
ROBERTA_HEAD = HeadSpec(output="classifier.out_proj", output_bias=True, dense="classifier.dense", activation="tanh")


class BertConfig(RawConfig, kw_only=True):
    intermediate_size: Size
    hidden_act: str = "gelu"
    layer_norm_eps: Positive = 1e-12
    type_vocab_size: Size = 2
    pad_token_id: TokenId | None = 0
    position_embedding_type: Literal["absolute"] = "absolute"


class RobertaConfig(BertConfig, kw_only=True):
    layer_norm_eps: Positive = 1e-5
    pad_token_id: TokenId | None = 1


def encoder_like_bert(architecture: str, raw: BertConfig, offset: int, head: HeadSpec) -> ModelSpec:
    """Make the spec of an encoder. `offset`: number of rows of the position table before that of the first token."""
    longest = raw.max_position_embeddings - offset
    if longest < 1:
        raise ModelError(f"max_position_embeddings {raw.max_position_embeddings} leaves no position after {offset}")
    layers = equal_layers(raw, attention_of(raw))
    parts = EncoderParts(
        EncoderSpec(raw.max_position_embeddings, offset, raw.type_vocab_size), raw.intermediate_size, head
    )
    return encoder(
        architecture,
        raw,
        layers,
        NormSpec(raw.layer_norm_eps, "layer", bias=True),
        parts,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        max_position_embeddings=longest,
    )


def _bert(architecture: str, raw: BertConfig) -> ModelSpec:
    return encoder_like_bert(architecture, raw, 0, BERT_HEAD)


def _roberta(architecture: str, raw: RobertaConfig) -> ModelSpec:
    """Read a RoBERTa, whose positions start after the padding token's id."""
    return encoder_like_bert(architecture, raw, (raw.pad_token_id or 0) + 1, ROBERTA_HEAD)


FAMILIES = {
    f"{stem}{ending}": Family(config, read)
    for stem, config, read in (
        ("Bert", BertConfig, _bert),
        ("Roberta", RobertaConfig, _roberta),
        ("XLMRoberta", RobertaConfig, _roberta),
        ("Camembert", RobertaConfig, _roberta),
    )
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
}

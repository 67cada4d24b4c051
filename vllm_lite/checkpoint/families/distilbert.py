"""DistilBERT: BERT without token types, with its own tensor names."""

from vllm_lite.checkpoint.families.bert import BertConfig, encoder_like_bert
from vllm_lite.checkpoint.families.common import Family
from vllm_lite.checkpoint.layer_specs.pooling import HeadSpec
from vllm_lite.checkpoint.model_spec import ModelSpec

HEAD = HeadSpec(output="classifier", output_bias=True, dense="pre_classifier", activation="relu")


class DistilBertConfig(BertConfig, kw_only=True):
    type_vocab_size: int = 0


def _distilbert(architecture: str, raw: DistilBertConfig) -> ModelSpec:
    return encoder_like_bert(architecture, raw, 0, HEAD)


_ALIASES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
FAMILIES = {
    f"DistilBert{ending}": Family(DistilBertConfig, _distilbert, _ALIASES)
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
}

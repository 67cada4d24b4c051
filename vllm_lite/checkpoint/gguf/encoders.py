"""GGUF architectures of encoders: BERT and similar models. Decoders' files may have a pooling type, too."""

from typing import Any

from vllm_lite.checkpoint.gguf.architecture import Architecture
from vllm_lite.checkpoint.gguf.metadata import Metadata
from vllm_lite.checkpoint.layer_specs.pooling import Kind, SentenceModules
from vllm_lite.errors import ModelError

UNPOOLED, RANKS = 0, 4
"""Values of `pooling_type`: left to the user; a head that scores pairs."""
KINDS: dict[int, Kind] = {1: "mean", 2: "cls", 3: "last"}
TOP = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
BERT = TOP | {
    "attn_q": "encoder.layer.{layer}.attention.self.query",
    "attn_k": "encoder.layer.{layer}.attention.self.key",
    "attn_v": "encoder.layer.{layer}.attention.self.value",
    "attn_output": "encoder.layer.{layer}.attention.output.dense",
    "attn_output_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
    "ffn_up": "encoder.layer.{layer}.intermediate.dense",
    "ffn_down": "encoder.layer.{layer}.output.dense",
    "layer_output_norm": "encoder.layer.{layer}.output.LayerNorm",
}
NOMIC_BERT = TOP | {
    "token_embd_norm": "emb_ln",
    "attn_qkv": "encoder.layers.{layer}.attn.Wqkv",
    "attn_output": "encoder.layers.{layer}.attn.out_proj",
    "attn_output_norm": "encoder.layers.{layer}.norm1",
    "ffn_gate": "encoder.layers.{layer}.mlp.fc12",
    "ffn_up": "encoder.layers.{layer}.mlp.fc11",
    "ffn_down": "encoder.layers.{layer}.mlp.fc2",
    "layer_output_norm": "encoder.layers.{layer}.norm2",
}


def modules_of(of: Metadata) -> SentenceModules | None:
    """The pooling by the file's pooling_type, with normalized vectors; None if the file leaves it open. Raises
    ModelError for an unsupported type."""
    number = of.integer("pooling_type", UNPOOLED)
    if number == UNPOOLED:
        return None
    if number not in KINDS:
        kind = "that of rerankers, which GGUF files are not read with" if number == RANKS else "unknown"
        known = ", ".join(f"{number} ({kind})" for number, kind in KINDS.items())
        raise ModelError(f"{of.named('pooling_type')} {number} is {kind}; supported: {UNPOOLED} (none), {known}")
    return SentenceModules(KINDS[number], normalize=True, dense=())


def _encoder(of: Metadata) -> dict[str, Any]:
    """The number of token types, by the rows of their table."""
    return {"type_vocab_size": of.shape("token_types.weight")[0]}


def _bert(of: Metadata) -> dict[str, Any]:
    """Keys of BERT. RoBERTa's rows of positions before the first token's are not in the file."""
    return _encoder(of) | {"max_position_embeddings": of.shape("position_embd.weight")[0]}


ENCODERS = {
    "bert": Architecture("BertModel", _bert, BERT),
    "nomic-bert": Architecture("NomicBertModel", _encoder, NOMIC_BERT),
}

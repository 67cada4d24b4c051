"""BERT and its kin: RoBERTa, XLM-RoBERTa, DistilBERT; GTE and nomic-bert, with rotated heads and gated MLPs."""

from typing import ClassVar

from vllm_lite.layers.attention.attention_block import AttentionBlock, AttentionNames
from vllm_lite.layers.decoder_layer import LayerNames
from vllm_lite.layers.encoder_layer import BareFirstLayer, EncoderLayer
from vllm_lite.layers.mlp import MLP, FusedGatedMLP, GatedMLP, GatedNames, MLPNames
from vllm_lite.models.decoder import Layer
from vllm_lite.models.encoder import Encoder, EncoderNames


class BertAttention(AttentionBlock):
    names = AttentionNames(qkv=("self.query", "self.key", "self.value"), output="output.dense")


class BertMLP(MLP):
    names: ClassVar = MLPNames(up="intermediate.dense", down="output.dense")


class BertLayer(EncoderLayer):
    names: ClassVar = LayerNames(
        attention="attention", after_attention="attention.output.LayerNorm", mlp="", after_mlp="output.LayerNorm"
    )
    attention_block: ClassVar = BertAttention
    mlp_block: ClassVar = BertMLP


class Bert(Encoder):
    layer: ClassVar[type[Layer]] = BertLayer


class DistilBertAttention(AttentionBlock):
    names = AttentionNames(qkv=("q_lin", "k_lin", "v_lin"), output="out_lin")


class DistilBertMLP(MLP):
    names: ClassVar = MLPNames(up="lin1", down="lin2")


class DistilBertLayer(EncoderLayer):
    names: ClassVar = LayerNames(
        attention="attention", after_attention="sa_layer_norm", mlp="ffn", after_mlp="output_layer_norm"
    )
    attention_block: ClassVar = DistilBertAttention
    mlp_block: ClassVar = DistilBertMLP


class DistilBert(Encoder):
    names: ClassVar = EncoderNames(layer="layer.{}.")
    layer: ClassVar[type[Layer]] = DistilBertLayer


class GteAttention(AttentionBlock):
    names = AttentionNames(qkv=("qkv_proj",) * 3, output="o_proj", layout="stacked")


class GteMLP(FusedGatedMLP):
    """Up is before the gate, and only the second matrix has a bias."""

    names: ClassVar = GatedNames(gate="up_gate_proj", up="up_gate_proj")
    up_first: ClassVar = True
    down_bias: ClassVar = True


class GteLayer(EncoderLayer):
    names: ClassVar = LayerNames(attention="attention", after_attention="attn_ln", mlp="mlp", after_mlp="mlp_ln")
    attention_block: ClassVar = GteAttention
    mlp_block: ClassVar = GteMLP


class Gte(Encoder):
    layer: ClassVar[type[Layer]] = GteLayer


class NomicAttention(AttentionBlock):
    names = AttentionNames(qkv=("Wqkv",) * 3, output="out_proj", layout="stacked")


class NomicMLP(GatedMLP):
    names: ClassVar = GatedNames(gate="fc12", up="fc11", down="fc2")


class NomicLayer(EncoderLayer):
    names: ClassVar = LayerNames(attention="attn", after_attention="norm1", mlp="mlp", after_mlp="norm2")
    attention_block: ClassVar = NomicAttention
    mlp_block: ClassVar = NomicMLP


class NomicBert(Encoder):
    names: ClassVar = EncoderNames(embedding_norm="emb_ln", layer="encoder.layers.{}.")
    layer: ClassVar[type[Layer]] = NomicLayer


class ModernAttention(AttentionBlock):
    names = AttentionNames(qkv=("Wqkv",) * 3, output="Wo", layout="stacked")


class ModernMLP(FusedGatedMLP):
    names: ClassVar = GatedNames(gate="Wi", up="Wi", down="Wo")


class ModernLayer(BareFirstLayer):
    names: ClassVar = LayerNames(attention_norm="attn_norm", attention="attn", mlp_norm="mlp_norm")
    attention_block: ClassVar = ModernAttention
    mlp_block: ClassVar = ModernMLP


class ModernBert(Encoder):
    names: ClassVar = EncoderNames(
        embedding="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        layer="model.layers.{}.",
        norm="model.final_norm",
    )
    layer: ClassVar[type[Layer]] = ModernLayer

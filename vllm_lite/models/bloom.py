"""BLOOM, Falcon and GPT-NeoX (Pythia): one tensor holds Q, K and V grouped by KV head."""

from collections.abc import Iterator
from typing import ClassVar

from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.layers.attention.attention_block import AttentionBlock, AttentionNames
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames, ParallelLayer
from vllm_lite.layers.mlp import MLP, MLPNames
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup
from vllm_lite.models.decoder import Decoder, DecoderNames, Layer


class FusedAttention(AttentionBlock):
    names = AttentionNames(qkv=("query_key_value",) * 3, output="dense", layout="by head")


class WidenedMLP(MLP):
    names: ClassVar = MLPNames(up="dense_h_to_4h", down="dense_4h_to_h")


class BloomLayer(DecoderLayer):
    """Layer of BLOOM, and of early Falcons without parallel blocks."""

    names: ClassVar = LayerNames(attention="self_attention")
    attention_block: ClassVar = FusedAttention
    mlp_block: ClassVar = WidenedMLP


class FalconLayer(ParallelLayer):
    names: ClassVar = LayerNames(attention="self_attention", mlp_norm="")
    attention_block: ClassVar = FusedAttention
    mlp_block: ClassVar = WidenedMLP


class TwoNormFalconLayer(FalconLayer):
    names: ClassVar = LayerNames(attention_norm="ln_attn", attention="self_attention", mlp_norm="ln_mlp")


class GPTNeoXLayer(BloomLayer):
    names: ClassVar = LayerNames(attention="attention")


class ParallelGPTNeoXLayer(ParallelLayer):
    names: ClassVar = LayerNames(attention="attention")
    attention_block: ClassVar = FusedAttention
    mlp_block: ClassVar = WidenedMLP


class Bloom(Decoder):
    """BLOOM also norms the token embeddings."""

    names: ClassVar = DecoderNames(layer="h.{}.", norm="ln_f")
    layer: ClassVar[type[Layer]] = BloomLayer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        self.embedding_norm = parts.norm()

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        super().embed(batch, rows)
        self.embedding_norm.forward(rows.residual, out=rows.residual)

    def embedding_groups(self) -> Iterator[WeightGroup]:
        yield self.embedding_norm.group("word_embeddings_layernorm")
        yield from super().embedding_groups()


class Falcon(Decoder):
    names: ClassVar = DecoderNames(layer="h.{}.", norm="ln_f")

    def make_layer(self, parts: Parts, index: int) -> Layer:
        if not self.spec.parallel_blocks:
            return BloomLayer(parts, index)
        return FalconLayer(parts, index) if self.spec.norms_per_layer == 1 else TwoNormFalconLayer(parts, index)


class GPTNeoX(Decoder):
    names: ClassVar = DecoderNames(norm="model.final_layer_norm")

    def make_layer(self, parts: Parts, index: int) -> Layer:
        return ParallelGPTNeoXLayer(parts, index) if self.spec.parallel_blocks else GPTNeoXLayer(parts, index)

"""GPT-2 and OPT, with learned position embeddings."""

from collections.abc import Iterator
from typing import ClassVar

from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.families.gpt2 import OPT_POSITION_OFFSET
from vllm_lite.errors import ConfigError
from vllm_lite.layers.attention.attention_block import AttentionBlock, AttentionNames
from vllm_lite.layers.attention.learned_positions import LearnedPositions
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer, LayerNames
from vllm_lite.layers.mlp import MLP, MLPNames
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup
from vllm_lite.models.decoder import Decoder, DecoderNames, Layer


class GPT2Attention(AttentionBlock):
    names = AttentionNames(qkv=("c_attn",) * 3, output="c_proj", layout="stacked")
    transposed = True


class GPT2MLP(MLP):
    names: ClassVar = MLPNames(up="c_fc", down="c_proj")
    transposed: ClassVar = True


class GPT2Layer(DecoderLayer):
    names: ClassVar = LayerNames(attention_norm="ln_1", attention="attn", mlp_norm="ln_2")
    attention_block: ClassVar = GPT2Attention
    mlp_block: ClassVar = GPT2MLP


class GPT2(Decoder):
    """GPT-2, whose matrices are stored as [inputs, outputs]."""

    names: ClassVar = DecoderNames(layer="h.{}.", norm="ln_f")
    layer: ClassVar[type[Layer]] = GPT2Layer
    position_offset: ClassVar = 0

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        super().__init__(parts, max_model_len, max_num_tokens)
        if max_model_len > parts.spec.max_position_embeddings:
            raise ConfigError(
                f"max_model_len must be at most the {parts.spec.max_position_embeddings} positions that the model has "
                f"learned, got {max_model_len}"
            )
        self.positions = LearnedPositions(parts, self.position_offset)

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        super().embed(batch, rows)
        self.positions.add_to(rows.residual, batch.positions)

    def embedding_groups(self) -> Iterator[WeightGroup]:
        yield self.positions.group("model.embed_positions")
        yield from super().embedding_groups()


class OPTAttention(AttentionBlock):
    names = AttentionNames(output="out_proj")


class OPTMLP(MLP):
    names: ClassVar = MLPNames(up="fc1", down="fc2")


class OPTLayer(DecoderLayer):
    names: ClassVar = LayerNames(attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm", mlp="")
    attention_block: ClassVar = OPTAttention
    mlp_block: ClassVar = OPTMLP


class OPT(GPT2):
    """OPT. Its table of positions has two more rows, which its first training code used for padding."""

    names: ClassVar = DecoderNames(norm="model.final_layer_norm")
    layer: ClassVar[type[Layer]] = OPTLayer
    position_offset: ClassVar = OPT_POSITION_OFFSET

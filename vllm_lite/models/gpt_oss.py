"""gpt-oss: Llama's layers with experts, whose matrices have biases. The rest is in the ModelSpec."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.mlp import GatedNames
from vllm_lite.layers.moe.experts import SparseMLP, SparseNames
from vllm_lite.models.decoder import Decoder, Layer


class GptOssExperts(SparseMLP):
    names: ClassVar = SparseNames(
        fused=GatedNames("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj", in_turn=True),
        transposed=True,
    )


class GptOssLayer(DecoderLayer):
    sparse_block: ClassVar = GptOssExperts


class GptOss(Decoder):
    layer: ClassVar[type[Layer]] = GptOssLayer

"""OpenAI's privacy filter: an encoder of gpt-oss's layers, in whose experts the gate is before up."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.moe.experts import SparseMLP, SparseNames
from vllm_lite.models.decoder import Layer
from vllm_lite.models.encoder import Encoder, EncoderNames


class PrivacyFilterExperts(SparseMLP):
    names: ClassVar = SparseNames(transposed=True)


class PrivacyFilterLayer(DecoderLayer):
    sparse_block: ClassVar = PrivacyFilterExperts


class PrivacyFilter(Encoder):
    names: ClassVar = EncoderNames(
        embedding="model.embed_tokens", embedding_norm="", layer="model.layers.{}.", norm="model.norm"
    )
    layer: ClassVar[type[Layer]] = PrivacyFilterLayer

"""ERNIE 4.5 with experts: Llama, with a differently stored bias for the choice of experts."""

from typing import ClassVar

from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.moe.experts import SparseMLP, SparseNames
from vllm_lite.models.decoder import Decoder, Layer


class ErnieExperts(SparseMLP):
    names: ClassVar = SparseNames(bias_in_row=True)


class ErnieMoeLayer(DecoderLayer):
    sparse_block: ClassVar = ErnieExperts


class ErnieMoe(Decoder):
    layer: ClassVar[type[Layer]] = ErnieMoeLayer

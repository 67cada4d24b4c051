"""Phi-3 and Phi-4: Llama with fused tensors for Q, K and V, and for gate and up."""

from vllm_lite.layers.attention.attention_block import AttentionBlock, AttentionNames
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.mlp import FusedGatedMLP
from vllm_lite.models.decoder import Decoder


class Phi3Attention(AttentionBlock):
    names = AttentionNames(qkv=("qkv_proj",) * 3, layout="stacked")


class Phi3Layer(DecoderLayer):
    attention_block = Phi3Attention
    mlp_block = FusedGatedMLP


class Phi3(Decoder):
    layer = Phi3Layer

"""HunYuan's dense models: Llama with norms of Q and K after their rotation."""

from dataclasses import replace

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.layers.attention.attention_block import AttentionBlock, AttentionNames
from vllm_lite.layers.buffers import HeadRows
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.models.decoder import Decoder


class HunYuanAttention(AttentionBlock):
    """Attention that rotates and norms heads itself, instead of letting the backend rotate them."""

    names = AttentionNames(query_norm="query_layernorm", key_norm="key_layernorm")

    def later_norms(self, own: HeadRows, backend: AttentionBackend) -> None:
        """Return None: the backend would apply norms before the rotation."""

    def make_heads(self, x: torch.Tensor, own: HeadRows) -> None:
        """Compute Q, K and V, rotated and normed."""
        self.qkv.forward(x, out=own.qkv)
        if (rotation := own.heads.rotation) is not None:
            self.ops.rotate(own.heads.query, rotation)
            self.ops.rotate(own.heads.key, rotation)
        if self.qk_norm is not None:
            self.qk_norm.forward(own)

    def rotate_and_keep(self, own: HeadRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """Write K and V to the cache."""
        backend.write_kv(replace(own.heads, rotation=None), kv, batch, self.group, self.kv_scales)


class HunYuanLayer(DecoderLayer):
    attention_block = HunYuanAttention


class HunYuan(Decoder):
    layer = HunYuanLayer

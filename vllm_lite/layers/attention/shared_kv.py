"""Attention whose V is normed, or equals the projected K, or that attends to K and V of another layer."""

from collections.abc import Iterator

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.ops import WideNormWeights
from vllm_lite.layers.attention.attention_block import AttentionBlock
from vllm_lite.layers.attention.qkv_layout import QKVSplits
from vllm_lite.layers.buffers import HeadRows
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup


class SharedKVBlock(AttentionBlock):
    """AttentionBlock with norms over each head of Q, and of K if the layer has its own."""

    def make_projections(self, parts: Parts, layer: int, splits: QKVSplits) -> None:
        spec, own = parts.spec, parts.spec.layers[layer]
        self.has_kv, self.values_are_keys = own.kv_layer is None, own.values_are_keys
        projected = splits[: 1 if not self.has_kv else 2 if self.values_are_keys else 3]
        self.qkv = parts.linear(Split.whole(spec.hidden_size), *projected, bias=spec.qkv_bias)
        self.qk_norm = None  # replaced by the norms below
        self.width = sum(split.size for split in projected)
        self.num_projections = len(projected)
        self.query_norm = parts.norm(self.head_size)
        self.key_norm = parts.norm(self.head_size) if self.has_kv else None
        ones = torch.ones(self.head_size, device=parts.device)
        self.value_norm = WideNormWeights(ones, None, spec.norm.eps, centered=False) if spec.value_norm else None

    def make_heads(self, x: torch.Tensor, own: HeadRows) -> None:
        """Compute V before K is normed in place, as V may be a copy of the projected K."""
        heads = own.heads
        self.qkv.forward(x, out=own.qkv[:, : self.width])
        self.query_norm.forward(heads.query, out=heads.query)
        if self.key_norm is None:
            return
        if self.value_norm is not None:
            self.ops.wide_norm(heads.key if self.values_are_keys else heads.value, self.value_norm, heads.value)
        elif self.values_are_keys:
            heads.value.copy_(heads.key)
        self.key_norm.forward(heads.key, out=heads.key)

    def rotate_and_keep(self, own: HeadRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See AttentionBlock.rotate_and_keep; K and V of another layer are in the cache already."""
        if self.has_kv:
            super().rotate_and_keep(own, kv, batch, backend)
        elif own.heads.rotation is not None:
            self.ops.rotate(own.heads.query, own.heads.rotation)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        names = self.names
        yield self.qkv.group(*(f"{prefix}{name}" for name in names.qkv[: self.num_projections]))
        yield self.query_norm.group(f"{prefix}{names.query_norm}", self.order)
        if self.key_norm is not None:
            yield self.key_norm.group(f"{prefix}{names.key_norm}", self.order)
        yield self.output.group(f"{prefix}{names.output}")

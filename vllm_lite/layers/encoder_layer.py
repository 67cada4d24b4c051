"""Encoder layers: the orders in which they combine norms, attention and MLP; see decoder_layer.py for decoders."""

from collections.abc import Iterator
from typing import ClassVar

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.decoder_layer import AttendingLayer, DecoderLayer
from vllm_lite.layers.mlp import MLP, GatedMLP
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup


class EncoderLayer(AttendingLayer):
    """Attention and MLP, each added to its input, with a norm over the sum: norm(x + f(x)), as in BERT.

    `names` has the norms as `after_attention` and `after_mlp`. The layer's output is in rows.residual.
    """

    mlp_block: ClassVar[type[GatedMLP] | type[MLP]] = MLP

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.mlp = self.mlp_block(parts)
        self.attention_norm, self.mlp_norm = parts.norm(), parts.norm()

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See DecoderLayer.write."""
        self.attention.write(rows.residual, rows, kv, batch, backend)

    def combine(self, rows: StepRows) -> None:
        """See DecoderLayer.combine."""
        self.attention.project(rows)
        self.attention_norm.add_forward(rows.residual, rows.hidden, out=rows.residual)
        self.mlp.forward(rows.residual, rows)
        self.mlp_norm.add_forward(rows.residual, rows.hidden, out=rows.residual)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "encoder.layer.0."."""
        names = self.names
        yield from self.attention.weight_groups(f"{prefix}{names.attention}.")
        yield self.attention_norm.group(f"{prefix}{names.after_attention}")
        yield from self.mlp.weight_groups(f"{prefix}{names.mlp}." if names.mlp else prefix)
        yield self.mlp_norm.group(f"{prefix}{names.after_mlp}")


class BareFirstLayer(DecoderLayer):
    """A norm before each block, except the first layer's attention, whose input has just been normed."""

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See DecoderLayer.write."""
        if not self.first:
            super().write(rows, kv, batch, backend)
            return
        self.attention.write(rows.residual, rows, kv, batch, backend)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """See DecoderLayer.weight_groups."""
        groups = super().weight_groups(prefix)
        if self.first:
            next(groups)  # the norm's group
        yield from groups

"""Decoder layers: the orders in which they combine norms, attention and MLP. A model family names their tensors.

`rows.residual` is the residual stream; `rows.hidden` is a block's output, which the next norm adds to the stream. All
layers have three parts: `write` runs for every token; in the last layers, `attend` and `combine` may run only for the
rows whose hidden states are wanted.
"""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.attention_block import Attention, AttentionBlock
from vllm_lite.layers.buffers import StepRows
from vllm_lite.layers.mlp import MLP, GatedMLP
from vllm_lite.layers.moe.experts import SparseMLP
from vllm_lite.layers.norm import Norm
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_slot import WeightGroup


class LayerNames(NamedTuple):
    """A checkpoint's names for the parts of a layer."""

    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    after_attention: str = ""
    """Norm of attention's output, if there is one."""
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    """Empty if the names of the MLP's matrices have no prefix within the layer."""
    after_mlp: str = ""


class AttendingLayer:
    """The part that layers with attention, or with a recurrent block in its place, have in common."""

    names: ClassVar = LayerNames()
    attention_block: ClassVar[type[Attention]] = AttentionBlock

    def __init__(self, parts: Parts, layer: int) -> None:
        self.first = layer == 0
        self.ops = ops_for(parts.device)
        self.attention = self.attention_block(parts, layer)

    def attend(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """Compute attention of all tokens of `write`, or of some of them as a batch of their own."""
        self.attention.attend(rows, kv, batch, backend)


class AttentionLayer(AttendingLayer):
    """Attention without an MLP: x + attend(norm(x))."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.input_norm = parts.norm()

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """Run the part for every token: add rows.hidden, the previous layer's output, to rows.residual (not in the
        first layer), and write K and V."""
        norm_input(self.input_norm, rows, first=self.first)
        self.attention.write(rows.hidden, rows, kv, batch, backend)

    def combine(self, rows: StepRows) -> None:
        """Run the rest of the layer for these rows. rows.hidden becomes the last block's output, still to be added."""
        self.attention.project(rows)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """Weights in a checkpoint under `prefix`, like "model.layers.0."."""
        yield self.input_norm.group(f"{prefix}{self.names.attention_norm}")
        yield from self.attention.weight_groups(f"{prefix}{self.names.attention}.")


class DecoderLayer(AttentionLayer):
    """Attention and MLP, each after a norm and added to the residual stream: x + f(norm(x))."""

    mlp_block: ClassVar[type[GatedMLP] | type[MLP]] = GatedMLP
    sparse_block: ClassVar[type[SparseMLP]] = SparseMLP
    """Block that replaces the MLP in a layer with experts."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.mlp_norm = parts.norm()
        self.mlp = make_mlp(parts, layer, self.mlp_block, self.sparse_block)

    def combine(self, rows: StepRows) -> None:
        self.attention.project(rows)
        self.after_attention(rows)
        self.mlp_norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)
        self.mlp.forward(rows.hidden, rows)
        self.after_mlp(rows)

    def after_attention(self, rows: StepRows) -> None:
        """Change attention's output in rows.hidden before it is added."""

    def after_mlp(self, rows: StepRows) -> None:
        """Change the MLP's output in rows.hidden before it is added."""

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        yield from super().weight_groups(prefix)
        yield self.mlp_norm.group(f"{prefix}{self.names.mlp_norm}")
        yield from self.mlp.weight_groups(f"{prefix}{self.names.mlp}." if self.names.mlp else prefix)


class SandwichLayer(DecoderLayer):
    """A norm before and one after each block: x + norm(f(norm(x)))."""

    names: ClassVar = LayerNames(
        after_attention="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.attention_output_norm, self.mlp_output_norm = parts.norm(), parts.norm()

    def after_attention(self, rows: StepRows) -> None:
        self.attention_output_norm.forward(rows.hidden, out=rows.hidden)

    def after_mlp(self, rows: StepRows) -> None:
        self.mlp_output_norm.forward(rows.hidden, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        yield from super().weight_groups(prefix)
        yield self.attention_output_norm.group(f"{prefix}{self.names.after_attention}")
        yield self.mlp_output_norm.group(f"{prefix}{self.names.after_mlp}")


class PostNormLayer(AttendingLayer):
    """Norms after the blocks only: x + norm(f(x))."""

    names: ClassVar = LayerNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.mlp = GatedMLP(parts)
        self.attention_output_norm, self.mlp_output_norm = parts.norm(), parts.norm()

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """See AttentionLayer.write."""
        if not self.first:
            self.ops.add(rows.residual, rows.hidden)
        self.attention.write(rows.residual, rows, kv, batch, backend)

    def combine(self, rows: StepRows) -> None:
        """See AttentionLayer.combine."""
        self.attention.project(rows)
        self.attention_output_norm.forward(rows.hidden, out=rows.hidden)
        self.ops.add(rows.residual, rows.hidden)
        self.mlp.forward(rows.residual, rows)
        self.mlp_output_norm.forward(rows.hidden, out=rows.hidden)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """See AttentionLayer.weight_groups."""
        yield from self.attention.weight_groups(f"{prefix}{self.names.attention}.")
        yield self.attention_output_norm.group(f"{prefix}{self.names.after_attention}")
        yield from self.mlp.weight_groups(f"{prefix}{self.names.mlp}.")
        yield self.mlp_output_norm.group(f"{prefix}{self.names.after_mlp}")


class ParallelLayer(AttentionLayer):
    """Attention and MLP read the same residual stream and are added together: x + attend(norm(x)) + mlp(norm(x)).

    They share one norm, unless `names` has one for the MLP.
    """

    names: ClassVar = LayerNames(mlp_norm="")
    mlp_block: ClassVar[type[GatedMLP] | type[MLP]] = GatedMLP

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)
        self.mlp_norm = parts.norm() if self.names.mlp_norm else self.input_norm
        self.mlp = self.mlp_block(parts)

    def combine(self, rows: StepRows) -> None:
        """See AttentionLayer.combine. Computes the norm again, as only the residual stream of these rows was kept."""
        self.mlp_norm.forward(rows.residual, out=rows.hidden)
        self.mlp.forward(rows.hidden, rows)
        self.ops.add(rows.residual, rows.hidden)
        self.attention.project(rows)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        yield from super().weight_groups(prefix)
        if self.names.mlp_norm:
            yield self.mlp_norm.group(f"{prefix}{self.names.mlp_norm}")
        yield from self.mlp.weight_groups(f"{prefix}{self.names.mlp}.")


class MLPLayer:
    """An MLP or experts, without attention: x + mlp(norm(x))."""

    names: ClassVar = LayerNames(mlp_norm="input_layernorm")
    mlp_block: ClassVar[type[GatedMLP] | type[MLP]] = GatedMLP
    sparse_block: ClassVar[type[SparseMLP]] = SparseMLP
    attention: None = None

    def __init__(self, parts: Parts, layer: int) -> None:
        self.first = layer == 0
        self.norm = parts.norm()
        self.mlp = make_mlp(parts, layer, self.mlp_block, self.sparse_block)

    def write(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """Do nothing: there is no attention."""

    def attend(self, rows: StepRows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """Do nothing: there is no attention."""

    def combine(self, rows: StepRows) -> None:
        """See AttentionLayer.combine."""
        norm_input(self.norm, rows, first=self.first)
        self.mlp.forward(rows.hidden, rows)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """See AttentionLayer.weight_groups."""
        yield self.norm.group(f"{prefix}{self.names.mlp_norm}")
        yield from self.mlp.weight_groups(f"{prefix}{self.names.mlp}.")


def norm_input(norm: Norm, rows: StepRows, *, first: bool) -> None:
    """rows.hidden becomes the norm of the residual stream, to which the previous layer's output in rows.hidden is
    added before, unless the layer is the `first`."""
    if first:
        norm.forward(rows.residual, out=rows.hidden)
    else:
        norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)


def make_mlp(
    parts: Parts, layer: int, dense: type[GatedMLP] | type[MLP], sparse: type[SparseMLP]
) -> GatedMLP | MLP | SparseMLP:
    """The layer's MLP, or its experts if it has some."""
    own = parts.spec.layers[layer]
    return dense(parts, own.intermediate_size) if own.experts is None else sparse(parts, own.experts)

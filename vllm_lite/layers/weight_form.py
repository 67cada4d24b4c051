"""How the weights of linear layers are stored in a checkpoint: the seam for quantized checkpoints.

A form names the tensors that it takes and makes of them what multiplies. To add one is to write a class here, and to
choose it in `models.registry.build` by what the checkpoint says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.matmul import Matmul, Quantization, copies, make_matmul, packs
from vllm_lite.layers.weight_slot import WeightSlot, WeightStack


class LinearShape(NamedTuple):
    """The weight of one or more projections of the same input, stacked by outputs: [sum of outputs, inputs]."""

    inputs: Split
    outputs: tuple[Split, ...]
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False
    """Whether the checkpoint stores [inputs, outputs]."""
    stacked: tuple[int, int] | None = None
    """As WeightSlot's."""

    def slot(self, name: str, rows: Split) -> WeightSlot:
        """The part of the matrix `name` that this rank holds of one projection."""
        inputs = self.inputs
        start, size = (rows.start, inputs.start), (rows.size, inputs.size)
        return WeightSlot(name, (rows.total, inputs.total), start, size, rows.order, self.transposed, self.stacked)


class WeightForm(Protocol):
    """One way to store the weight of a linear layer, or of one expert."""

    def stacks(self, names: Sequence[str], shape: LinearShape) -> tuple[WeightStack, ...]:
        """The tensors that the checkpoint has for the projections of these names, without their biases."""
        ...

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        """`tensors`: one for each of `stacks`, which may be lent; bias: [sum of outputs], which may be kept."""
        ...


@dataclass(frozen=True, slots=True)
class DenseForm:
    """One matrix for each projection, `<name>.weight`: [outputs, inputs]; in memory it may become int8. Where several
    are stacked their tensor is called `<name>`."""

    quantization: Quantization | None = None

    def stacks(self, names: Sequence[str], shape: LinearShape) -> tuple[WeightStack, ...]:
        ending = ".weight" if shape.stacked is None else ""
        slots = tuple(shape.slot(f"{name}{ending}", rows) for name, rows in zip(names, shape.outputs, strict=True))
        kind = shape.dtype, shape.device
        return (WeightStack(slots, *kind, lent=copies(*kind), packed_as=packs(*kind, self.quantization)),)

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        return make_matmul(tensors[0], bias, self.quantization)


DENSE = DenseForm()

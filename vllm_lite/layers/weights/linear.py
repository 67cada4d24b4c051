"""Linear layers over [out_features, in_features] weights, with several checkpoint tensors fused by rows."""

from collections.abc import Sequence

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.weights.matmul import Matmul
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape, StoredWeight, WeightForm
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack
from vllm_lite.parallel.communicator import Communicator


class Linear:
    """out = x W^T + b, for one or more projections of the same input stacked into one matrix product.

    The shape has one Split of outputs per fused projection (Q, K and V; gate and up): splitting them over ranks makes
    the layer column parallel.
    """

    matmul: Matmul  # by `load`
    stored: StoredWeight  # by `group`

    def __init__(self, shape: LinearShape, *, bias: bool, form: WeightForm = DENSE, adds_bias: bool = True) -> None:
        """`adds_bias`: False on a rank whose partial sum lacks the bias, because another rank adds it."""
        self.shape = shape
        self.bias = bias
        self.form = form
        self.adds_bias = adds_bias

    def load(self, *tensors: torch.Tensor) -> None:
        """Take the tensors that `group` requested; the last is the bias, if there is one: [sum of out_features], or [0]
        on a rank that does not add it."""
        weight, bias = (tensors[:-1], tensors[-1]) if self.bias else (tensors, None)
        self.matmul = self.stored.matmul(weight, bias if bias is not None and bias.numel() else None)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [num_tokens, in_features], out: [num_tokens, sum of out_features]."""
        self.matmul.forward(x, out)

    def group(self, *names: str) -> WeightGroup:
        """Request the checkpoint tensors of the fused projections, named in their order; biases are `<name>.bias`, or
        `<name>_bias` if several are in one tensor."""
        self.stored = self.form.stored(names, self.shape)
        stacks = self.stored.stacks
        if self.bias:
            ending, stacked = ".bias" if self.shape.stacked is None else "_bias", self.shape.stacked
            biases = (
                WeightSlot(f"{name}{ending}", (part.total,), (part.start,), (part.size,), part.order, stacked=stacked)
                for name, part in zip(names, self.bias_parts(), strict=True)
            )
            stacks += (WeightStack(tuple(biases), self.shape.dtype, self.shape.device),)
        return WeightGroup(stacks, self.load)

    def bias_parts(self) -> Sequence[Split]:
        """Part of each projection's bias that this rank adds, empty if another rank does."""
        outputs = self.shape.outputs
        return outputs if self.adds_bias else tuple(Split(part.total, 0, 0) for part in outputs)


class RowParallelLinear(Linear):
    """A Linear whose inputs are split over the ranks. Each computes partial sums of all outputs, which are added up.

    Rank 0 adds the whole bias. Partial sums are rounded to the dtype before they are added. With int8 weights each rank
    computes scales of all outputs from its own inputs, so results depend slightly on the number of ranks.
    """

    def __init__(self, shape: LinearShape, communicator: Communicator, *, bias: bool, form: WeightForm = DENSE) -> None:
        super().__init__(shape, bias=bias, form=form, adds_bias=communicator.shard.rank == 0)
        self.communicator = communicator

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See Linear.forward; x: [num_tokens, this rank's in_features]. `out`: contiguous, the same on all ranks."""
        self.matmul.forward(x, out)
        self.communicator.all_reduce(out)

"""Linear layers over [out_features, in_features] weights, with several checkpoint tensors fused by rows."""

from collections.abc import Sequence

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.matmul import Matmul
from vllm_lite.layers.weight_form import DENSE, LinearShape, WeightForm
from vllm_lite.layers.weight_slot import WeightGroup, WeightSlot, WeightStack


class Linear:
    """out = x W^T + b, for one or more projections of the same input stacked into one matrix product.

    `outputs` has one Split per fused projection (Q, K and V; gate and up): splitting them over ranks makes the layer
    column parallel. Splitting `inputs` makes it row parallel: its outputs are then partial sums, to be added up over
    the ranks, and only rank 0 may add the bias.
    """

    matmul: Matmul  # by `load`

    def __init__(
        self,
        inputs: Split,
        outputs: Sequence[Split],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightForm = DENSE,
    ) -> None:
        self.shape = LinearShape(inputs, tuple(outputs), dtype, device)
        self.bias = bias
        self.form = form

    def load(self, *tensors: torch.Tensor) -> None:
        """The tensors of the weight's form, then, if there is one, the bias: [sum of out_features]."""
        weight, bias = (tensors[:-1], tensors[-1]) if self.bias else (tensors, None)
        self.matmul = self.form.matmul(weight, bias)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [num_tokens, in_features], out: [num_tokens, sum of out_features]."""
        self.matmul.forward(x, out)

    def group(self, *names: str) -> WeightGroup:
        """The checkpoint tensors of the fused projections, named in their order; the biases are `<name>.bias`."""
        stacks = self.form.stacks(names, self.shape)
        if self.bias:
            biases = (
                WeightSlot(f"{name}.bias", (rows.total,), (rows.start,), (rows.size,))
                for name, rows in zip(names, self.shape.outputs, strict=True)
            )
            stacks += (WeightStack(tuple(biases), self.shape.dtype, self.shape.device),)
        return WeightGroup(stacks, self.load)

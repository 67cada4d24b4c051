"""Linear layers over [out_features, in_features] weights, with several checkpoint tensors fused by rows."""

from collections.abc import Sequence
from functools import partial

import torch

from vllm_lite.layers.weight_form import Quantization, WeightForm, copies, weight_form
from vllm_lite.layers.weight_slot import Split, WeightGroup, WeightSlot


class Linear:
    """out = x W^T + b, for one or more projections of the same input stacked into one matrix product.

    `outputs` has one Split per fused projection (Q, K and V; gate and up): splitting them over ranks makes the layer
    column parallel. Splitting `inputs` makes it row parallel: its outputs are then partial sums, to be added up over
    the ranks, and only rank 0 may add the bias.
    """

    form: WeightForm  # by `load`

    def __init__(
        self, inputs: Split, outputs: Sequence[Split], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.inputs = inputs
        self.outputs = tuple(outputs)
        self.bias = bias
        self.dtype = dtype
        self.device = device

    def load(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: Quantization | None = None
    ) -> None:
        """weight: [sum of out_features, in_features], bias: [sum of out_features]; kept in the form that multiplies
        fastest."""
        self.form = weight_form(weight, bias, quantization)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [num_tokens, in_features], out: [num_tokens, sum of out_features]."""
        self.form.forward(x, out)

    def group(self, *names: str, quantization: Quantization | None = None) -> WeightGroup:
        """The checkpoint tensors `<name>.weight` and `<name>.bias` of the fused projections, named in their order."""
        inputs, weights, biases = self.inputs, [], []
        for name, rows in zip(names, self.outputs, strict=True):
            shape, start, size = (rows.total, inputs.total), (rows.start, inputs.start), (rows.size, inputs.size)
            weights.append(WeightSlot(f"{name}.weight", shape, start, size))
            if self.bias:
                biases.append(WeightSlot(f"{name}.bias", shape[:1], start[:1], size[:1]))
        lent = copies(self.dtype, self.device)
        take = partial(self.load, quantization=quantization)
        return WeightGroup(tuple(weights), tuple(biases), self.dtype, self.device, lent, take)

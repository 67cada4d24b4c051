"""Linear layers over [out_features, in_features] weights, with several checkpoint tensors fused by rows."""

from collections.abc import Sequence

import torch

from vllm_lite.layers.weight_form import DenseForm, Quantization, WeightForm, weight_form
from vllm_lite.layers.weight_slot import Split, WeightSlot


class Linear:
    """out = x W^T + b, for one or more projections of the same input stacked into one matrix product.

    `outputs` has one Split per fused projection (Q, K and V; gate and up): splitting them over ranks makes the layer
    column parallel. Splitting `inputs` makes it row parallel: its outputs are then partial sums, to be added up over
    the ranks, and only rank 0 may add the bias.
    """

    def __init__(
        self, inputs: Split, outputs: Sequence[Split], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.inputs = inputs
        self.outputs = tuple(outputs)
        rows = sum(output.size for output in outputs)
        self.weight = torch.empty(rows, inputs.size, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self.form: WeightForm = DenseForm(self.weight, self.bias)

    def finish_loading(self, quantization: Quantization | None = None) -> None:
        """Trade the loaded weight for the form that multiplies fastest; nothing can be loaded afterwards."""
        self.form = weight_form(self.weight, self.bias, quantization)
        self.weight, self.bias = self.weight.new_empty(0), None

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [num_tokens, in_features], out: [num_tokens, sum of out_features]."""
        self.form.forward(x, out)

    def slots(self, *names: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors `<name>.weight` and `<name>.bias` of the fused projections, named in their order."""
        slots = {}
        row = 0
        for name, output in zip(names, self.outputs, strict=True):
            rows = slice(row, row + output.size)
            row += output.size
            shape, start = (output.total, self.inputs.total), (output.start, self.inputs.start)
            slots[f"{name}.weight"] = WeightSlot(self.weight[rows], shape, start)
            if self.bias is not None:
                slots[f"{name}.bias"] = WeightSlot(self.bias[rows], shape[:1], start[:1])
        return slots

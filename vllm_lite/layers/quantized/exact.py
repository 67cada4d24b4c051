"""Products that do not round their rows: for quantized weights on a CPU with `--exact-activations` or float32.

On machines with byte products, products with integers also round rows to 8 bits (csrc/cpu/linear.h). That gives most of
the speed, and a part of the error that depends on the model: one with a few large channels loses the most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_lite.layers.quantized.stored import QuantizedWeight
from vllm_lite.layers.weights.matmul import Matmul, keep_rows
from vllm_lite.layers.weights.weight_form import LinearShape, StoredWeight, WrappedForm, WrappedWeight


@dataclass(frozen=True, slots=True)
class ExactForm(WrappedForm):
    """Products do not round their rows."""

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        stored = self.form.stored(names, shape)
        if isinstance(stored, QuantizedWeight):  # on a GPU
            stored = replace(stored, float8_rows=False)
        return ExactWeight(stored)


@dataclass(frozen=True, slots=True)
class ExactWeight(WrappedWeight):
    """A weight whose product does not round its rows."""

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        return keep_rows(self.stored.matmul(tensors, bias))

"""Weights of any form that are quantized differently on loading, for a copy of a model that drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.layers.weights.matmul import Matmul, make_matmul
from vllm_lite.layers.weights.weight_form import LinearShape, StoredWeight, WeightForm
from vllm_lite.layers.weights.weight_slot import WeightStack


@dataclass(frozen=True, slots=True)
class RequantizedForm:
    """Wraps another form; its matrices are dequantized and then quantized to `quantization`, one at a time."""

    form: WeightForm
    quantization: Form

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        return RequantizedWeight(self.form.stored(names, shape), self.quantization)

    def quantizes(self, name: str) -> bool:
        return self.form.quantizes(name)


@dataclass(frozen=True, slots=True)
class RequantizedWeight:
    """Wraps another weight, which is quantized again."""

    stored: StoredWeight
    quantization: Form

    @property
    def stacks(self) -> tuple[WeightStack, ...]:
        return self.stored.stacks

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        return make_matmul(self.dense(tensors), bias, self.quantization)

    def dense(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.stored.dense(tensors)

"""bitsandbytes of 8 bits: `weight` int8 [outputs, inputs], `SCB` [outputs] and `weight_format`, the order of elements.

weight = integer * SCB / 127. Inputs are not quantized here, so outliers need no special care.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.quantization.spec import BitsAndBytes8
from vllm_lite.errors import ModelError
from vllm_lite.kernels.grouped import INT8, GroupedWeight
from vllm_lite.layers.quantized.stored import CPU, QuantizedWeight
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape, StoredWeight
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack, whole_slot


def stored(_: BitsAndBytes8, names: Sequence[str], shape: LinearShape) -> StoredWeight:
    """The weight of the projections `names`, stacked; see QuantizedForm. Experts that are stored together are dense."""
    if shape.stacked is not None:
        return DENSE.stored(names, shape)
    shape = shape._replace(transposed=False)  # bitsandbytes stores [outputs, inputs] in any case
    scales = tuple(
        WeightSlot(f"{name}.SCB", (rows.total,), (rows.start,), (rows.size,), rows.order)
        for name, rows in zip(names, shape.outputs, strict=True)
    )
    layouts = (WeightStack((whole_slot(f"{name}.weight_format"),), torch.uint8, CPU) for name in names)
    stacks = (
        WeightStack(shape.slots(names, ".weight"), torch.int8, CPU),
        WeightStack(scales, torch.float32, CPU),
        *layouts,
    )
    return QuantizedWeight(stacks, _Reader(names).take, shape)


@dataclass(frozen=True, slots=True)
class _Reader:
    names: Sequence[str]

    def take(self, weight: torch.Tensor, scales: torch.Tensor, *layouts: torch.Tensor) -> GroupedWeight:
        for name, layout in zip(self.names, layouts, strict=True):
            if int(layout) != 0:
                raise ModelError(f"{name}.weight_format: {int(layout)} is not supported; supported: 0, by rows")
        codes = weight.view(torch.uint8) ^ 128
        return GroupedWeight(codes, INT8, scales[:, None] / 127, weight.shape[1])

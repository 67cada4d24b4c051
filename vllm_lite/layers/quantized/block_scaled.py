"""Weights of one byte each, float8 or int8: `weight` [outputs, inputs], a scale for each rectangle of it and, for some
integers, a zero point.

https://github.com/vllm-project/compressed-tensors has the formats as float-quantized and int-quantized. DeepSeek V3
calls the scales `weight_scale_inv` and multiplies with them all the same.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from vllm_lite.checkpoint.quantization.spec import BlockScaled
from vllm_lite.errors import ModelError
from vllm_lite.kernels.grouped import E4M3, INT8, GroupedWeight
from vllm_lite.layers.quantized.stored import CPU, QuantizedWeight, own_rows
from vllm_lite.layers.weights.weight_form import LinearShape
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack, whole_slot


def stored(spec: BlockScaled, names: Sequence[str], shape: LinearShape) -> QuantizedWeight:
    """The weight of the projections `names`, stacked; see QuantizedForm."""
    return _Reader(spec, names, shape).weight()


class _Reader:
    """Reads scales whole, as they are few, and ranks and heads may cut rectangles anywhere."""

    def __init__(self, spec: BlockScaled, names: Sequence[str], shape: LinearShape) -> None:
        if shape.stacked is not None:
            raise ModelError(
                f"{names[0]}: experts in one tensor are not supported as {spec.label}; supported: each alone"
            )
        self.spec, self.names, self.shape = spec, names, shape
        outputs, inputs = spec.block[::-1] if shape.transposed else spec.block
        self.block_outputs, self.block_inputs = outputs, inputs or shape.inputs.total

    def weight(self) -> QuantizedWeight:
        spec, dtype = self.spec, torch.float8_e4m3fn if self.spec.numbers == "float8" else torch.int8
        stacks = [
            WeightStack(self.shape.slots(self.names, ".weight"), dtype, CPU),
            self._of_rectangles(spec.scale, torch.float32),
        ]
        if spec.zeros is not None:
            stacks.append(self._of_rectangles(spec.zeros, torch.int8))
        return QuantizedWeight((*stacks, *self._unread()), self._take, self.shape, spec.float8_rows)

    def _of_rectangles(self, ending: str, dtype: torch.dtype) -> WeightStack:
        named = zip(self.names, self.shape.outputs, strict=True)
        return WeightStack(tuple(self._slot(f"{name}.{ending}", rows.total) for name, rows in named), dtype, CPU)

    def _slot(self, name: str, num_outputs: int) -> WeightSlot:
        if self.spec.block == (None, None):
            return whole_slot(name, 1)
        rows = -(-num_outputs // (self.block_outputs or num_outputs))
        columns = -(-self.shape.inputs.total // self.block_inputs)
        return whole_slot(name, rows, columns)._replace(transposed=self.shape.transposed)

    def _unread(self) -> Iterator[WeightStack]:
        for ending in self.spec.unread:
            yield WeightStack(tuple(whole_slot(f"{name}.{ending}", 1) for name in self.names), torch.float32, CPU)

    def _take(self, weight: torch.Tensor, scales: torch.Tensor, *others: torch.Tensor) -> GroupedWeight:
        inputs = self.shape.inputs
        # A rank's inputs may begin within a rectangle: its groups are then parts of rectangles.
        size = min(math.gcd(inputs.start, self.block_inputs), max(inputs.size, 1))
        columns = torch.arange(inputs.start, inputs.end, size) // self.block_inputs
        rows = own_rows(self.shape.outputs, self.block_outputs)
        own = scales.view(len(scales), -1)[rows[:, None], columns]
        codes = weight.contiguous().view(torch.uint8)
        if self.spec.numbers == "float8":
            return GroupedWeight(codes, E4M3, own, size)
        minima = None
        if self.spec.zeros is not None:
            minima = others[0].view(len(scales), -1)[rows[:, None], columns] * own
        return GroupedWeight(codes ^ 128, INT8, own, size, minima)

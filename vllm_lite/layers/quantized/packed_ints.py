"""compressed-tensors' pack-quantized: `weight_packed`, `weight_scale`, `weight_shape`, of symmetric integers.
https://github.com/vllm-project/compressed-tensors has the format.

Integers are stored plus 8 (or 128), the lowest bits of an int32 word first, along the inputs.
"""

from collections.abc import Sequence

import torch

from vllm_lite.checkpoint.quantization.spec import PackedInts
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels.grouped import INT4, INT8, GroupedWeight, unpack
from vllm_lite.layers.quantized.stored import CPU, QuantizedWeight, in_units
from vllm_lite.layers.weight_form import LinearShape
from vllm_lite.layers.weight_slot import WeightSlot, WeightStack, whole_slot


def stored(spec: PackedInts, names: Sequence[str], shape: LinearShape) -> QuantizedWeight:
    """The weight of the projections `names`, stacked; see QuantizedForm."""
    return _Reader(spec, names, shape).weight()


class _Reader:
    def __init__(self, spec: PackedInts, names: Sequence[str], shape: LinearShape) -> None:
        self.spec, self.names, self.shape = spec, names, shape
        self.group_size = spec.group_size or shape.inputs.total
        self.words = in_units(shape.inputs, 32 // spec.bits)
        self.groups = Split.whole(1) if spec.group_size is None else in_units(shape.inputs, spec.group_size)

    def weight(self) -> QuantizedWeight:
        shapes = tuple(whole_slot(f"{name}.weight_shape", 2) for name in self.names)
        stacks = (
            self._stack("weight_packed", self.words, torch.int32),
            self._stack("weight_scale", self.groups, torch.float32),
            WeightStack(shapes, torch.int64, CPU),
        )
        return QuantizedWeight(stacks, self._take, self.shape)

    def _stack(self, ending: str, columns: Split, dtype: torch.dtype) -> WeightStack:
        shape = self.shape._replace(inputs=columns)
        named = zip(self.names, self.shape.outputs, strict=True)
        slots: tuple[WeightSlot, ...] = tuple(shape.slot(f"{name}.{ending}", rows) for name, rows in named)
        return WeightStack(slots, dtype, CPU)

    def _take(self, packed: torch.Tensor, scales: torch.Tensor, _: torch.Tensor) -> GroupedWeight:
        codes = unpack(packed, self.spec.bits, dim=1)[:, : self.shape.inputs.size]
        return GroupedWeight(codes, INT4 if self.spec.bits == 4 else INT8, scales, min(self.group_size, codes.shape[1]))

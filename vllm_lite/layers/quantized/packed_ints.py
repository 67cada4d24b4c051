"""compressed-tensors' pack-quantized: `weight_packed`, `weight_scale`, `weight_shape`, for some `weight_zero_point` and
`weight_g_idx`, the group of each input. https://github.com/vllm-project/compressed-tensors has the format.

Integers are stored plus 8 (or 128), the lowest bits of an int32 word first, along the inputs; zero points likewise,
along the outputs.
"""

from collections.abc import Sequence

import torch

from vllm_lite.checkpoint.quantization.spec import PackedInts
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ConfigError
from vllm_lite.kernels.grouped import INT4, INT8, UINT4, UINT8, GroupedWeight, unpack
from vllm_lite.layers.quantized.stored import CPU, QuantizedWeight, in_units, own_rows, sorted_by_group
from vllm_lite.layers.weights.weight_form import LinearShape
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack, whole_slot


def stored(spec: PackedInts, names: Sequence[str], shape: LinearShape) -> QuantizedWeight:
    """The weight of the projections `names`, stacked; see QuantizedForm."""
    return _Reader(spec, names, shape).weight()


class _Reader:
    def __init__(self, spec: PackedInts, names: Sequence[str], shape: LinearShape) -> None:
        self.spec, self.names, self.shape = spec, names, shape
        self.per_word = 32 // spec.bits
        self.group_size = spec.group_size or shape.inputs.total
        self.words = in_units(shape.inputs, self.per_word)
        self.groups = Split.whole(1) if spec.group_size is None else in_units(shape.inputs, spec.group_size)
        if spec.sorted_columns and not shape.inputs.is_whole:
            raise ConfigError(
                f"{names[0]}: its inputs were grouped by activations (actorder), so that ranks cannot share them; use "
                "--tensor-parallel-size 1"
            )

    def weight(self) -> QuantizedWeight:
        stacks = [
            self._stack("weight_packed", self.words, torch.int32),
            self._stack("weight_scale", self.groups, torch.float32),
            self._whole("weight_shape", 2, torch.int64),
        ]
        if self.spec.zeros:
            stacks.append(self._zeros())
        if self.spec.sorted_columns:
            stacks.append(self._whole("weight_g_idx", self.shape.inputs.total, torch.int32))
        return QuantizedWeight(tuple(stacks), self._take, self.shape)

    def _stack(self, ending: str, columns: Split, dtype: torch.dtype) -> WeightStack:
        return WeightStack(self.shape._replace(inputs=columns).slots(self.names, f".{ending}"), dtype, CPU)

    def _whole(self, ending: str, size: int, dtype: torch.dtype) -> WeightStack:
        return WeightStack(tuple(whole_slot(f"{name}.{ending}", size) for name in self.names), dtype, CPU)

    def _zeros(self) -> WeightStack:
        """Request all rows, as the parts of ranks and projections need not begin at a word."""
        slots = []
        for name, outputs in zip(self.names, self.shape.outputs, strict=True):
            rows, columns = -(-outputs.total // self.per_word), self.groups
            start, size = (0, columns.start), (rows, columns.size)
            slots.append(WeightSlot(f"{name}.weight_zero_point", (rows, columns.total), start, size))
        return WeightStack(tuple(slots), torch.int32, CPU)

    def _take(
        self, packed: torch.Tensor, scales: torch.Tensor, _: torch.Tensor, *others: torch.Tensor
    ) -> GroupedWeight:
        spec, inputs = self.spec, self.shape.inputs
        codes = unpack(packed, spec.bits, dim=1)[:, : inputs.size]
        values, minima, order = INT4 if spec.bits == 4 else INT8, None, None
        if spec.zeros:
            rows = own_rows(self.shape.outputs, stored_unit=self.per_word)
            zeros = unpack(others[0], spec.bits, dim=0)[rows]
            values, minima = UINT4 if spec.bits == 4 else UINT8, zeros * scales
        if spec.sorted_columns:
            order = sorted_by_group(others[-1].view(-1, inputs.size).long(), self.group_size, self.names)
            codes = codes[:, order]
        return GroupedWeight(codes, values, scales, min(self.group_size, codes.shape[1]), minima, order)

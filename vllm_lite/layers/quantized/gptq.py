"""GPTQ's `qweight` int32 [inputs / 8, outputs], `qzeros` [groups, outputs / 8], `scales` [groups, outputs] and `g_idx`
[inputs], the group of each input; with 8 bits 4 instead of 8, with 3 bits 32 in 3 words.
https://github.com/ModelCloud/GPTQModel writes them, and https://github.com/intel/auto-round all except g_idx.

weight = scale * (code - zero).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_lite.checkpoint.quantization.spec import Gptq
from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.kernels.grouped import GroupedWeight
from vllm_lite.layers.quantized.columns import Columns
from vllm_lite.layers.quantized.stored import CPU, QuantizedWeight, group_of_each, sorted_by_group
from vllm_lite.layers.weights.weight_form import LinearShape
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack


def stored(spec: Gptq, names: Sequence[str], shape: LinearShape) -> QuantizedWeight:
    """The weight of the projections `names`, stacked; see QuantizedForm."""
    reader = _Reader(spec, Columns(names, shape, spec.bits, spec.group_size or shape.inputs.total))
    return QuantizedWeight(reader.stacks(), reader.take, shape)


@dataclass(frozen=True, slots=True)
class _Reader:
    spec: Gptq
    columns: Columns

    @property
    def has_parts_of_groups(self) -> bool:
        """Whether this rank has parts of groups, because groups are not of consecutive inputs."""
        return self.spec.sorted_columns and not self.columns.shape.inputs.is_whole

    def stacks(self) -> tuple[WeightStack, ...]:
        columns, inputs = self.columns, self.columns.shape.inputs
        groups = Split.whole(-(-inputs.total // columns.group_size)) if self.has_parts_of_groups else columns.groups
        stacks = (
            columns.stack("qweight", columns.words, torch.int32, packed=False),
            columns.stack("qzeros", groups, torch.int32, packed=True),
            columns.stack("scales", groups, torch.float32, packed=False),
        )
        if not self.spec.has_indices:
            return stacks
        indices = tuple(
            WeightSlot(f"{name}.g_idx", (inputs.total,), (inputs.start,), (inputs.size,)) for name in columns.names
        )
        return (*stacks, WeightStack(indices, torch.int32, CPU))

    def take(
        self, qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *g_idx: torch.Tensor
    ) -> GroupedWeight:
        columns, inputs = self.columns, self.columns.shape.inputs
        codes = columns.unpack(qweight, dim=0)[: inputs.size]
        zeros = self._zeros(qzeros).float()
        if not g_idx:
            return columns.weight(codes, zeros, scales)
        groups = g_idx[0].view(-1, inputs.size).long()
        if self.has_parts_of_groups:
            own = group_of_each(groups, len(scales), columns.names)
            return replace(columns, group_size=1).weight(codes, zeros[own], scales[own])
        order = self._order(groups)
        return columns.weight(codes if order is None else codes[order], zeros, scales, order)

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """uint8 [groups, all outputs]. Formats that store zero - 1 subtract from whole words, so a zero of 0 has
        borrowed from the next code; codes that do not fill words are subtracted from singly."""
        columns = self.columns
        if not self.spec.zeros_less_one:
            return columns.unpack(words, dim=1)
        if columns.words_in_unit == 1:
            return columns.unpack(words + sum(1 << at for at in range(0, 32, columns.bits)), dim=1)
        return (columns.unpack(words, dim=1) + 1) & ((1 << columns.bits) - 1)

    def _order(self, groups: torch.Tensor) -> torch.Tensor | None:
        """Inputs sorted by their groups; None if they are already sorted. groups: [projections, inputs]."""
        size, start = self.columns.group_size, self.columns.shape.inputs.start
        if torch.equal(groups, ((start + torch.arange(groups.shape[1])) // size).expand_as(groups)):
            return None
        if not self.spec.sorted_columns:
            raise ModelError(f"{self.columns.names[0]}.g_idx: its groups are not of {size} inputs each")
        return sorted_by_group(groups, size, self.columns.names)

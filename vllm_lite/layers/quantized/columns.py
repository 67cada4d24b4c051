"""What formats share that store [inputs, outputs]: of GPTQ and AWQ every tensor but g_idx has outputs as its columns.

Columns are packed, and taken by ranks and projections in pieces that need not fall on words, so that each tensor is
read with all of its columns, and cut once it is unpacked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.kernels.grouped import INT4, INT8, UINT4, UINT8, GroupedWeight
from vllm_lite.layers.quantized.stored import CPU, in_units
from vllm_lite.layers.weight_form import LinearShape
from vllm_lite.layers.weight_slot import WeightSlot, WeightStack


@dataclass(frozen=True, slots=True)
class Columns:
    """The weight of some projections, side by side."""

    names: Sequence[str]
    shape: LinearShape
    bits: int
    group_size: int
    """Inputs that share a scale, or all of them."""

    @property
    def per_word(self) -> int:
        """Codes in an int32."""
        return 32 // self.bits

    @property
    def groups(self) -> Split:
        """Those of this rank. Raises ConfigError if ranks would have to share one."""
        whole = self.group_size >= self.shape.inputs.total
        return Split.whole(1) if whole else in_units(self.shape.inputs, self.group_size)

    def stack(self, ending: str, rows: Split, dtype: torch.dtype, *, packed: bool) -> WeightStack:
        """The tensors `<name>.<ending>`: [rows, outputs], whose columns are words where they are `packed`. Raises
        ModelError if outputs do not fill words."""
        slots = []
        for name, outputs in zip(self.names, self.shape.outputs, strict=True):
            if outputs.total % self.per_word:
                raise ModelError(f"{name}: {outputs.total} outputs are no whole words of {self.per_word}")
            width = outputs.total // self.per_word if packed else outputs.total
            slots.append(WeightSlot(f"{name}.{ending}", (rows.total, width), (rows.start, 0), (rows.size, width)))
        return WeightStack(tuple(slots), dtype, CPU, dim=1)

    def weight(
        self, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: torch.Tensor | None = None
    ) -> GroupedWeight:
        """codes: uint8 [inputs, all outputs], zeros and scales: [groups, all outputs]. Row k of the codes is for input
        order[k], see GroupedWeight."""
        own = self._own_columns()
        codes, zeros, scales = (tensor[:, own].t().contiguous() for tensor in (codes, zeros, scales))
        size = min(self.group_size, codes.shape[1])
        middle = 1 << (self.bits - 1)
        if bool((zeros == middle).all()):
            return GroupedWeight(codes, INT4 if self.bits == 4 else INT8, scales, size, order=order)
        return GroupedWeight(codes, UINT4 if self.bits == 4 else UINT8, scales, size, zeros * scales, order)

    def _own_columns(self) -> torch.Tensor:
        """Which of the columns of all projections this rank has, in its order."""
        found, first = [], 0
        for outputs in self.shape.outputs:
            own = outputs.order or range(outputs.start, outputs.end)
            found.append(torch.tensor(own, dtype=torch.int64) + first)
            first += outputs.total
        return torch.cat(found)

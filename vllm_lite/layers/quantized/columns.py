"""Common parts of formats that store [inputs, outputs]: all tensors of GPTQ and AWQ except g_idx have outputs as
columns.

Columns are packed, and the parts of ranks and projections need not begin at a word, so each tensor is read with all of
its columns, and cut after unpacking.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_lite.checkpoint.shard import Split
from vllm_lite.errors import ModelError
from vllm_lite.kernels.grouped import UINT4, UINT8, GroupedWeight, unpack
from vllm_lite.layers.quantized.stored import CPU, in_units, own_rows
from vllm_lite.layers.weights.weight_form import LinearShape
from vllm_lite.layers.weights.weight_slot import WeightSlot, WeightStack


@dataclass(frozen=True, slots=True)
class Columns:
    """The concatenated weights of some projections."""

    names: Sequence[str]
    shape: LinearShape
    bits: int
    group_size: int
    """Inputs that share a scale; may be all inputs."""

    @property
    def words_in_unit(self) -> int:
        """Number of int32 that begin and end with a whole code: three where codes have 3 bits."""
        return math.lcm(32, self.bits) // 32

    @property
    def unit(self) -> int:
        """Number of codes in `words_in_unit` words."""
        return 32 * self.words_in_unit // self.bits

    @property
    def words(self) -> Split:
        """Words of this rank's inputs. Raises ConfigError if ranks would have to share one."""
        return in_units(self.shape.inputs, self.unit).times(self.words_in_unit)

    @property
    def groups(self) -> Split:
        """Groups of this rank. Raises ConfigError if ranks would have to share one."""
        whole = self.group_size >= self.shape.inputs.total
        return Split.whole(1) if whole else in_units(self.shape.inputs, self.group_size)

    def stack(self, ending: str, rows: Split, dtype: torch.dtype, *, packed: bool) -> WeightStack:
        """Request the tensors `<name>.<ending>`: [rows, outputs], with words as columns if `packed`. Raises ModelError
        if outputs do not fill words."""
        slots = []
        for name, outputs in zip(self.names, self.shape.outputs, strict=True):
            if outputs.total % self.unit:
                raise ModelError(f"{name}: {outputs.total} outputs are not whole words of {self.unit}")
            width = outputs.total * self.bits // 32 if packed else outputs.total
            slots.append(WeightSlot(f"{name}.{ending}", (rows.total, width), (rows.start, 0), (rows.size, width)))
        return WeightStack(tuple(slots), dtype, CPU, dim=1)

    def weight(
        self, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, order: torch.Tensor | None = None
    ) -> GroupedWeight:
        """codes: uint8 [inputs, all outputs], zeros and scales: [groups, all outputs]. Row k of the codes is for input
        order[k], see GroupedWeight."""
        own = own_rows(self.shape.outputs)
        codes, zeros, scales = (tensor.t()[own].contiguous() for tensor in (codes, zeros, scales))
        size = min(self.group_size, codes.shape[1])
        values, middle = UINT4 if self.bits <= 4 else UINT8, 1 << (self.bits - 1)
        if bool((zeros == middle).all()):
            return GroupedWeight(codes, values - middle, scales, size, order=order)
        return GroupedWeight(codes, values, scales, size, zeros * scales, order)

    def unpack(self, words: torch.Tensor, *, dim: int) -> torch.Tensor:
        """See kernels.grouped.unpack; codes may also begin in one word and end in the next."""
        if self.words_in_unit == 1:
            return unpack(words, self.bits, dim=dim)
        words = words.movedim(dim, -1).long() & 0xFFFFFFFF
        first = torch.arange(0, 32 * words.shape[-1] - self.bits + 1, self.bits)
        word, shift = first // 32, first % 32
        following = words[..., (word + 1).clamp(max=words.shape[-1] - 1)]
        codes = ((words[..., word] | following << 32) >> shift) & ((1 << self.bits) - 1)
        return codes.to(torch.uint8).movedim(-1, dim)

"""PackedStack: the quantized weights of a layer's experts, as csrc/cuda/packed_experts.cuh reads them."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from vllm_lite.kernels.cuda.weights.packed_weight import TILE, GpuPackedWeight, chunk_inputs

INPUTS = 8
"""The inputs of an expert are a multiple of this: numbers are stored 16 bytes at a time."""


class PackedStack(NamedTuple):
    """The same matrix of several experts, each packed as a GpuPackedWeight."""

    shape: tuple[int, int]
    """[num_outputs, num_inputs] of each expert."""
    codes: torch.Tensor
    """uint8 [experts, tiles, num_chunks, 512]."""
    scales: torch.Tensor
    """[experts, groups, padded outputs, 1 or 2]."""
    group_shift: int
    kind: str
    less: str
    in_turn: bool
    """Whether tiles of the first and second half of the outputs alternate, see `tiles_in_turn`."""

    @property
    def num_chunks(self) -> int:
        return self.codes.shape[2]

    @property
    def padded(self) -> tuple[int, int]:
        """[outputs, inputs] of each expert in memory."""
        return TILE * self.codes.shape[1], self.num_chunks * chunk_inputs(self.kind)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, codes: torch.Tensor, weights: Sequence[GpuPackedWeight], *, in_turn: bool) -> Self:
        """codes: of all experts, in the order of `in_turn`; everything else is from `weights`, which are `alike` and in
        the order of their outputs. If only some have zero points or minima, the others get neutral ones."""
        first = weights[0]
        less = next((kind for kind in ("MINIMA", "ZEROS") if any(each.less == kind for each in weights)), "NOTHING")
        scales = [_scales_for(each, less) for each in weights]
        dtypes = {each.dtype for each in scales}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        whole = torch.stack([tiles_in_turn(each, 1, first.shape[0], TILE) if in_turn else each for each in scales])
        return cls(first.shape, codes, whole.to(dtype), first.group_shift, first.kind, less, in_turn)

    def some(self, part: slice) -> Self:
        """The stack of the experts in `part`."""
        return self._replace(codes=self.codes[part], scales=self.scales[part])


def stackable(weight: GpuPackedWeight, *, in_turn: bool) -> bool:
    """Whether weights like this can be in a stack: columns are in the order of inputs, and halves are whole tiles if
    they alternate."""
    num_outputs, num_inputs = weight.shape
    whole = num_outputs % (2 * TILE) == 0 or not in_turn
    return weight.order is None and num_inputs % INPUTS == 0 and min(weight.shape) > 0 and whole


def alike(one: GpuPackedWeight, other: GpuPackedWeight) -> bool:
    """Whether both can be in one stack: with equal shapes, kinds of codes and group sizes."""
    first, second = ((each.shape, each.kind, each.group_shift, each.order is None) for each in (one, other))
    return first == second


def tiles_in_turn(table: torch.Tensor, dim: int, num_outputs: int, unit: int) -> torch.Tensor:
    """Interleave tiles along `dim`, `unit` elements each: a tile of the first half of the outputs, then one of the
    second, and so on. Padding after the outputs stays there."""
    size = num_outputs // TILE * unit
    rows, rest = table.split((size, table.shape[dim] - size), dim=dim)
    turned = rows.unflatten(dim, (2, -1, unit)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat((turned, rest), dim=dim)


def tiles_in_order(table: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """The inverse of `tiles_in_turn`, along dimension 0 with one element per tile."""
    size = num_outputs // TILE
    return torch.cat((table[:size:2], table[1:size:2], table[size:]))


def _scales_for(weight: GpuPackedWeight, less: str) -> torch.Tensor:
    """The scales of a weight, with the second numbers of kind `less`."""
    if weight.less == less:
        return weight.scales
    scales = weight.scales.float()
    if weight.less == "NOTHING":
        return torch.cat((scales, torch.zeros_like(scales)), dim=-1)
    scale, zero = scales.unbind(-1)
    return torch.stack((scale, scale * zero), dim=-1)

"""Storage of the scales and minima of grouped weights, in the shortest type that is exact."""

from typing import NamedTuple

import torch

from vllm_lite.kernels.cpu.dtypes import dtype_code
from vllm_lite.kernels.grouped import GroupedWeight

NO_MINIMA, SHIFTS, INTEGERS = -1, 103, 104
"""kNoMinima, kShifts and kIntegers."""
BLOCK = 32
"""kBlock."""
_FURTHEST_ZERO = 24
"""Maximum magnitude of a zero point: 4-bit integers have none beyond it. Within it, codes plus zero points stay below
64."""


class GroupScales(NamedTuple):
    """Scales and minima for packing, as float32, and the types in which they are stored."""

    scales: torch.Tensor
    """[num_outputs, packed groups], contiguous. `minima` has the same shape."""
    scale_type: int
    minima: torch.Tensor | None
    """The minimum of each group; for the type SHIFTS, the integer to add to the codes of the group."""
    minima_type: int
    shift: int = 0
    """Number to subtract from all values, because the codes were raised by it."""

    @classmethod
    def of(cls, weight: GroupedWeight, group_size: int, unit: float, *, may_shift: bool) -> "GroupScales":
        """Scales and minima of a weight that is packed in groups of `group_size` and with its scales times `unit`.
        `may_shift`: its codes are the bytes that kernels multiply, so minima that are multiples of scales may be added
        to codes."""
        scales = _for_groups(weight.scales, weight, group_size) * unit
        minima = None if weight.minima is None else _for_groups(weight.minima, weight, group_size)
        if minima is None:
            return cls(scales, _type_for(scales), None, NO_MINIMA)
        zeros = _zero_points(minima, scales) if may_shift else None
        if zeros is None:
            return cls(scales, _type_for(scales), minima, _type_for(minima))
        most = int(zeros.max())
        return cls(scales, _type_for(scales), most - zeros, SHIFTS, most)


def _for_groups(given: torch.Tensor, weight: GroupedWeight, group_size: int) -> torch.Tensor:
    """`given` for packed groups: float32 [num_outputs, packed groups], contiguous."""
    needed = -(-weight.shape[1] // group_size)
    wide = given.to(torch.float32)
    if given.shape[1] != needed:
        wide = wide.repeat_interleave(-(-weight.group_size // group_size), dim=1)[:, :needed]
    return wide.contiguous()


def _zero_points(minima: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
    """Minima as multiples of their scales; None unless all are whole numbers up to _FURTHEST_ZERO."""
    zeros = torch.where(scales != 0, minima / scales, 0).round_()
    least, most = zeros.aminmax()
    if least < -_FURTHEST_ZERO or most > _FURTHEST_ZERO or not torch.equal(zeros * scales, minima):
        return None
    return zeros


def _type_for(numbers: torch.Tensor) -> int:
    """The shortest type that stores all numbers exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(numbers.to(dtype).to(torch.float32), numbers):
            return dtype_code(dtype)
    return dtype_code(torch.float32)

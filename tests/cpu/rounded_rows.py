"""Rows as products take them where the machine multiplies bytes, in plain torch: csrc/cpu/linear.h has the rule."""

import torch

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import ONE_PLANE, QUANT_GROUP

LARGEST = 127
LARGEST_OF_TWO = 127 * 128
"""Integers of one plane of bytes, and of two."""
UNEVEN, UNEVEN_LONG = 4, 6
"""Ratio of a group's largest size to its mean above which the largest needs more than 8 bits, in groups of at most
ONE_PLANE inputs, and in larger ones."""


def rounded_rows(
    x: torch.Tensor, group_size: int = QUANT_GROUP, *, bits: int = 8, byte_rows: bool = False
) -> torch.Tensor:
    """x: [rows, inputs] -> float32 of the same shape, for weights of so many bits in groups of group_size inputs: each
    group of a row as integers times a scale. `byte_rows`: of weights that became int8 when they were loaded."""
    one_plane = bits == 4 and (group_size <= ONE_PLANE or not cpu.isa().startswith("amx"))
    group_size = min(group_size, ONE_PLANE) if one_plane else group_size
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group_size)).reshape(-1, group_size)
    sizes = groups.abs()
    largest = sizes.amax(dim=1, keepdim=True)
    size = largest
    is_byte = group_size <= ONE_PLANE or (byte_rows and cpu.isa() == "avx512_bf16")
    if is_byte and not one_plane:  # two fours of inputs, with the largest, have more bits
        third = sizes.reshape(len(groups), -1, 4).amax(dim=2).topk(3, dim=1).values[:, 2:]
        uneven = largest > (UNEVEN if group_size <= ONE_PLANE else UNEVEN_LONG) * sizes.mean(dim=1, keepdim=True)
        size = torch.where(uneven, torch.maximum(third, largest / 128), largest)
    # A tensor, as torch would multiply by the inverse of a number.
    most = torch.full_like(size, LARGEST if is_byte else LARGEST_OF_TWO)
    integers = (groups * torch.where(size > 0, most / size, 0)).round()
    return (integers * (size / most)).reshape(len(x), -1)[:, : x.shape[1]]

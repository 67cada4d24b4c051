"""Rows as products take them where the machine multiplies bytes, in plain torch: csrc/cpu/linear.h has the rule."""

import torch

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import ONE_PLANE, QUANT_GROUP

LARGEST = 127
LARGEST_OF_TWO = 127 * 128
"""Integers of one plane of bytes, and of two."""
UNEVEN = 5
"""How many times the mean size in a group of at most ONE_PLANE inputs makes its largest need the second plane."""


def rounded_rows(x: torch.Tensor, group_size: int = QUANT_GROUP, *, bits: int = 8) -> torch.Tensor:
    """x: [rows, inputs] -> float32 of the same shape, for weights of so many bits in groups of group_size inputs: each
    group of a row as integers times a scale."""
    one_plane = bits == 4 and (group_size <= ONE_PLANE or not cpu.isa().startswith("amx"))
    group_size = min(group_size, ONE_PLANE) if one_plane else group_size
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group_size)).reshape(-1, group_size)
    largest = groups.abs().amax(dim=1, keepdim=True)
    two = (largest > UNEVEN * groups.abs().mean(dim=1, keepdim=True)) | (group_size > ONE_PLANE)
    most = torch.where(two & (not one_plane), float(LARGEST_OF_TWO), float(LARGEST))
    inverse = torch.where(largest > 0, most / largest, 0)
    integers = (groups * inverse).round()
    return (integers * (largest / most)).reshape(len(x), -1)[:, : x.shape[1]]

"""Forms that `--quantization` makes of dense weights when they are loaded: weights that share a scale, and their bytes.

Kernels, layers and plans share it. It needs no package, as the check of a GPU must do without most.
"""

from math import prod

INT4_GROUPS = {"int4": 128, "int4_g32": 32}
"""Inputs that share a scale, where dense weights become integers of 4 bits."""
FP8_GROUP = 128
"""The same, where they become floats of 8 bits."""


def quantized_bytes(shape: tuple[int, ...], quantization: str) -> int:
    """A matrix of int8 has a scale of 4 bytes for each row; one of int4 or fp8 scales of 2 bytes for the groups of a
    row, and whole groups."""
    if quantization == "int8":
        return prod(shape) + 4 * prod(shape[:-1])
    if quantization == "fp8":
        return prod(shape[:-1]) * -(-shape[-1] // FP8_GROUP) * (FP8_GROUP + 2)
    group_size = INT4_GROUPS[quantization]
    return prod(shape[:-1]) * -(-shape[-1] // group_size) * (group_size // 2 + 2)

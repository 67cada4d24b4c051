"""Forms that `--quantization` makes of dense weights when they are loaded: weights that share a scale, and their bytes.

Kernels, layers and plans share it. It needs no package, as the check of a GPU must do without most.
"""

from math import prod
from typing import Literal

Quantization = Literal["int8", "fp8", "int4", "int4_g32"]
"""int8: integers of 8 bits with a scale and a minimum for each 32 inputs of an output. fp8: E4M3 with a scale for each
128. int4 and int4_g32: integers of 4 bits with a scale and a minimum for each 128 or 32."""

Form = Quantization | Literal["int5_g32"]
"""What one matrix becomes. int5_g32: as int4_g32, with integers of 5 bits; single matrices have it, on a CPU."""

INT4_GROUPS = {"int4": 128, "int4_g32": 32}
"""Inputs that share a scale, where dense weights become integers of 4 bits."""
GROUPS = {"int8": 32, "fp8": 128, "int5_g32": 32, **INT4_GROUPS}
"""The same for all."""
TILE_GROUP = 128
"""kQuantGroup: the inputs in a group that tiles multiply fastest. Where a CPU has them, int8 has such groups."""
BITS_IN_BYTES = {"int4_g32": 4, "int5_g32": 5}
"""Bits of the codes of forms whose scales and minima are bytes on a CPU."""
SUPER_INPUTS = 256
"""Inputs that share the two floats of 4 bytes which scales and minima of groups of 32 are integers times."""


def head_form(quantization: Quantization | None) -> Quantization | None:
    """The form of the LM head: with 4 bits it loses more than a layer does, so that llama.cpp gives it more, too."""
    return "int8" if quantization in INT4_GROUPS else quantization


def quantized_bytes(shape: tuple[int, ...], quantization: Form | None, device: str = "cpu") -> int:
    """A matrix with whole groups in each row. Scales and minima have 2 bytes; on a CPU those of int4_g32 and int5_g32
    have one, and floats that some share. fp8 has no minima, nor has int8 on a GPU. On a CPU int8 takes no more than
    this, whether that has tiles or not."""
    if quantization is None:
        raise ValueError("a dense matrix has the bytes of its type")
    rows, size = prod(shape[:-1]), GROUPS[quantization]
    groups = -(-shape[-1] // size)
    if quantization in BITS_IN_BYTES and device == "cpu":
        code_bytes = size * BITS_IN_BYTES[quantization] // 8
        return rows * (groups * (code_bytes + 2) + 8 * -(-shape[-1] // SUPER_INPUTS))
    code_bytes = size // 2 if quantization in INT4_GROUPS else size
    has_minima = quantization != "fp8" and not (quantization == "int8" and device != "cpu")
    row_bytes = groups * (code_bytes + (4 if has_minima else 2))
    if quantization == "int8" and device == "cpu":
        row_bytes = max(row_bytes, -(-shape[-1] // TILE_GROUP) * (TILE_GROUP + 4))
    return rows * row_bytes

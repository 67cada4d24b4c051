"""Forms that `--quantization` makes of dense weights during loading: their groups and bytes. Used by kernels, layers
and plans. Imports no package, as a GPU check must run without most."""

from math import prod
from typing import Literal

Quantization = Literal["int8", "fp8", "int4", "int4_g32"]
"""int8: 8-bit integers with a scale and a minimum per 32 inputs of an output. fp8: E4M3 with a scale per 128. int4 and
int4_g32: 4-bit integers with a scale and a minimum per 128 or 32."""

Form = Quantization | Literal["int5_g32", "int8_g128"]
"""Form of one matrix, the last two on a CPU alone. int5_g32: as int4_g32, with 5-bit integers, for single matrices.
int8_g128: as int8, with a scale and a minimum per 128 inputs, for matrices that always have many rows."""

INT4_GROUPS = {"int4": 128, "int4_g32": 32}
"""Number of inputs that share a scale, in 4-bit forms."""
GROUPS = {"int8": 32, "fp8": 128, "int5_g32": 32, "int8_g128": 128, **INT4_GROUPS}
"""Number of inputs that share a scale, in each form."""
TILE_GROUP = 128
"""kQuantGroup: the group size for which tile kernels are fastest. On CPUs with tiles, int8 has such groups."""
BITS_IN_BYTES = {"int4_g32": 4, "int5_g32": 5}
"""Bits of codes, for forms whose scales and minima are bytes on a CPU."""
SUPER_INPUTS = 256
"""Number of inputs that share two 4-byte floats, by which the byte scales and minima of their groups of 32 are
multiplied."""


def head_form(quantization: Quantization | None) -> Quantization | None:
    """Form of the LM head, which loses more accuracy with 4 bits than layers do; llama.cpp gives it more bits, too."""
    return "int8" if quantization in INT4_GROUPS else quantization


def quantized_bytes(shape: tuple[int, ...], quantization: Form | None, device: str = "cpu") -> int:
    """Bytes of a quantized matrix with whole groups in each row. Scales and minima have 2 bytes; on a CPU those of
    int4_g32 and int5_g32 have one byte, and shared floats. fp8 has no minima, nor has int8 on a GPU. For int8 on a CPU
    this is an upper bound, with or without tiles."""
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

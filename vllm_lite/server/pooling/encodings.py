"""Encoding: vectors as bytes, in a number type and byte order. Written without numpy, which the server does not
import."""

import math
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial
from typing import Literal, NamedTuple

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
FLOAT_BYTES = 4
_NUM_BYTES = {"float32": FLOAT_BYTES, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


class Encoding(NamedTuple):
    """Type and byte order of numbers in base64 and bytes."""

    dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"

    @property
    def num_bytes(self) -> int:
        """Bytes of one number."""
        return _NUM_BYTES[self.dtype]

    def of(self, data: bytes) -> bytes:
        """Encode float32 numbers, rounded to the nearest value of the type."""
        if self.dtype == "float32" and self.endianness in ("native", sys.byteorder):
            return data
        found = _ENCODERS[self.dtype](array("f", data))
        if self.endianness not in ("native", sys.byteorder):
            found.byteswap()
        return found.tobytes()


def _float16(numbers: "array[float]") -> "array[int]":
    return array("H", b"".join([_half(number) for number in numbers]))


def _half(number: float) -> bytes:
    try:
        return struct.pack("=e", number)
    except OverflowError:  # larger than the largest float16
        return struct.pack("=e", math.copysign(math.inf, number))


def _bfloat16(numbers: "array[float]") -> "array[int]":
    """The upper half of each number, rounded to nearest even; a NaN stays NaN."""
    bits = array("I", numbers.tobytes())
    return array("H", [_upper_half(each) for each in bits])


def _upper_half(bits: int) -> int:
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FC0
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _float8(mantissa_bits: int, last: int, numbers: "array[float]") -> "array[int]":
    """Encode as float8. `last` is the code for larger values: the largest number, or infinity if the type has it."""
    values = _magnitudes(mantissa_bits, last)
    return array("B", [_nearest(values, number) for number in numbers])


def _nearest(values: tuple[float, ...], number: float) -> int:
    """The code of the nearest value; of two equally near, the even one."""
    if math.isnan(number):
        return 0x7F
    size, sign = abs(number), 0x80 if math.copysign(1, number) < 0 else 0
    code = min(bisect_left(values, size), len(values) - 1)
    if code:
        middle = (values[code - 1] + values[code]) / 2
        code -= size < middle or (size == middle and code % 2)
    return sign | code


@cache
def _magnitudes(mantissa_bits: int, last: int) -> tuple[float, ...]:
    """The values of the codes from 0 to `last`."""
    ones, bias = 1 << mantissa_bits, (1 << 6 - mantissa_bits) - 1
    found = []
    for code in range(last + 1):
        exponent, mantissa = divmod(code, ones)
        scale = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        found.append((mantissa + (ones if exponent else 0)) * scale)
    return tuple(found)


_ENCODERS: dict[str, Callable[["array[float]"], "array[int]"]] = {
    "float32": lambda numbers: array("I", numbers.tobytes()),
    "float16": _float16,
    "bfloat16": _bfloat16,
    "fp8_e4m3": partial(_float8, 3, 0x7E),
    "fp8_e5m2": partial(_float8, 2, 0x7C),
}

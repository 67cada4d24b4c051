"""Numbers as bytes are those that torch writes."""

import math
import random
import sys
from array import array
from typing import Any, get_args

import pytest
import torch

from vllm_lite.server.pooling.encodings import EmbedDtype, Encoding

TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
LARGEST = 448.0
"""Largest number of fp8_e4m3; releases of torch differ in their treatment of larger ones."""


def numbers(limit: float) -> list[float]:
    rng = random.Random(1)
    found = [0.0, -0.0, 1.0, -1.0, 448, 57344, 61439, 61440, 61441, 65504, 65519, 65520, 1e-8, 1e-30]
    found += [math.inf, -math.inf, 2**-10, 2**-9, 3 * 2**-10, 5 * 2**-11]
    found += [rng.gauss(0, 1) * 2 ** rng.randint(-20, 18) for _ in range(2000)]
    found += [rng.randrange(-2000, 2000) / 2 ** rng.randrange(14) for _ in range(2000)]  # many are half-way
    return [number for number in found if abs(number) <= limit]


@pytest.mark.parametrize("dtype", get_args(EmbedDtype))
def test_torch_rounds_alike(dtype: Any) -> None:
    data = array("f", numbers(LARGEST if dtype == "fp8_e4m3" else math.inf))
    want = torch.tensor(data).to(TYPES[dtype]).view(torch.uint8)
    assert Encoding(dtype, "native").of(data.tobytes()) == want.numpy().tobytes()
    other: Any = "big" if sys.byteorder == "little" else "little"
    size = Encoding(dtype).num_bytes
    assert Encoding(dtype, other).of(data.tobytes()) == want.reshape(-1, size).flip(-1).numpy().tobytes()


@pytest.mark.parametrize("dtype", get_args(EmbedDtype))
def test_nan_stays_nan_and_large_numbers_stay_large(dtype: Any) -> None:
    data = array("f", [math.nan, 1e30, -1e30]).tobytes()
    codes = torch.frombuffer(bytearray(Encoding(dtype).of(data)), dtype=TYPES[dtype]).float().tolist()
    assert math.isnan(codes[0])
    assert codes[1] == -codes[2]
    assert codes[1] >= LARGEST

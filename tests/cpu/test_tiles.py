"""AMX in plain C++ against the processor's AMX, bit for bit, so kernels for one may be tested with the other."""

import pytest
import torch

from tests.cpu.conftest import has_amx, using_isa
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear
from vllm_lite.kernels.grouped import GroupedWeight, quantize

pytestmark = pytest.mark.skipif(not has_amx(), reason="this machine has no AMX")

ROWS, INPUTS, OUTPUTS = 37, 96, 320
"""Two groups of rows, the second with 5; three products of tiles to a sum."""


def any_bits(*shape: int) -> torch.Tensor:
    """Infinities, NaN and denormals among them."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)


def sized(low: int, high: int, *shape: int) -> torch.Tensor:
    """Random numbers times 2^low to 2^high."""
    return (torch.randn(shape, dtype=torch.float64) * 2.0 ** torch.randint(low, high + 1, shape)).bfloat16()


KINDS = {
    "normal": lambda *shape: sized(0, 0, *shape),
    "any bits": any_bits,
    "of many sizes": lambda *shape: sized(-30, 30, *shape),
    "with products about the smallest number": lambda *shape: sized(-67, -60, *shape),
    "with denormals": lambda *shape: sized(-132, 0, *shape),
}


def product(isa: str, x: torch.Tensor, weight: torch.Tensor | GroupedWeight) -> torch.Tensor:
    out = torch.empty(len(x), weight.shape[0])
    for _ in using_isa(isa):
        linear(x, PackedWeight(weight), out)
    return out


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    """Compare bits, except for the kind of NaN, which is not specified for products of several."""
    assert torch.equal(left.isnan(), right.isnan())
    assert torch.equal(left.nan_to_num().view(torch.int32), right.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_bfloat16(kind: str) -> None:
    torch.manual_seed(1)
    for _ in range(8):
        x, weight = KINDS[kind](ROWS, INPUTS), KINDS[kind](OUTPUTS, INPUTS)
        assert_same_bits(product("amx", x, weight), product("amx_emulated", x, weight))


def test_results_that_are_flushed_to_zero() -> None:
    """The smallest normal number less a little: a result counts as too small after it was rounded to 24 bits."""
    parts = torch.tensor([0.0, 2.0**-50, 0.125, 0.5, 0.5625, 1.0, 1.25, 2.0])
    for sign in (1, -1):
        x = torch.zeros(len(parts), 4, dtype=torch.bfloat16)
        x[:, 0], x[:, 2] = sign * 2.0**-63, -sign * parts * 2.0**-75
        weight = torch.tensor([[2.0**-63, 0, 2.0**-75, 0]], dtype=torch.bfloat16)
        out = product("amx_emulated", x, weight)
        assert_same_bits(product("amx", x, weight), out)
        assert (out[:, 0] != 0).tolist() == [part <= 0.5 for part in parts.tolist()]


def test_products_of_bytes() -> None:
    torch.manual_seed(1)
    x, weight = sized(-3, 3, ROWS, 300), quantize(sized(-3, 3, OUTPUTS, 300), "int8", group_size=128)
    assert_same_bits(product("amx", x, weight), product("amx_emulated", x, weight))

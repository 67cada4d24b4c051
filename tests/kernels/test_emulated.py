"""All cases of all kernels through the emulator; those that compare bits also in other orders of threads."""

from collections.abc import Callable

import pytest
import torch

from tests.kernels.cases import all_cases
from tests.kernels.emulator import EmulatorLauncher

BITWISE = {
    "cache_ops_cases": ("store_bfloat16_bfloat16", "rope_float16_float8_e4m3fn", "split_float32_float32", "copy"),
    "fused_cases": ("add_rms_norm_bfloat16", "rotate_half_80", "silu_float"),
    "recurrent_cases": ("delta_bits", "mamba_bits", "conv_bits", "delta_mixed"),
    "recurrent_chunks_cases": ("delta_chunks_saved", "mamba_chunks_rows"),
    "routing_cases": ("ties", "deepseek_v3"),
}
"""File -> cases that compare at least some results bit for bit."""


@pytest.mark.parametrize(
    ("file", "name"),
    [pytest.param(file, name, id=f"{file}: {name}") for file, cases in all_cases().items() for name in cases],
)
def test_case(file: str, name: str, emulator_for: Callable[[str], EmulatorLauncher]) -> None:
    all_cases()[file][name](emulator_for(file), torch.device("cpu"))


@pytest.mark.parametrize("order_seed", [1, 2, 3])
@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in BITWISE.items() for name in names])
def test_the_order_of_threads_does_not_show(
    file: str, name: str, order_seed: int, emulator_for: Callable[[str], EmulatorLauncher]
) -> None:
    emulator_for(file)
    all_cases()[file][name](EmulatorLauncher(order_seed), torch.device("cpu"))

"""The cases that the emulator runs on the CPU, on the device. `scripts/gpu_check` runs them without pytest."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import all_cases


@pytest.fixture(scope="module")
def launcher() -> Any:
    from vllm_lite.kernels.cuda.cupy_launcher import CupyLauncher

    return CupyLauncher()


@pytest.mark.parametrize(
    ("file", "name"),
    [pytest.param(file, name, id=f"{file}: {name}") for file, cases in all_cases().items() for name in cases],
)
def test_case(file: str, name: str, launcher: Any, device: torch.device) -> None:
    all_cases()[file][name](launcher, device)
    torch.cuda.synchronize(device)

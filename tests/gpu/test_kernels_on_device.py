"""The cases that the emulator runs on the CPU, on the device. `scripts/gpu_check` runs them without pytest."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

KERNELS = Path(__file__).parents[1] / "kernels"


def all_cases() -> list[Any]:
    return [
        pytest.param(case, id=f"{path.stem}: {name}")
        for path in sorted(KERNELS.glob("*_cases.py"))
        for name, case in import_module(f"tests.kernels.{path.stem}").CASES
    ]


@pytest.fixture(scope="module")
def launcher() -> Any:
    from vllm_lite.kernels.cuda.cupy_launcher import CupyLauncher

    return CupyLauncher()


@pytest.mark.parametrize("case", all_cases())
def test_case(case: Any, launcher: Any, device: torch.device) -> None:
    case(launcher, device)
    torch.cuda.synchronize(device)

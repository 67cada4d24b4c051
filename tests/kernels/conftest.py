"""Fixtures of the kernel tests: the launcher that runs CUDA sources on the CPU."""

import pytest

from tests.kernels import emulator
from tests.kernels.fused_cases import needed_by


@pytest.fixture(scope="session")
def launcher() -> emulator.EmulatorLauncher:
    if emulator.available() is None:
        pytest.skip("no C++ compiler for the emulator")
    return emulator.EmulatorLauncher()


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest, launcher: emulator.EmulatorLauncher) -> emulator.EmulatorLauncher:
    """With all that the `cases` of the module need, built at once."""
    for source, names in needed_by(request.module.cases.CASES).items():
        launcher.preload(source, names)
    return launcher

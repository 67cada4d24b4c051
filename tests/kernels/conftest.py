"""Fixtures of the kernel tests: the launcher that runs CUDA sources on the CPU."""

import pytest

from tests.kernels import emulator


@pytest.fixture(scope="session")
def launcher() -> emulator.EmulatorLauncher:
    if emulator.available() is None:
        pytest.skip("no C++ compiler for the emulator")
    return emulator.EmulatorLauncher()

"""Fixtures of the kernel tests: the launcher that runs CUDA sources on the CPU."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.kernels import emulator
from tests.kernels.cases import all_cases, needed_by


@pytest.fixture(scope="session")
def launcher() -> emulator.EmulatorLauncher:
    if emulator.available() is None:
        pytest.skip("no C++ compiler for the emulator")
    return emulator.EmulatorLauncher()


@pytest.fixture(scope="session")
def emulator_for(launcher: emulator.EmulatorLauncher) -> Callable[[str], emulator.EmulatorLauncher]:
    """Returns the launcher with all that the cases of a file need, built at once."""

    @cache
    def built(file: str) -> emulator.EmulatorLauncher:
        for source, names in needed_by(all_cases()[file].values()).items():
            launcher.preload(source, names)
        return launcher

    return built


@pytest.fixture(scope="module")
def emulated(
    request: pytest.FixtureRequest, emulator_for: Callable[[str], emulator.EmulatorLauncher]
) -> emulator.EmulatorLauncher:
    """The launcher for the module that a module of tests imports as `cases`."""
    return emulator_for(request.module.cases.__name__.rpartition(".")[2])

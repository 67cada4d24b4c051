"""Real checkpoints, tokenizers and templates, where scripts/fetch_real.py has put them. Tests of what is not there are
skipped."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.cache import folder_of


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """The folder of a package by its name in scripts/real_packages.py; skips the test if it is not in the cache."""

    def find(package: str) -> Path:
        folder = folder_of(package)
        if folder is None:
            pytest.skip(f"{package} is not in the cache; `make real` fetches it")
        return folder

    return find

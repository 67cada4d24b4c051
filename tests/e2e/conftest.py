"""References shared by the tests that run the whole road: client, engine and worker."""

from pathlib import Path

import pytest

from tests.e2e.reference import Reference, make_reference


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """By family, in float32; each is computed once."""
    folder: Path = tmp_path_factory.mktemp("references")
    return {family: make_reference(folder, family) for family in ("llama", "qwen3")}


@pytest.fixture(scope="session")
def llama(references: dict[str, Reference]) -> Reference:
    return references["llama"]

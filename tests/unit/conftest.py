"""Fixtures that several tests of one part share."""

from pathlib import Path

import pytest

from tests import tokenizers_for_tests as made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer of tests.clients; do not write to it."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_bytes(made.byte_level())
    return path

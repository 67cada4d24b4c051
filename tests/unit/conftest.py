"""Fixtures that several tests of one part share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import tokenizers_for_tests as made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer of tests.clients; do not write to it."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_bytes(made.byte_level())
    return path


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR of its own, short enough for sockets, where nothing may be left, nor a child; and a fake engine."""
    path = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setattr("vllm_lite.client.engines.launch.ENGINE_MODULE", "tests.fake_engine_process")
    before = set(psutil.Process().children(recursive=True))
    yield path
    assert list(path.iterdir()) == []
    path.rmdir()
    assert set(psutil.Process().children(recursive=True)) <= before

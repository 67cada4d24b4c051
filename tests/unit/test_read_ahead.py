"""Requests to the system before the workers load: every weight once, in small requests, within reason."""

import os
from pathlib import Path

import pytest

from tests.fakes import DEADLINE_S
from vllm_lite.checkpoint.tensors import read_ahead
from vllm_lite.checkpoint.tensors.read_ahead import REQUEST_BYTES, start_reading_ahead


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(file, first byte, number of bytes) of each request."""
    requests = []

    def fadvise(descriptor: int, at: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        requests.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, at, size))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    return requests


def read(folder: Path) -> None:
    thread = start_reading_ahead(str(folder))
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def write(folder: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        with (folder / f"{name.replace('_', '-')}.safetensors").open("wb") as stream:
            stream.truncate(size)


def test_all_weights_are_asked_for_in_order(tmp_path: Path, asked: list[tuple[str, int, int]]) -> None:
    write(tmp_path, model_2=10, model_1=2 * REQUEST_BYTES + 1, consolidated=10)
    read(tmp_path)
    first = "model-1.safetensors"
    assert asked == [(first, at * REQUEST_BYTES, REQUEST_BYTES) for at in range(3)] + [
        ("model-2.safetensors", 0, REQUEST_BYTES)
    ]


def test_not_more_than_half_of_the_memory(
    tmp_path: Path, asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "memory_limit_bytes", lambda: 6 * REQUEST_BYTES)
    write(tmp_path, model_1=2 * REQUEST_BYTES, model_2=9 * REQUEST_BYTES, model_3=9)
    read(tmp_path)
    assert [name for name, _, _ in asked] == ["model-1.safetensors"] * 2 + ["model-2.safetensors"]


def test_read_ahead_failures_are_ignored(tmp_path: Path, asked: list[tuple[str, int, int]]) -> None:
    read(tmp_path / "missing")
    (tmp_path / "model-1.safetensors").symlink_to(tmp_path / "nowhere")
    write(tmp_path, model_2=1)
    read(tmp_path)
    assert [name for name, _, _ in asked] == ["model-2.safetensors"]

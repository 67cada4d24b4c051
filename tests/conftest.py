"""Fixtures that many tests share."""

import os
import signal
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

# Tiny models gain nothing from threads, and OpenMP's spinning ones lose tenfold on a busy machine. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and the processes they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Only `pytest tests/gpu` sees a GPU: everything else is about the CPU, also where there is one."""
    if not all("tests/gpu" in arg for arg in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer random Llama in float32 and its tokenizer; do not write to it."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")

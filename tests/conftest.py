"""Fixtures that many tests share."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.deadlines import scaled

# Tiny models gain nothing from threads, and OpenMP's spinning ones lose tenfold on a busy machine. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without bytecode every process that a test starts compiles the package anew: a fifth of what a server's start costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the tests in the background has them ignore Ctrl-C, and the processes they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Only `pytest tests/gpu` sees a GPU: everything else is about the CPU, also where there is one."""
    if not all("tests/gpu" in arg for arg in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The `timeout` of pyproject.toml is for an idle machine. scripts/gpu_check has neither it nor the plugin."""
    limit_s = item.config.getini("timeout") if item.config.pluginmanager.hasplugin("timeout") else None
    if limit_s and item.config.getoption("timeout") is None and item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(scaled(float(limit_s))))
    return (yield)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer random Llama in float32 and its tokenizer; do not write to it."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")

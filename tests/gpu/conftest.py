"""Everything here needs an NVIDIA GPU with torch and CuPy for it; elsewhere all of it is skipped.

Run it by itself, as `pytest tests/gpu`: among other tests no GPU is seen (tests/conftest.py).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from vllm_lite.runtime.machine import lacks_for_cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lack = lacks_for_cuda() or (None if torch.cuda.is_available() else "torch sees no CUDA device")
    if lack:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=lack))


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """An error of an earlier test shows in that test, and memory is free for the next one."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    yield device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of heads that the CUDA kernels serve."""
    folder = tmp_path_factory.mktemp("gpu") / "llama"
    return make_checkpoint(folder, head_dim=64, hidden_size=128, dtype="bfloat16")

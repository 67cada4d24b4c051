"""The worker under test and the truth it is held against."""

from pathlib import Path
from typing import Any

import pytest

from tests.driver import Driver


@pytest.fixture
def driver(tiny_checkpoint: Path) -> Driver:
    return Driver(tiny_checkpoint)


@pytest.fixture(scope="session")
def oracle(tiny_checkpoint: Path) -> Any:
    """The tiny checkpoint in transformers."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)

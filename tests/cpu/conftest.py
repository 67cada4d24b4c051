"""The worker under test and the truth it is held against."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver import Driver
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.library import ISAS, function, int32


@pytest.fixture
def driver(tiny_checkpoint: Path) -> Driver:
    return Driver(tiny_checkpoint)


@pytest.fixture(scope="session")
def oracle(tiny_checkpoint: Path) -> Any:
    """The tiny checkpoint in transformers."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


@pytest.fixture(params=ISAS)
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test once on each instruction set that this machine has."""
    set_isa = function("vllm_lite_set_isa", (int32,), int32)
    before = ISAS.index(cpu.isa())
    if not set_isa(ISAS.index(request.param)):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    set_isa(before)

"""The worker under test and the truth it is held against."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.driver import Driver
from tests.isas import OF_THIS_MACHINE, PRODUCTS, VECTORS, isa_in_use
from tests.kernels import emulator
from tests.rows import DTYPES
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.fused import CpuOps
from vllm_lite.kernels.cpu.library import ISAS, function, int32
from vllm_lite.kernels.cpu.weights.linear import multiplies_bytes
from vllm_lite.kernels.ops import TorchOps
from vllm_lite.layers.weights import gpu_matmul, onednn


@pytest.fixture
def driver(tiny_checkpoint: Path) -> Driver:
    return Driver(tiny_checkpoint)


@pytest.fixture(scope="session")
def oracle(tiny_checkpoint: Path) -> Any:
    """The tiny checkpoint in transformers."""
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


def using_isa(name: str) -> Iterator[str]:
    with isa_in_use(name) as has_it:
        if not has_it:
            pytest.skip(f"this machine has no {name}")
        yield name


def has_amx() -> bool:
    return "amx" in OF_THIS_MACHINE


@pytest.fixture(params=VECTORS)
def each_vector_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test once on each set of vector instructions, for kernels that have no other code with AMX."""
    yield from using_isa(request.param)


@pytest.fixture(params=OF_THIS_MACHINE)
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test once on each instruction set that this machine has."""
    yield from using_isa(request.param)


@pytest.fixture(params=PRODUCTS)
def each_product_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same and, for products of matrices, AMX in plain C++."""
    yield from using_isa(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = cpu.num_threads()
    cpu.set_num_threads(2)
    yield
    cpu.set_num_threads(before)


@pytest.fixture
def float_products() -> Iterator[None]:
    """On an instruction set that multiplies int8 weights by floats, not by rows that it rounds as well."""
    if not cpu.available():
        yield
        return
    set_isa = function("vllm_lite_set_isa", (int32,), int32)
    before = ISAS.index(cpu.isa())
    for isa in range(before, -1, -1):
        if set_isa(isa) and not multiplies_bytes():
            break
    yield
    set_isa(before)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for a GPU, and none for a CPU."""
    if emulator.available() is None:
        pytest.skip("no C++ compiler for the emulator")
    launcher = emulator.EmulatorLauncher()
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(onednn, "pack", lambda _: None)
    monkeypatch.setattr(gpu_matmul, "launcher_for", lambda dtype, _: launcher if dtype in gpu_matmul.DTYPES else None)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> CpuOps:
    """Native operations that may not fall back on plain torch, with which they are compared."""
    for name in vars(TorchOps):
        if not name.startswith("_"):
            monkeypatch.setattr(TorchOps, name, None)
    return CpuOps()

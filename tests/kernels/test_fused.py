"""The fused operations through the emulator, and the errors of their Python side."""

import sys

import pytest
import torch

from tests.kernels import fused_cases as cases
from tests.kernels.emulator import EmulatorLauncher, check_orders
from vllm_lite.kernels import select
from vllm_lite.kernels.cuda import cupy_launcher
from vllm_lite.kernels.cuda.fused import CudaOps, vector_width
from vllm_lite.kernels.ops import Rotation, TorchOps
from vllm_lite.kernels.select import ops_for

CPU = torch.device("cpu")


@pytest.mark.usefixtures("emulated")
def test_sums_have_one_order() -> None:
    x, weight = cases.draw((4, 1000), torch.float32, CPU), torch.ones(1000)

    def normed(launcher: EmulatorLauncher) -> torch.Tensor:
        out = torch.empty_like(x)
        CudaOps(launcher).rms_norm(x, weight, 1e-6, out)
        return out

    check_orders(normed)


@pytest.mark.parametrize("dtype", cases.DTYPES.values())
def test_plain_torch_agrees(dtype: torch.dtype, emulated: EmulatorLauncher) -> None:
    """The float64 references of the cases and the reference implementation mean the same operations."""
    unit = torch.finfo(dtype).eps
    x, weight = cases.draw((3, 256), dtype, CPU), cases.draw((256,), dtype, CPU)
    residual = x.flip(0, 1)
    rotation = cases.draw_rotation(3, 32, dtype, CPU)
    results = []
    for ops in (TorchOps(), CudaOps(emulated)):
        copies = [tensor.clone() for tensor in (residual, x)]
        ops.add_rms_norm(copies[0], copies[1], weight, 1e-5, copies[1])
        heads = x.clone().view(3, 8, 32)
        ops.rotate(heads, rotation)
        gated = [torch.empty(3, 128, dtype=dtype) for _ in range(2)]
        ops.activate_and_mul("silu", x.clone(), gated[0])
        ops.activate_and_mul("gelu_tanh", x.clone(), gated[1])
        results.append([*copies, heads, *gated])
    for plain, native in zip(*results, strict=True):
        torch.testing.assert_close(native, plain, rtol=4 * unit, atol=4 * unit * float(plain.abs().max()))


def test_without_cupy_plain_torch_serves_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # which makes an import of it fail
    cupy_launcher.default_launcher.cache_clear()
    try:
        assert type(ops_for(torch.device("cuda"))) is TorchOps
    finally:
        cupy_launcher.default_launcher.cache_clear()


def test_with_a_launcher_the_kernels_serve_a_gpu(monkeypatch: pytest.MonkeyPatch, emulated: EmulatorLauncher) -> None:
    monkeypatch.setattr(select, "default_launcher", lambda: emulated)
    assert isinstance(ops_for(torch.device("cuda")), CudaOps)


def test_width_of_a_vector() -> None:
    x = torch.empty(4, 128, dtype=torch.bfloat16)
    assert vector_width(128, x) == 8
    assert vector_width(128, x.float()) == 4
    assert vector_width(64, x[:, 8:72]) == 8
    assert vector_width(64, x[:, 4:68]) == 1  # 8 bytes behind a multiple of 16
    assert vector_width(100, x) == 1
    assert vector_width(128, x, torch.empty(4, 132, dtype=torch.bfloat16)[:, :128]) == 1
    assert vector_width(128, x, torch.empty(1, 132, dtype=torch.bfloat16)[:, :128]) == 8  # one row has no next one
    assert vector_width(128, x, torch.empty(4, 128, dtype=torch.uint8)) == 8


def test_wrong_shapes_are_refused(emulated: EmulatorLauncher) -> None:
    ops, x = CudaOps(emulated), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"weight must be torch\.float32 \[8\]"):
        ops.rms_norm(x, torch.ones(4), 1e-5, x)
    with pytest.raises(ValueError, match="out must be"):
        ops.rms_norm(x, torch.ones(8), 1e-5, x.half())
    with pytest.raises(ValueError, match="with contiguous rows"):
        ops.rms_norm(x.t(), torch.ones(2), 1e-5, torch.empty(8, 2))
    with pytest.raises(ValueError, match="residual must be"):
        ops.add_rms_norm(torch.zeros(8, 2).t(), x, torch.ones(8), 1e-5, x)
    with pytest.raises(ValueError, match=r"cos must be .*\[2, 4\]"):
        ops.rotate(torch.zeros(2, 2, 4), Rotation(x, x))
    with pytest.raises(ValueError, match=r"even size .*got 3"):
        ops.rotate(torch.zeros(2, 2, 3), Rotation(torch.zeros(2, 3), torch.zeros(2, 3)))
    with pytest.raises(ValueError, match=r"gate_up must be .*\[2, 8\]"):
        ops.activate_and_mul("silu", torch.zeros(2, 6), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"gates must be torch\.float32 \[2, 1\]"):
        ops.add_gated(x, x, torch.zeros(2))
    with pytest.raises(ValueError, match=r"float64; kernels take"):
        ops.activate_and_mul("gelu_tanh", torch.zeros(2, 8).double(), torch.zeros(2, 4).double())

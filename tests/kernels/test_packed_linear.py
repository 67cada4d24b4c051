"""Products with packed quantized weights on CUDA through the emulator, and the errors of their Python side."""

import pytest
import torch

from tests.kernels import packed_linear_cases as cases
from tests.kernels.cases import Recorder
from tests.kernels.emulator import EmulatorLauncher, check_orders
from tests.kernels.fused_cases import draw
from vllm_lite.kernels.cuda.weights import packed_linear
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear
from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight
from vllm_lite.kernels.grouped import INT4, INT8, UINT4, GroupedWeight, quantize4

CPU = torch.device("cpu")


@pytest.mark.usefixtures("emulated")
def test_the_order_of_threads_does_not_show() -> None:
    stored = cases.weight(UINT4, 64, "zeros", cases.Sizes(64, 2100))
    x = draw((9, 2100), torch.bfloat16, CPU)
    check_orders(lambda launcher: cases.product(launcher, stored, x))


def test_the_order_of_packed_weights() -> None:
    """The order that csrc/cuda/packed_linear.cuh describes, element by element."""
    for values, bits in ((INT4, 4), (INT8, 8)):
        codes = torch.randint(len(values), (128, 128), dtype=torch.uint8)
        packed = GpuPackedWeight.of(GroupedWeight(codes, values, torch.ones(128, 1), 128), CPU)
        inputs = packed.chunk_inputs
        for output, given in ((0, 0), (77, 101), (127, 127), (8, 3), (16, 64), (63, 42)):
            h, r = divmod(output % 16, 8)
            q, within = divmod(given % 32, 8)
            (t, rest), span = divmod(within, 4), given % inputs // 32
            j, e = divmod(rest, 2)
            words = packed.codes[output // 16, given // inputs].view(torch.int32).view(32, 4)[4 * r + q]
            word, place = (2 * span + t, h + 2 * j + 4 * e) if bits == 4 else (2 * t + j, h + 2 * e)
            code = int(words[word]) >> (bits * place) & (len(values) - 1)
            assert code == int(codes[output, given]) ^ (0 if bits == 4 else 128), (bits, output, given)


def test_a_weight_has_the_bytes_of_its_codes_and_scales() -> None:
    stored = quantize4(draw((256, 1024), torch.bfloat16, CPU), 128)
    assert GpuPackedWeight.of(stored, CPU).num_bytes == 256 * 1024 * (4 + 16 / 128) / 8


@pytest.mark.parametrize(
    ("scale", "less", "expected"),
    [
        (torch.bfloat16, "nothing", torch.bfloat16),
        (torch.float16, "nothing", torch.float16),
        (torch.float32, "nothing", torch.float32),
        (torch.float16, "zeros", torch.float16),
        (torch.float16, "minima", torch.float32),
    ],
)
def test_scales_have_the_narrowest_type_that_holds_them(scale: torch.dtype, less: str, expected: torch.dtype) -> None:
    packed = GpuPackedWeight.of(cases.weight(UINT4 if less != "nothing" else INT4, 64, less, scale=scale), CPU)
    assert packed.scales.dtype == expected
    assert packed.less == less.upper()


def test_weights_without_a_kernel() -> None:
    def made(values: torch.Tensor, group_size: int) -> GroupedWeight:
        return GroupedWeight(torch.zeros(8, 64, dtype=torch.uint8), values, torch.ones(8, 64), group_size)

    for stored in (made(INT4, 16), made(INT4, 48), made(INT4.flip(0), 32), made(torch.randn(16), 32)):
        assert not GpuPackedWeight.takes(stored)
        with pytest.raises(ValueError, match=f"no kernel for 16 values in groups of {stored.group_size}"):
            GpuPackedWeight.of(stored, CPU)
    assert GpuPackedWeight.takes(made(INT4 / 2, 32)), "halves are whole numbers with other scales"


def test_other_tensors_are_refused(emulated: EmulatorLauncher) -> None:
    stored = cases.weight(INT4, 32)
    packed = GpuPackedWeight.of(stored, CPU)
    linear = PackedLinear(emulated, packed, None)
    x, out = torch.zeros(2, 200, dtype=torch.bfloat16), torch.zeros(2, 75, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x must be float16 or bfloat16 \[num_rows, 200\], got torch\.float32"):
        linear.forward(x.float(), out)
    with pytest.raises(ValueError, match=r"x must be .*\[2, 199\]"):
        linear.forward(x[:, 1:], out)
    with pytest.raises(ValueError, match=r"out must be torch\.bfloat16 or float32 \[2, 75\]"):
        linear.forward(x, out.half())
    with pytest.raises(ValueError, match="the bias must have 75 elements"):
        PackedLinear(emulated, packed, torch.zeros(74))


def test_no_launch_depends_on_the_rows_but_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph requires. The division of inputs into parts does not even depend on their number."""
    monkeypatch.setattr(packed_linear, "FEW_ROWS", 128)
    packed = GpuPackedWeight.of(cases.weight(INT4, 64, sizes=cases.Sizes(64, 2048)), CPU)
    recorder = Recorder()
    for num_rows in (1, 2, 8, 16, 33, 64):
        linear = PackedLinear(recorder, packed, None)
        linear.forward(torch.zeros(num_rows, 2048).half(), torch.zeros(num_rows, 64).half())
    products = [launch.grid for launch in recorder.launches if launch.name == "packed_linear"]
    assert {grid[2] for grid in products} == {2}
    assert [grid[:2] for grid in products] == [(4, 1), (4, 1), (2, 1), (1, 1), (1, 2), (1, 2)]

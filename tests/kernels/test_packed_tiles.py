"""Products of 17 to 128 rows with packed quantized weights on CUDA, through the emulator."""

import pytest
import torch

from tests.kernels import packed_tiles_cases as cases
from tests.kernels.cases import Recorder
from tests.kernels.emulator import check_orders
from tests.kernels.fused_cases import draw
from tests.kernels.packed_linear_cases import BF16, Sizes, weight
from vllm_lite.kernels.cuda.weights import packed_linear
from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear, tile_bytes
from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight
from vllm_lite.kernels.grouped import INT4, INT8, UINT4

CPU = torch.device("cpu")


@pytest.mark.usefixtures("emulated")
def test_the_order_of_threads_does_not_show() -> None:
    stored = weight(UINT4, 64, "zeros", Sizes(64, 1100))
    x = draw((19, 1100), BF16, CPU)
    check_orders(lambda launcher: cases.product(launcher, stored, x))


def test_rows_of_a_block_fill_the_multiprocessors_memory() -> None:
    """A block has as many rows as a multiprocessor's memory allows, depending only on the number of rows."""
    for multiprocessor_bytes, values, num_rows, tile, blocks in (
        (228 * 1024, INT4, 17, 4, 1),
        (228 * 1024, INT4, 33, 8, 1),
        (228 * 1024, INT8, 128, 8, 2),
        (100 * 1024, INT4, 64, 8, 1),
        (100 * 1024, INT8, 64, 4, 2),
        (0, INT8, 128, 4, 4),
    ):
        packed = GpuPackedWeight.of(weight(values, 128, sizes=Sizes(300, 512)), CPU)
        recorder = Recorder()
        recorder.multiprocessor_bytes = multiprocessor_bytes
        linear = PackedLinear(recorder, packed, None)
        linear.forward(torch.zeros(num_rows, 512).half(), torch.zeros(num_rows, 300).half())
        launch = recorder.launches[0]
        assert launch.kernel.endswith(f", {tile}>")
        assert launch.grid == (2, blocks, 1)
        assert launch.shared_bytes == tile_bytes(packed, tile, 2 if values is INT4 else 1)
        assert max(multiprocessor_bytes, 100 * 1024) - 1024 >= launch.shared_bytes


def test_the_kernel_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = GpuPackedWeight.of(weight(INT4, 128, sizes=Sizes(64, 128)), CPU)
    linear = PackedLinear(Recorder(), packed, None)
    said: list[tuple[int, bool | None]] = []
    monkeypatch.setattr(linear, "_by_codes", lambda x, _out, tiled: said.append((len(x), tiled)))
    monkeypatch.setattr(linear.many_rows, "forward", lambda x, _bias, _out: said.append((len(x), None)))
    for keeps_codes, bounds in ((False, (16, 17, 128, 129)), (True, (16, 17, 32, 33))):
        monkeypatch.setattr(linear.many_rows, "keeps_codes", keeps_codes)
        for num_rows in bounds:
            linear.forward(torch.zeros(num_rows, 128).half(), torch.zeros(num_rows, 64).half())
        assert said == list(zip(bounds, (False, True, True, None), strict=True))
        said.clear()
    assert packed_linear.FEW_ROWS == 16

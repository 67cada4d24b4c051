"""Quantized weights on a GPU: packed ones of checkpoints, and dense ones that are packed when they are loaded.

The product is kernels/cuda/weights/packed_linear.py. It takes rows of 16 bits, integers of 4 or 8 bits in groups of a
multiple of 32 consecutive inputs, and float8. Other weights become or stay dense.
"""

from typing import TYPE_CHECKING

import torch

from vllm_lite.checkpoint.quantization.on_load import Form
from vllm_lite.kernels.grouped import GroupedChunks, GroupedWeight, quantize_on_gpu

if TYPE_CHECKING:  # other devices need none of it
    from vllm_lite.kernels.cuda.launcher import Launcher
    from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear

DTYPES = (torch.float16, torch.bfloat16)
"""Types of the rows of a product."""
ELEMENTS_AT_ONCE = 1 << 23
"""Elements that are quantized at once: intermediate results take several floats for each."""


def launcher_for(dtype: torch.dtype, device: torch.device) -> "Launcher | None":
    """The launcher of products with rows of `dtype`; None if there is none."""
    if device.type != "cuda" or dtype not in DTYPES:
        return None
    from vllm_lite.kernels.cuda.cupy_launcher import default_launcher

    return default_launcher()


def packed_matmul(
    weight: GroupedWeight | GroupedChunks,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    float8_rows: bool = False,
) -> "PackedLinear | None":
    """Make the product with a quantized weight that stays packed on `device`; None if there is no kernel for it.
    float8_rows: whether rows may be rounded to float8 where that makes products of many rows faster."""
    launcher = launcher_for(dtype, device)
    if launcher is None:
        return None
    from vllm_lite.kernels.cuda.weights import many_rows
    from vllm_lite.kernels.cuda.weights.packed_linear import PackedLinear
    from vllm_lite.kernels.cuda.weights.packed_weight import GpuPackedWeight

    if not GpuPackedWeight.takes(weight.form if isinstance(weight, GroupedChunks) else weight):
        return None
    packed = GpuPackedWeight.of(weight, device)
    return PackedLinear(launcher, packed, bias, many_rows.for_weight(launcher, packed, float8_rows=float8_rows))


def quantized_matmul(weight: torch.Tensor, bias: torch.Tensor | None, quantization: Form) -> "PackedLinear | None":
    """Make the product with a dense weight quantized by `--quantization`; None if there is no kernel for it.
    weight: float [num_outputs, num_inputs]."""
    if launcher_for(weight.dtype, weight.device) is None:
        return None
    return packed_matmul(_in_chunks(weight, quantization), bias, weight.dtype, weight.device)


def _in_chunks(weight: torch.Tensor, quantization: Form) -> GroupedChunks:
    num_rows = max(1, ELEMENTS_AT_ONCE // (32 * max(1, weight.shape[1]))) * 32

    def make(rows: slice) -> GroupedWeight:
        return quantize_on_gpu(weight[rows], quantization)

    return GroupedChunks((weight.shape[0], weight.shape[1]), num_rows, make)
